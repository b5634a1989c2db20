"""`jaxengine replay`: run a step that `record_steps` wrote. Exit status 0 if its results are the same, 1 if they
differ, 2 if it cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxengine.models.kernel_rows import INTERPRETED, PLATFORM_OF_OPTION

BACKENDS = ("native", "cpu", "interpret", "xla")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of record_steps")
    parser.add_argument("--step", metavar="N", help="number of the step, or last (default)", default="last")
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="native",
        help="native: the recorded platform's kernels on such a device (default); cpu: the CPU's kernels; "
        "interpret: the recorded Pallas kernels, interpreted on the CPU; xla: plain XLA on the CPU",
    )
    parser.add_argument("--model", metavar="MODEL", help="the step's model, if it is elsewhere than the record says")
    kernels = [value for value, platform in PLATFORM_OF_OPTION.items() if platform in INTERPRETED]
    parser.add_argument("--kernels", choices=kernels, help="with interpret: whose kernels")
    parser.add_argument(
        "--tolerance",
        metavar="SHARE",
        type=float,
        help="share of an array's largest magnitude that may differ (default: 0 by the same kernels, by others 0.0001 "
        "in float32 and 0.05 in bfloat16)",
    )
    parser.add_argument("--plugins", metavar="PLUGIN", action="append", default=[], help="as serve's; may be repeated")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the step that `args` name again and print the findings. Return the exit status: 0 for equal results, 1 for
    different ones, 2 for a RecordError, which is printed to standard error.

    Raises ConfigError and ModelFileError for a model that cannot be opened.
    """
    from jaxengine.config.base.files import named_path
    from jaxengine.records.step_file import RecordError
    from jaxengine.replay.backends import prepare_devices
    from jaxengine.replay.record import read_engine
    from jaxengine.replay.replay import CANNOT, replay

    try:
        if args.step != "last" and not (args.step.isascii() and args.step.isdigit()):
            raise RecordError(f"--step is {args.step!r}; allowed: a number, or last")
        if args.tolerance is not None and not args.tolerance >= 0:
            raise RecordError(f"--tolerance is {args.tolerance}; allowed: 0 or more")
        folder = named_path("folder", args.folder)
        options = read_engine(folder)["options"]
        prepare_devices(args.backend, options["tensor_parallel_size"] * options["data_parallel_size"])
        report = replay(
            folder,
            None if args.step == "last" else int(args.step),
            args.backend,
            model=args.model,
            kernels=args.kernels,
            tolerance=args.tolerance,
            plugins=args.plugins,
        )
    except RecordError as error:
        print(f"jaxengine replay: cannot: {error}", file=sys.stderr)
        return CANNOT
    print("\n".join(report.lines))
    print("same" if report.first is None else f"differs: {report.first}")
    return report.status

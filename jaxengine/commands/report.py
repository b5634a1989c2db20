"""`jaxengine report`: writes one zip file for a bug report, with nothing secret in it.

collect-env.txt, options.json, plan.txt (with --chips), kernels.json, what the proofs of kernels found on this machine,
and the newest step that record_steps wrote, if a folder is named.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

from jaxengine.commands.collect_env import collected, without_home
from jaxengine.config.command_line import given_options, output_file
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model

DEFAULT_FILE = "jaxengine-report.zip"
# Options whose values are secret.
_SECRET = ("hf_token", "cluster_key_file", "bundle_key_file")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine report` to its parser, with `run` as the function that executes it."""
    add_model(parser)
    parser.add_argument(
        "-o", "--output", type=output_file, default=DEFAULT_FILE, metavar="FILE", help=f"default: {DEFAULT_FILE}"
    )
    parser.add_argument("--chips", metavar="NAME[:COUNT]", help="add `jaxengine plan` for these chips")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the zip file `args.output`, replacing an existing one, print its path and the names of its files, and
    return 0.

    It holds what collect-env prints, the options, the kernels' verdicts, the plan for args.chips, and the newest
    recorded step. Values of secret options are replaced by "(set)", and the home folder is shown as ~. Prints a
    warning if the file holds a recorded step. Raises ConfigError for options that an engine refuses, and OSError if the
    file cannot be written.
    """
    from jaxengine.runner.executables.verdicts import all_verdicts

    options = given_options(args, EngineConfig)
    config = EngineConfig.from_options(**options)
    shown = {name: "(set)" if name in _SECRET else value for name, value in options.items()}
    with zipfile.ZipFile(args.output, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("collect-env.txt", "\n".join([*collected(), ""]))
        file.writestr("options.json", without_home(json.dumps(shown, indent=1, default=str)))
        file.writestr("kernels.json", json.dumps(all_verdicts(config.compile_cache_dir), indent=1))
        if args.chips is not None:
            file.writestr("plan.txt", without_home(_plan(args)))
        steps = list(_step(config))
        for path in steps:
            file.write(path, f"steps/{path.name}")
        print(f"{args.output}: {', '.join(file.namelist())}")
    if steps:
        print("steps/ holds what users wrote, as token ids, keys and values: send it only if you may")
    return 0


def _plan(args: argparse.Namespace) -> str:
    """Return what `jaxengine plan` prints, followed by the error's type and message if it fails. Never raises an
    Exception.

    args: parsed arguments of `report`, with `chips`.
    """
    from jaxengine.plan import command

    own = {"length": command.DEFAULT_LENGTH, "compile": False, "price_per_hour": None, "json": False, "svg": None}
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            command.run(argparse.Namespace(**{**vars(args), **own, "chips": [args.chips]}))
    except Exception as error:  # the rest of the report is worth having
        text.write(f"{type(error).__name__}: {error}\n")
    return text.getvalue()


def _step(config: EngineConfig) -> Iterator[Path]:
    """Yield the engine's file and then the newest step's file from the folder that config.record_steps names.

    Yields nothing without record_steps or if the folder has no step.
    """
    if config.record_steps is None:
        return
    from jaxengine.records.folder import ENGINE_FILE, step_files

    folder = Path(config.record_steps).expanduser()
    steps = step_files(folder)
    if steps:
        yield folder / ENGINE_FILE
        yield steps[max(steps)]

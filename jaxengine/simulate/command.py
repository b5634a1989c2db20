"""The command `jaxengine simulate`: its arguments, and its order of work: read the trace, plan, run, report."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from jaxengine.config.command_line import given_options, output_file, positive_int
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import MODEL, add_engine_options

if TYPE_CHECKING:
    from jaxengine.simulate.report import Limits
    from jaxengine.simulate.setup import Setup
    from jaxengine.simulate.trace import Trace

SYNTHETIC = ("chat", "long", "shared", "agents")
OPTIMISE = ("buckets", "parallel")
ROUTERS = ("round_robin", "least_load", "prefix")
_OF_FLEET = ("router", "deaths", "drains", "restart_seconds", "publish_seconds")
_MOST_REPLICAS = 10_000
_DEFAULT_LENGTH = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, and set `run` as the function that executes the command."""
    about = "as `jaxengine plan` takes it, by its headers alone (default: the embedded SmolLM2-135M-Instruct)"
    parser.add_argument("--model", dest=MODEL, default=argparse.SUPPRESS, metavar="MODEL", help=about)
    trace = "a file of --record-trace, of Mooncake or of Azure, or a synthetic trace: " + ", ".join(SYNTHETIC)
    parser.add_argument("trace", metavar="TRACE", help=trace)
    parser.add_argument("--chips", metavar="NAME[:COUNT]", help="chips to simulate, as `jaxengine plan` names them")
    parser.add_argument("--costs", metavar="FILE", help="costs of steps by `jaxengine calibrate-costs`, not a roofline")
    parser.add_argument(
        "--efficiency", type=_share, default=1.0, metavar="SHARE", help="share of the roofline that steps reach"
    )
    parser.add_argument(
        "--host-seconds", type=_seconds, metavar="S", help="the host's work before a step, with a roofline (default: 0)"
    )
    parser.add_argument("--requests", type=positive_int, metavar="N", help="the first N requests (synthetic: 500)")
    parser.add_argument(
        "--rate", type=_positive, metavar="R", help="requests a second of a synthetic trace (default: 1)"
    )
    parser.add_argument("--scale", type=_positive, default=1.0, help="factor of a synthetic trace's lengths")
    parser.add_argument(
        "--trace-seed", type=_seed, default=0, metavar="SEED", help="of a synthetic trace, deaths, drains"
    )
    parser.add_argument(
        "--faster", type=_positive, default=1.0, metavar="FACTOR", help="divide all arrival times by this"
    )
    parser.add_argument("--at-once", action="store_true", help="all requests arrive at the beginning")
    parser.add_argument("--ttft", type=_positive, metavar="S", help="for goodput: most seconds to the first token")
    parser.add_argument("--itl", type=_positive, metavar="S", help="for goodput: most seconds between tokens, mean")
    parser.add_argument(
        "--optimise", choices=OPTIMISE, help="buckets: the fewest step shapes; parallel: every split over the chips"
    )
    parser.add_argument(
        "--within", type=_percent, default=0.02, metavar="PERCENT", help="what shapes may lose (default: 2)"
    )
    parser.add_argument(
        "--by",
        choices=("time", "padding"),
        default="time",
        help="what shapes lose: device time, or tokens (default: time)",
    )
    _add_fleet_arguments(parser)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def _add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a fleet to the parser. Those in `_OF_FLEET` are None unless given."""
    parser.add_argument("--replicas", type=positive_int, metavar="N", help="simulate N such engines behind a router")
    parser.add_argument(
        "--router",
        choices=ROUTERS,
        action="append",
        help="how it chooses; may be repeated (default: all, side by side)",
    )
    parser.add_argument("--deaths", type=_events, metavar="N", help="replicas that die during the trace (default: 0)")
    parser.add_argument("--drains", type=_events, metavar="N", help="replicas that are drained (default: 0)")
    parser.add_argument(
        "--restart-seconds", type=_wait, metavar="S", help="until another one takes their place (default: 60)"
    )
    parser.add_argument(
        "--publish-seconds", type=_wait, metavar="S", help="until the router sees what is cached (default: 1)"
    )


def run(args: argparse.Namespace) -> int:
    """Simulate a trace, on one engine or a fleet (--replicas), or choose step shapes or a split for it (--optimise);
    print the result, and write it to the --json file if given. Returns 0.

    Raises ConfigError for wrong arguments, options and traces, for a model that cannot be read or does not fit; OSError
    for files that cannot be read or written; RuntimeError if requests wait forever.
    """
    from jaxengine.plan.command import show_progress
    from jaxengine.simulate.costs import HostCosts, read_costs
    from jaxengine.simulate.report import Limits
    from jaxengine.simulate.setup import open_setup

    measured = None if args.costs is None else read_costs(args.costs)
    for name, value in (("efficiency", args.efficiency != 1.0), ("host_seconds", args.host_seconds is not None)):
        if measured is not None and value:
            raise ConfigError(name, getattr(args, name), "absent with --costs, which were measured")
    _check_fleet(args)
    options = given_options(args, EngineConfig)
    host, limits = HostCosts(dispatch=args.host_seconds or 0.0), Limits(args.ttft or math.inf, args.itl or math.inf)
    with open_setup(options, args.chips, measured, args.efficiency, host, show_progress) as setup:
        trace = _trace(args, setup)
        work = {"buckets": _buckets, "parallel": _parallel, None: _run if args.replicas is None else _fleet}[
            args.optimise
        ]
        work(args, setup, trace, limits)
    return 0


def _trace(args: argparse.Namespace, setup: Setup) -> Trace:
    """Return the trace that `args` name: the first --requests requests of a file, or a synthetic trace of that many
    (default: 500). Its arrival times are divided by --faster, or all 0 with --at-once.

    Raises ConfigError for --rate with a file, and for what `read_trace` and `synthetic` refuse; OSError for a file that
    cannot be read.
    """
    from jaxengine.simulate.synthetic import synthetic
    from jaxengine.simulate.trace import read_trace

    if args.trace in SYNTHETIC:
        length = min(_DEFAULT_LENGTH, setup.plan.config.max_model_len)
        trace = synthetic(args.trace, args.requests or 500, args.rate or 1.0, length, args.trace_seed, args.scale)
    elif args.rate is not None:
        raise ConfigError("rate", args.rate, "absent with a file; --faster changes how fast its requests come")
    else:
        trace = read_trace(args.trace).first(args.requests)
    return trace.at_once() if args.at_once else trace.faster(args.faster)


def _run(args: argparse.Namespace, setup: Setup, trace: Trace, limits: Limits) -> None:
    """Simulate the trace on the best split, print the result, and write it to the --json file if given.

    Raises ConfigError if the model does not fit or the chip has no figures, OSError if the file cannot be written.
    """
    from jaxengine.results import write_json
    from jaxengine.simulate.report import as_json, text

    outcome = setup.run(trace)
    print(text(outcome, _head(setup, trace), limits))
    write_json(args.json, {**_about(setup), **as_json(outcome, limits)})


def _check_fleet(args: argparse.Namespace) -> None:
    """Raise ConfigError for an argument of a fleet without --replicas, for --optimise with --replicas, and for more
    than _MOST_REPLICAS replicas.
    """
    for name in _OF_FLEET if args.replicas is None else ():
        if getattr(args, name) is not None:
            raise ConfigError(name, getattr(args, name), "absent without --replicas")
    if args.replicas is not None and args.optimise is not None:
        raise ConfigError("optimise", args.optimise, "absent with --replicas")
    if args.replicas is not None and args.replicas > _MOST_REPLICAS:
        raise ConfigError("replicas", args.replicas, f"at most {_MOST_REPLICAS}")


def _fleet(args: argparse.Namespace, setup: Setup, trace: Trace, limits: Limits) -> None:
    """Simulate the trace on a fleet once for each router that --router names, for every one if it names none, print the
    results, and write them to the --json file if given.
    """
    from jaxengine.results import write_json
    from jaxengine.simulate.fleet import FleetOptions
    from jaxengine.simulate.fleet_report import fleet_json, fleet_text

    given = {name: getattr(args, name) for name in _OF_FLEET[1:] if getattr(args, name) is not None}
    options = FleetOptions(args.replicas, **given, seed=args.trace_seed)
    outcomes = [setup.run_fleet(trace, options, router) for router in args.router or ROUTERS]
    print(fleet_text(outcomes, _head(setup, trace), limits))
    found = {"trace": trace.name, "routers": [fleet_json(outcome, limits) for outcome in outcomes]}
    write_json(args.json, {**_about(setup), **found})


def _buckets(args: argparse.Namespace, setup: Setup, trace: Trace, limits: Limits) -> None:
    """Choose step shapes for the trace, and print them as the option compilation_config, together with runs with the
    old and the new shapes. Writes both to the --json file if given.

    The steps of the run with the old shapes decide the choice. args.by: whether the loss is device time or padding.
    args.within: the share that shapes may lose. Raises ConfigError if the new shapes do not fit.
    """
    from jaxengine.config.execution.compilation_config import CompilationConfig
    from jaxengine.results import table, write_json
    from jaxengine.simulate.buckets import choose
    from jaxengine.simulate.report import as_json, row

    plan, before = setup.plan, setup.run(trace)
    costs, config = setup.costs(plan) if args.by == "time" else None, plan.config
    shapes = choose(before.steps, costs, config.max_num_seqs, config.max_num_batched_tokens, args.within)
    chosen = {"cudagraph_capture_sizes": list(shapes.decode), "prefill_sizes": list(shapes.mixed)}
    other = setup.with_shapes(CompilationConfig(shapes.decode, shapes.mixed))
    if other.error is not None:
        raise other.error
    after = setup.run(trace, other)
    rows = []
    for name, own, outcome in (("now", plan, before), ("chosen", other, after)):
        rows.append({**row(name, outcome, limits), "programs": own.num_programs})
        rows[-1]["device s"] = sum(step.seconds for step in outcome.steps)
    print("\n".join(_head(setup, trace)))
    print(table(rows))
    what = "of the time" if args.by == "time" else "padding over their tokens"
    print(f"of the steps as they were, the chosen shapes lose {shapes.lost / max(shapes.least, 1e-9):.2%} {what}")
    option = f"--compilation-config {shlex.quote(json.dumps(chosen))}"
    print(option)
    found = {name: as_json(outcome, limits) for name, outcome in (("now", before), ("chosen", after))}
    programs = {"programs_now": plan.num_programs, "programs_chosen": other.num_programs}
    write_json(args.json, {**_about(setup), "compilation_config": chosen, **programs, **found})


def _parallel(args: argparse.Namespace, setup: Setup, trace: Trace, limits: Limits) -> None:
    """Run the trace on every split that fits, print the results, the best first, and write them to the --json file if
    given. Raises ConfigError with --costs, and if no split fits.
    """
    from jaxengine.results import table, write_json
    from jaxengine.simulate.report import as_json
    from jaxengine.simulate.splits import run_splits

    if setup.measured is not None:
        raise ConfigError("costs", args.costs, "absent with --optimise parallel: other splits were not measured")
    runs = run_splits(setup, trace, limits)
    print("\n".join(_head(setup, trace)))
    print(table([each.row(limits) for each in runs]))
    best = runs[0]
    print(best.plan.split.flags or "one device: nothing to split")
    splits = [{"options": each.plan.split.options, **as_json(each.outcome, limits)} for each in runs]
    write_json(args.json, {**_about(setup), "splits": splits})


def _head(setup: Setup, trace: Trace) -> list[str]:
    """Return two lines of text: the trace, model, chips, split and pages that are simulated, and the source of the
    costs.
    """
    plan = setup.plan
    config = plan.config
    flags = f" with {plan.split.flags}" if plan.split.flags else ""
    name = config.model or setup.model.source.path.name
    kind = f"{len(trace.requests):,} requests over {trace.requests[-1].arrival:,.1f} s"
    return [
        f"{trace.name}, {kind}: {name} on {setup.chips}{flags}, {setup.num_pages(plan):,} pages of {config.block_size}",
        f"  steps cost: {setup.costs(plan).about}",
    ]


def _about(setup: Setup) -> dict[str, Any]:
    """Return the JSON values that describe the simulation, for its --json file.

    The keys are "model", "chips", the options of the split, "num_pages" (of a replica) and "costs" (their source).
    """
    plan = setup.plan
    return {
        "model": plan.config.model,
        "chips": str(setup.chips),
        **plan.split.options,
        "num_pages": setup.num_pages(plan),
        "costs": setup.costs(plan).about,
    }


def _read(text: str, least: float, most: float, allowed: str) -> float:
    """Return the number in a text, which must be from `least` to `most`, both included. Raises ArgumentTypeError
    otherwise. allowed: what the error's message says is allowed.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return number


def _share(text: str) -> float:
    """Return the number in a text, a share from 0.01 to 1. Raises ArgumentTypeError for any other text."""
    return _read(text, 0.01, 1.0, "a share from 0.01 to 1")


def _seconds(text: str) -> float:
    """Return the number of seconds in a text, from 0 to 60. Raises ArgumentTypeError for any other text."""
    return _read(text, 0.0, 60.0, "a number of seconds from 0 to 60")


def _wait(text: str) -> float:
    """Return the number of seconds in a text, from 0 to 1e6. Raises ArgumentTypeError for any other text."""
    return _read(text, 0.0, 1e6, "a number of seconds from 0 to 1e6")


def _events(text: str) -> int:
    """Return the whole number in a text of 1 to 6 digits. Raises ArgumentTypeError for any other text."""
    return _whole(text, 6)


def _seed(text: str) -> int:
    """Return the whole number in a text of 1 to 18 digits. Raises ArgumentTypeError for any other text."""
    return _whole(text, 18)


def _whole(text: str, digits: int) -> int:
    """Return the whole number that a text of 1 to `digits` ASCII digits represents. Raises ArgumentTypeError for other
    texts.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= digits):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {'9' * digits}")
    return int(text)


def _positive(text: str) -> float:
    """Return the number in a text, from 1e-9 to 1e9. Raises ArgumentTypeError for any other text."""
    return _read(text, 1e-9, 1e9, "a number above 0, at most 1e9")


def _percent(text: str) -> float:
    """Return the share (0 to 1) for a text with a percentage from 0 to 100. Raises ArgumentTypeError for other
    texts.
    """
    return _read(text, 0.0, 100.0, "a percentage from 0 to 100") / 100

"""The command `jaxengine calibrate-costs`: its arguments."""

from __future__ import annotations

import argparse

from jaxengine.config.command_line import given_options, output_file, positive_int
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, and set `run` as the function that executes the command."""
    add_model(parser)
    parser.add_argument(
        "--output", type=output_file, required=True, metavar="FILE", help="file to write, for simulate --costs"
    )
    parser.add_argument("--rounds", type=positive_int, default=2, help="how often each load runs")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start an engine, measure its steps in `args.rounds` rounds, write the costs to the file `args.output`, and print
    them.

    Returns 0. Raises the errors of `calibrate_costs`, and OSError if the file cannot be written.
    """
    from jaxengine.simulate.calibrate import calibrate_costs, text

    options = given_options(args, EngineConfig)
    costs = calibrate_costs(options, args.rounds)
    costs.write(args.output)
    print(text(costs))
    return 0

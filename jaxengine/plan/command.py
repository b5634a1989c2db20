"""The command `jaxengine plan`: its arguments, and its order of work: open, plan every split, report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxengine.config.base.lengths import given_length
from jaxengine.config.command_line import given_options, output_file, positive_int
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model
from jaxengine.plan.chips import CHIPS, read_chips

DEFAULT_LENGTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    about = (
        "a Hugging Face folder, a GGUF file, a hub id (of which no weights are downloaded), or a shape that jaxengine "
        "check knows, such as llama-3.1-8b (default: the embedded SmolLM2-135M-Instruct)"
    )
    add_model(parser, help=about)
    parser.add_argument(
        "--chips",
        action="extend",
        nargs="+",
        metavar="NAME[:COUNT]",
        help=f"chips to plan for, several sets one after the other: {', '.join(CHIPS)} (default: cpu)",
    )
    parser.add_argument(
        "--length", type=positive_int, default=DEFAULT_LENGTH, metavar="TOKENS", help="tokens of a sequence to count"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile what a start compiles, in place of an estimate of it"
    )
    parser.add_argument("--price-per-hour", type=_price, metavar="PRICE", help="of one device, for the cost of tokens")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="draw the memory of one device there")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan for each set of chips in `args`, print the results as text or JSON, and draw each set's memory in the --svg
    file, if given, or with several sets in one file each, named after it. Sequences have --length tokens, but no more
    than max_model_len or, without it, the model's limit. Returns 1 if the model does not fit on one of the sets, else
    0.

    Raises ConfigError for invalid arguments and options or several nodes, the errors of an engine start for a model
    that cannot be read, and OSError for a drawing that cannot be written.
    """
    from jaxengine.plan import report
    from jaxengine.plan.compiled import compiler_of
    from jaxengine.plan.model import open_planned
    from jaxengine.plan.plan import PARALLEL, platform_for
    from jaxengine.plan.splits import rank_splits
    from jaxengine.runner.start.memory_bar import svg

    sets = [read_chips(text) for text in args.chips or ["cpu"]]
    options = given_options(args, EngineConfig)
    config = EngineConfig.from_options(**options)
    given = {name: options[name] for name in PARALLEL if name in options}
    if config.nnodes > 1:
        raise ConfigError("nnodes", config.nnodes, "1: a plan counts devices, wherever they are")
    found: list[Any] = []
    status = 0
    for chips in sets:
        model = open_planned(config, platform_for(chips.chip))
        try:
            length = min(args.length, given_length(config.max_model_len) or model.source.config.max_position_embeddings)
            compiled = compiler_of(chips, config.model, options) if args.compile else None
            ranked = rank_splits(model, chips, given, length, show_progress, compiled)
            status |= not ranked[0].fits
            if args.json:
                found.append(report.as_json(model, chips, ranked, length, args.price_per_hour))
            else:
                print(report.text(model, chips, ranked, length, args.price_per_hour))
            if args.svg is not None and (plan := ranked[0].plan) is not None:
                title = f"{config.model or 'the embedded model'} on {chips} {plan.split.flags}".rstrip()
                drawn = svg(title, plan.parts(), plan.total)
                Path(_name(args.svg, chips, len(sets))).write_text(drawn, encoding="utf-8")
        finally:
            model.close()
    if args.json:
        print(json.dumps(found, indent=2))
    return status


def _name(path: str, chips: object, count: int) -> str:
    """Return the path of a drawing: `path` if there is one set of chips (`count`), else `path` with "-" and the chips,
    "x" in place of ":", inserted before the suffix.
    """
    if count == 1:
        return path
    file = Path(path)
    return str(file.with_name(f"{file.stem}-{str(chips).replace(':', 'x')}{file.suffix}"))


def _price(text: str) -> float:
    """Parse a price, a finite number above 0. Raises ArgumentTypeError for other texts."""
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a price, a number above 0")
    return price


def show_progress(what: str) -> None:
    """Print `what` over the last line of stderr, without a line break; nothing unless stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r{what:<60}", end="\r", file=sys.stderr, flush=True)

"""`jaxengine complete`: continues each text that is entered, without a chat template, with a local
model or a server's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxengine.commands.chat import local_pieces, read_line, speed, use_readline
from jaxengine.commands.remote import Piece, add_url_options, check_sampling_options, remote_model
from jaxengine.commands.sampling_options import SAMPLING_OPTIONS
from jaxengine.config.command_line import add_options, given_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model
from jaxengine.logs import only_warnings
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine complete` to its parser, with `run` as the function that executes it."""
    add_model(parser)
    add_url_options(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="continue this text and leave")
    add_options(parser, "sampling options", SamplingParams, SAMPLING_OPTIONS)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Continue texts read from the terminal until the end of input or Ctrl-C; return the exit status 0.

    With --quick, continue only that text and return 1 if it is refused, else 0. Raises RequestError for wrong sampling
    options, before a model is loaded. Raises ConfigError for options that a server or an engine does not take and for a
    server that does not answer, and the model errors of `LLM`.
    """
    engine_options, sampling_options = given_options(args, EngineConfig), given_options(args, SamplingParams)
    check_sampling_options(args, sampling_options)
    remote = remote_model(args, engine_options, sampling_options)
    complete = _local(engine_options, sampling_options) if remote is None else remote.complete
    if args.quick is not None:
        return 0 if _show(complete, args.quick) else 1
    use_readline("Ctrl-D leaves.")
    while (text := read_line("> ")) is not None:
        if text:
            _show(complete, text)
    return 0


def _local(engine_options: Mapping[str, Any], sampling_options: Mapping[str, Any]) -> Callable[[str], Iterator[Piece]]:
    """Load a model; return a function that streams the continuation of a text as Pieces.

    engine_options: fields of EngineConfig. sampling_options: fields of SamplingParams that override the model's
    defaults. Sets the log level to warnings after loading. Iterating over the result of the returned function raises
    RequestError for a text that is refused. Raises the errors of `LLM` for options or a model that cannot be loaded.
    """
    from jaxengine.api.llm import LLM

    llm = LLM(**engine_options)
    only_warnings()
    params = llm.get_default_sampling_params().clone_with(**sampling_options, output_kind=RequestOutputKind.DELTA)
    return lambda text: local_pieces(llm, {"prompt": text}, params)


def _show(complete: Callable[[str], Iterator[Piece]], text: str) -> bool:
    """Print the continuation of a text to stdout and its timing to stderr; return False if the text was refused, else
    True.

    complete: function that streams the continuation of a text. Ctrl-C ends the continuation, and the result is still
    True. The message of a refusal goes to stderr. No timing is printed if no text arrived. Raises ConfigError if the
    connection to a server is lost.
    """
    times, num_tokens, start = [], 0, time.monotonic()
    try:
        for piece in complete(text):
            print(piece.text, end="", flush=True)
            num_tokens += piece.num_tokens
            if piece.text:
                times.append(time.monotonic())
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    except RequestError as error:
        print(error, file=sys.stderr)
        return False
    print(flush=True)
    if times:
        print(f"[{speed(num_tokens, times[0] - start, times[-1] - times[0])}]", file=sys.stderr)
    return True

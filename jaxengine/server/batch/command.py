"""The command `jaxengine run-batch`: its arguments and its steps: read all lines, start the engine, answer, write."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxengine.config.command_line import add_options, given_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model
from jaxengine.server.base.options import ServerConfig

if TYPE_CHECKING:
    from jaxengine.server.batch.lines import BatchLine
    from jaxengine.server.batch.results import Results

# Server options that apply to a batch; the others are about sockets and processes.
SERVER_OPTIONS = (
    "served_model_name",
    "lora_modules",
    "max_n",
    "max_prompts",
    "max_captured_bytes",
    "max_request_bytes",
    "chat_template_kwargs_allowed",
    "default_chat_template_kwargs",
    "exclude_tools_when_tool_choice_none",
    "trust_request_chat_template",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
    "response_role",
    "return_tokens_as_token_ids",
    "enable_per_request_metrics",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine run-batch` to a parser, and set `run` as its function."""
    add_model(parser)
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="requests: one JSON object a line, OpenAI's batch form",
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="results, in the order of the requests; FILE.partial lies beside it until all are there, and a batch that "
        "was ended goes on from it",
    )
    add_options(parser, "server options", ServerConfig, SERVER_OPTIONS)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the requests of a file that have no result yet, and write the output file. Return 0, even if some requests
    failed: their results contain the errors.

    Prints the progress and the numbers of results to stderr. After an error the results so far are kept, and the same
    command continues from them. args: options of `add_arguments`. Raises ConfigError for invalid options, a line that
    is not a request, or results of another batch; OSError for files that cannot be written; the engine's errors.
    """
    from jaxengine.server.batch.lines import read_lines
    from jaxengine.server.batch.results import Results

    of_server, options = given_options(args, ServerConfig), given_options(args, EngineConfig)
    server = ServerConfig(**of_server)
    config = EngineConfig.from_options(**options)
    config.structured_outputs_config.check_for_server()
    lines, digest = read_lines(args.input_file)
    batch = json.dumps([digest, config.model, sorted(map(str, of_server.items()))])
    with Results(args.output_file, batch, args.input_file) as results:
        left = [line for line in lines if line.custom_id not in results.known]
        if len(left) < len(lines):
            print(f"{len(lines) - len(left)} of {len(lines)} results are there already", file=sys.stderr)
        try:
            num_failed = asyncio.run(_answer(left, results, server, options)) if left else 0
        except BaseException:
            if results.known:
                kept = f"{len(results.known)} of {len(lines)} results are kept"
                print(f"{kept}; the same command goes on", file=sys.stderr)
            raise
        results.finish(lines)
    print(f"{len(lines)} results in {args.output_file}, {num_failed} of {len(left)} requests failed", file=sys.stderr)
    return 0


async def _answer(lines: list[BatchLine], results: Results, server: ServerConfig, options: dict[str, Any]) -> int:
    """Answer `lines` with a new engine, twice as many at once as it runs, adding each answer to `results`, and return
    how many requests failed, which is those with HTTP status 400 or above.

    options: options of the engine, which is shut down at the end, also after an error. Raises ConfigError for invalid
    options, OSError for results that cannot be written, and the engine's errors.
    """
    from tqdm import tqdm

    from jaxengine.api.async_llm import AsyncLLM
    from jaxengine.server.adapters.lora import load_adapters
    from jaxengine.server.batch.run import call, run_lines
    from jaxengine.server.http.app import create_app

    engine = AsyncLLM(**options)
    num_failed = num_tokens = 0
    try:
        load_adapters(engine.core, server)
        app = create_app(engine, server)
        runner = engine.core.runner
        assert runner.config.max_num_seqs is not None
        # Twice as many as run at once: one is waiting whenever another ends.
        concurrency = 2 * runner.config.max_num_seqs * runner.config.data_parallel_size
        with tqdm(total=len(lines), desc="Requests", unit="request", disable=None) as bar:

            def done(line: BatchLine, status: int, answer: Any) -> None:
                """Count a failed request (status 400 or above) and the tokens of an answer, and advance the progress
                bar.
                """
                nonlocal num_failed, num_tokens
                num_failed += status >= 400
                usage = answer.get("usage") if isinstance(answer, dict) else None
                num_tokens += (usage or {}).get("completion_tokens") or 0
                bar.set_postfix(failed=num_failed, tokens=num_tokens, refresh=False)
                bar.update()

            await run_lines(partial(call, app), lines, results, concurrency, engine.check_health, done)
    finally:
        engine.shutdown()
    return num_failed

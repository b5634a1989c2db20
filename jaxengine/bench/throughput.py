"""`jaxengine bench throughput`: output tokens per second of a recorded workload, random requests or a ragged trace.

With `--trace` also the gains of paged attention: the share of empty token slots in allocated pages, and the speedup
over static batches in the same engine.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from jaxengine.bench.workloads import NAMES, add_fixed_flags
from jaxengine.config.command_line import given_options, output_file, positive_int
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.bench.engine_run import Run
    from jaxengine.bench.workloads import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    add_model(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workload", choices=NAMES, help="a recorded workload of the default model")
    what.add_argument("--trace", action="store_true", help="log-normal lengths; also KV waste and static batches")
    parser.add_argument(
        "--num-prompts", type=positive_int, default=128, help="number of random requests, or of the trace"
    )
    parser.add_argument(
        "--input-len", "--random-input-len", type=positive_int, default=128, help="prompt tokens of random requests"
    )
    parser.add_argument(
        "--output-len", "--random-output-len", type=positive_int, default=64, help="new tokens of random requests"
    )
    add_fixed_flags(parser)
    parser.add_argument(
        "--num-runs", type=positive_int, default=2, help="number of runs, each with an empty cache; the fastest counts"
    )
    parser.add_argument("--json", "--output-json", type=output_file, metavar="FILE", help="write the result there")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load an engine, measure the workload that `args` choose, print the figures of the fastest run, and return 0.

    With args.trace it also measures static batches. Writes the figures to the --json file. Raises ConfigError,
    ModelConfigError or ModelFileError if the engine cannot start, RequestError if it refuses a request, ValueError for
    a trace at a max_model_len below 16, and OSError if the file cannot be written.
    """
    from jaxengine import LLM
    from jaxengine.results import record, table, write_json

    llm = LLM(**given_options(args, EngineConfig))
    workload = _workload(args, llm)
    result = measure(llm, workload, args.num_runs)
    if args.trace:
        result |= measure_static(llm, workload, result["output_tokens_per_second"])
    print(record({name: value for name, value in result.items() if not isinstance(value, dict)}))
    print("\nms a step, by part\n" + table([result["timeline_ms_per_step"]]))
    write_json(args.json, result)
    return 0


def _workload(args: argparse.Namespace, llm: LLM) -> Workload:
    """Return the workload that the arguments choose: a recorded one, a ragged trace, or random requests of fixed
    lengths.

    Random token ids are below the engine's vocabulary size. Requests of a trace have at most 1024 tokens, and at most
    max_model_len.
    """
    from jaxengine.bench.workloads import fixed_lengths, ragged_trace, recorded

    runner = llm.core.runner
    if args.workload:
        return recorded(args.workload)
    if args.trace:
        assert runner.config.max_model_len is not None
        return ragged_trace(args.num_prompts, runner.vocab_size, min(1024, runner.config.max_model_len))
    return fixed_lengths(args.num_prompts, args.input_len, args.output_len, runner.vocab_size)


def measure(llm: LLM, workload: Workload, num_runs: int) -> dict[str, Any]:
    """Run a workload `num_runs` times (at least 1) with an empty prefix cache; return the figures of the fastest run.

    The keys are "workload", "dtype", "requests", "seconds", "output_tokens_per_second", "total_tokens_per_second",
    "first_token_seconds" (the mean), "cached_tokens", "kv_waste_percent" (empty token slots), "padding_percent",
    "same_as_reference" ("N of M" requests; None without a reference) and "timeline_ms_per_step", the milliseconds of
    each part of a step. Raises RequestError for a request that the engine refuses.
    """
    from jaxengine.bench.engine_run import run_workload

    best = min((run_workload(llm, workload) for _ in range(num_runs)), key=lambda done: done.seconds)
    return {
        "workload": workload.name,
        "dtype": llm.core.runner.config.dtype,
        "requests": len(best.outputs),
        "seconds": round(best.seconds, 3),
        "output_tokens_per_second": round(best.output_tokens / best.seconds, 1),
        "total_tokens_per_second": round((best.output_tokens + best.prompt_tokens) / best.seconds, 1),
        "first_token_seconds": _mean(best.first_token_seconds),
        "cached_tokens": best.cached_tokens,
        "kv_waste_percent": round(best.kv_waste * 100, 2),
        "padding_percent": round(100 * best.stats["num_padding_tokens"] / max(1, best.stats["num_tokens"]), 1),
        "same_as_reference": _same(best, workload),
        "timeline_ms_per_step": best.timeline(),
    }


def measure_static(llm: LLM, workload: Workload, tokens_per_second: float) -> dict[str, Any]:
    """Run a workload in static batches of max_num_seqs requests; return their figures and the engine's speedup over
    them.

    The keys are "static_batch_size", "static_output_tokens_per_second" and "times_static". tokens_per_second: output
    tokens per second without static batches, for the speedup. Raises RequestError for a request that the engine
    refuses.
    """
    from jaxengine.bench.engine_run import run_static

    batch_size = llm.core.runner.config.max_num_seqs
    assert batch_size is not None
    seconds, tokens = run_static(llm, workload, batch_size)
    return {
        "static_batch_size": batch_size,
        "static_output_tokens_per_second": round(tokens / seconds, 1),
        "times_static": round(tokens_per_second * seconds / tokens, 2),
    }


def _mean(values: list[float]) -> float | None:
    """Return the mean, rounded to four decimals; None without values."""
    return round(sum(values) / len(values), 4) if values else None


def _same(done: Run, workload: Workload) -> str | None:
    """Return "N of M": how many of M requests have the reference's tokens; None if the workload has no reference."""
    if not workload.reference:
        return None
    pairs = zip(done.outputs, workload.reference, strict=True)
    same = sum(tuple(output.outputs[0].token_ids) == reference for output, reference in pairs)
    return f"{same} of {len(workload.reference)}"

"""`jaxengine bench latency`: time to first token, time between tokens and total time of one batch, and the roofline.

A decode step has to read the weights once, so its lower bound is weight bytes over memory bandwidth. The bandwidth is
measured in this process.
"""

from __future__ import annotations

import argparse
import time

from jaxengine.bench.workloads import add_fixed_flags
from jaxengine.config.command_line import given_options, output_file, positive_int
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    add_model(parser)
    parser.add_argument("--batch-size", type=positive_int, default=1, help="requests that arrive at once")
    parser.add_argument("--input-len", type=positive_int, default=128, help="prompt tokens of each request")
    parser.add_argument("--output-len", type=positive_int, default=128, help="new tokens of each request")
    parser.add_argument(
        "--num-runs",
        "--num-iters",
        type=positive_int,
        default=5,
        help="number of runs; percentiles are over the requests of all runs",
    )
    add_fixed_flags(parser)
    parser.add_argument("--json", "--output-json", type=output_file, metavar="FILE", help="write the result there")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Load an engine and measure `args.num_runs` batches; print latencies, the time of a step's parts and the roofline.

    Latencies are the mean and percentiles of times to first token, between tokens and of whole runs. Writes all to the
    --json file and returns 0. Raises ConfigError, ModelConfigError or ModelFileError if the engine
    cannot start, RequestError if it refuses the requests, and OSError if the file cannot be written.
    """
    from jaxengine import LLM
    from jaxengine.bench.engine_run import run_workload
    from jaxengine.bench.workloads import fixed_lengths
    from jaxengine.results import percentile, table, write_json

    llm = LLM(**given_options(args, EngineConfig))
    runner = llm.core.runner
    workload = fixed_lengths(args.batch_size, args.input_len, args.output_len, runner.vocab_size)
    runs = [run_workload(llm, workload) for _ in range(args.num_runs)]
    series = {
        "first token": [value for done in runs for value in done.first_token_seconds],
        "between tokens": [value for done in runs for value in done.inter_token_seconds],
        "whole run": [done.seconds for done in runs],
    }
    rows = []
    for name, values in series.items():
        if values:
            shares = {f"p{share}": percentile(values, share / 100) * 1e3 for share in (50, 90, 99)}
            rows.append({"ms": name, "mean": sum(values) / len(values) * 1e3, **shares})
    print(table(rows))
    timeline = min(runs, key=lambda done: done.seconds).timeline()
    print("\nfastest run, ms a step\n" + table([timeline]))
    roofline = decode_roofline(runner.plan.weights, series["between tokens"])
    print("\ndecode against the memory's limit\n" + table([roofline]))
    result = {"batch_size": args.batch_size, "input_len": args.input_len, "output_len": args.output_len}
    write_json(args.json, {**result, "latency_ms": rows, "timeline_ms_per_step": timeline, "roofline": roofline})
    return 0


def decode_roofline(weight_bytes: int, step_seconds: list[float]) -> dict[str, float]:
    """Return the shortest decode step that memory bandwidth allows, and the percentage of that speed that was reached.

    The keys are "weights_MB", "read_GB_per_s" and "floor_ms" and, unless `step_seconds` is empty, "fastest_ms" and
    "percent_of_limit". weight_bytes: bytes of weights that a step reads. step_seconds: seconds of each measured step;
    the fastest counts. Measures the bandwidth of the host's memory, which takes a moment and half a gigabyte.
    """
    bandwidth = memory_bandwidth()
    floor = weight_bytes / bandwidth
    result = {
        "weights_MB": round(weight_bytes / 1e6, 1),
        "read_GB_per_s": round(bandwidth / 1e9, 1),
        "floor_ms": round(floor * 1e3, 2),
    }
    if step_seconds:
        step = min(step_seconds)
        result |= {"fastest_ms": round(step * 1e3, 2), "percent_of_limit": round(100 * floor / step, 1)}
    return result


def memory_bandwidth(num_bytes: int = 512 * 2**20, rounds: int = 5) -> float:
    """Return the memory read bandwidth of all cores together, in bytes per second, the best of `rounds`.

    It is measured by dot products over an array of `num_bytes`, which must exceed the caches.
    """
    from concurrent.futures import ThreadPoolExecutor
    from os import cpu_count

    import numpy as np

    workers = cpu_count() or 1
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), workers)
    best = float("inf")
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(rounds):
            start = time.perf_counter()
            list(pool.map(lambda part: np.dot(part, part), parts))
            best = min(best, time.perf_counter() - start)
    return num_bytes / best

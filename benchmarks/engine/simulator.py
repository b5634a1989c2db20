"""`jaxengine simulate` beside the engine that it simulates, on a CPU: three traces, and the shapes that it chooses.

The costs of steps are measured on the engine itself, before and after each run of an open trace, so that a machine
whose speed drifts is slower or faster for both. `at once` has all requests at the beginning, in a pool that is too
small for them: what the scheduler does then depends on no time, and steps, preemptions, tokens found in the cache and
padding must be equal (`kept`). `open` has arrivals at random, at a share of what the engine manages: times to the first
token and between tokens in milliseconds, measured and simulated, medians of `repeats` runs: where the machine once
stands still for 0.2 s, that alone makes the 99th percentile of a run. `shapes` starts the engine anew with the
platform's shapes and with those that `--optimise buckets` chooses for the chat trace: programs, seconds until it is
ready without a cache, padding.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.engines import write_config
from benchmarks.harness import Option
from benchmarks.recorder import Recorder, Row
from jaxengine.engine.engine import Engine
from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import StepResult
from jaxengine.simulate.buckets import choose
from jaxengine.simulate.calibrate import fitted_costs, measured_round, simulated, text
from jaxengine.simulate.costs import MeasuredCosts
from jaxengine.simulate.loop import Outcome
from jaxengine.simulate.synthetic import synthetic
from jaxengine.simulate.trace import Trace, trace_of

OPTIONS = {
    "requests": Option(60, "requests of each trace"),
    "open": Option(360, "requests of each open trace: enough for a 99th percentile"),
    "repeats": Option(5, "runs of each open trace, of which rows have the medians"),
    "load": Option(0.5, "arrivals of the open traces, as a share of what the engine manages"),
    "counts": Option(False, "only the traces at once, whose counts do not depend on the machine's load"),
    "tiny": Option(False, "sizes for a test of this program"),
}
MAX_MODEL_LEN = 1024
SHAPE = (256, 768, 6, 4, 2, 8192, MAX_MODEL_LEN)
TINY_SHAPE = (64, 128, 2, 4, 2, 512, MAX_MODEL_LEN)
# Factors of the synthetic traces' lengths, for a model on a CPU.
SCALES = {"chat": 0.25, "long": 0.12, "shared": 0.25}


class _Times(LoopExtension):
    """Loop extension that records the intervals between tokens, arrays of seconds, and the requests that ended."""

    def __init__(self) -> None:
        self.intervals: list[np.ndarray] = []
        self.requests: list[Request] = []

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        self.intervals += result.intervals

    def ended(self, request: Request) -> None:
        self.requests.append(request)


def prompts_of(trace: Trace, vocab_size: int) -> list[np.ndarray]:
    """Return the prompts of a trace's requests, i32[num_prompt] each, with tokens from 2 to vocab_size - 1.

    Prompts share prefixes where the trace's do.
    """
    found = []
    for index, request in enumerate(trace.requests):
        tokens = trace.tokens(index)[: request.num_prompt].astype(np.int64)
        mixed = (tokens * 2654435761 + np.arange(len(tokens)) * 40503) % (vocab_size - 2) + 2
        found.append(mixed.astype(np.int32))
    return found


def run_engine(llm: Any, prompts: Sequence[np.ndarray], outputs: Sequence[int], arrivals: Sequence[float]) -> Row:
    """Run requests on an engine as they arrive, until all have ended; return a row of counts and of times in
    milliseconds. They are sampled at temperature 1, as those whose steps `calibrate-costs` measures.

    outputs: tokens of each output. arrivals: seconds from now, ascending. Clears the prefix cache first. What this
    process holds is left out of garbage collections meanwhile, as in the server's engine process: the steps that were
    measured before are so many objects that a collection which visits them all delays a step. Times are rounded.
    """
    core, engine = llm.core, llm.core.engine
    times = _Times()
    prepared = []
    for prompt, count in zip(prompts, outputs, strict=True):
        params = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False)
        prepared.append(core.inputs.prepare({"prompt_token_ids": prompt.tolist()}, params))
    engine.scheduler.reset_prefix_cache()
    engine.extensions.by_name["times"] = times
    engine.extensions.require("times")
    gc.collect()
    gc.freeze()
    index, start = 0, time.monotonic()
    before = _counts(engine)
    while index < len(prompts) or engine.has_unfinished:
        now = time.monotonic() - start
        if not engine.has_unfinished and index < len(prompts) and arrivals[index] > now:
            time.sleep(arrivals[index] - now)
            continue
        while index < len(prompts) and arrivals[index] <= now:
            (request,) = prepared[index].requests
            request.arrival_time = start + arrivals[index]
            core.add(prepared[index])
            index += 1
        core.step()
    gc.unfreeze()
    engine.extensions.active.remove(times)
    engine.extensions.hooks.update(engine.extensions.active)
    first = [each.first_token_time - each.arrival_time for each in times.requests if each.first_token_time is not None]
    seconds = time.monotonic() - start
    counts = {name: value - before[name] for name, value in _counts(engine).items()}
    return {**counts, "seconds": round(seconds, 2), **_quantiles(np.array(first), np.concatenate(times.intervals))}


def simulated_row(outcome: Outcome) -> Row:
    """Return the row of a simulated run, with the columns of the row that `run_engine` returns. Times are rounded."""
    counts = {
        "steps": outcome.stats.num_steps,
        "padding": outcome.stats.num_padding_tokens,
        "preemptions": outcome.num_preemptions,
        "hits": outcome.num_prefix_hits,
    }
    return {**counts, "seconds": round(outcome.seconds, 2), **_quantiles(outcome.first_token, outcome.intervals)}


def _counts(engine: Engine) -> dict[str, int]:
    """Return the engine's total numbers of steps, padding tokens, preemptions and prefix cache hits."""
    scheduler, stats = engine.scheduler, engine.stats
    counts = {"steps": stats.num_steps, "padding": stats.num_padding_tokens}
    return {**counts, "preemptions": scheduler.num_preemptions, "hits": scheduler.num_prefix_hits}


def _quantiles(first: np.ndarray, intervals: np.ndarray) -> Row:
    """Return p50 and p99, in milliseconds, of the times to the first token and of the intervals, both given in
    seconds. They are rounded to three digits.
    """
    return {
        f"{name} p{share}": round(float(np.percentile(values, share)) * 1e3, 3)
        for name, values in (("ttft", first), ("itl", intervals))
        for share in (50, 99)
    }


def run(args: Namespace, recorder: Recorder) -> None:
    """Compare the engine with its simulation on each trace, with all requests at once and as they arrive, then start
    engines with the platform's shapes and with those chosen for the trace "chat"; add the rows. args.counts: stop after
    the requests at once.
    """
    from jaxengine import LLM

    logging.getLogger("jaxengine.scheduler").setLevel(logging.ERROR)  # preemptions are wanted
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, TINY_SHAPE if args.tiny else SHAPE)
        options = engine_options(folder)
        llm = LLM(**options)
        cases = {kind: make_trace(kind, args.requests, llm.core.runner.vocab_size) for kind in SCALES}
        for kind, case in cases.items():
            recorder.add(at_once(llm, kind, case))
        if args.counts:
            return llm.shutdown()
        open_cases = {kind: make_trace(kind, args.open, llm.core.runner.vocab_size) for kind in SCALES}
        costs = as_they_come(llm, options, open_cases, args.load, args.repeats, recorder)
        config, steps = llm.core.runner.config, simulated(llm.core.runner, cases["chat"][0].at_once(), costs).steps
        shapes = choose(steps, costs, config.max_num_seqs, config.max_num_batched_tokens, 0.02)
        llm.shutdown()
        chosen = {"cudagraph_capture_sizes": list(shapes.decode), "prefill_sizes": list(shapes.mixed)}
        for name, sizes in (("platform's", None), ("chosen", chosen)):
            recorder.add(started(name, {**options, "compilation_config": sizes}, cases["chat"]))


def engine_options(folder: str) -> dict[str, Any]:
    """Return the options of an engine for the model in `folder`, with the platform's shapes up to 16 requests and 256
    tokens.
    """
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 16}
    own = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
    return {**own, **sizes, "num_gpu_blocks_override": 1024, "disable_log_stats": True}


Case = tuple[Trace, list[np.ndarray]]


def make_trace(kind: str, num_requests: int, vocab_size: int) -> Case:
    """Return (synthetic trace of the kind, at one request a second; its prompts)."""
    trace = synthetic(kind, num_requests, 1.0, MAX_MODEL_LEN, scale=SCALES[kind])
    return trace, prompts_of(trace, vocab_size)


def at_once(llm: Any, kind: str, case: Case) -> Row:
    """Return a row of counts of the engine and of its simulation, for a trace whose requests all arrive at once.

    The pool has a quarter of the pages that the running requests would need. The engine's scheduler is set up anew for
    the run and restored after it. "kept" is whether all counts are equal.
    """
    trace, prompts = case
    engine, runner = llm.core.engine, llm.core.runner
    outputs = [request.num_output for request in trace.requests]
    longest = max(len(prompt) + count for prompt, count in zip(prompts, outputs, strict=True))
    mean = float(np.mean([len(prompt) + count for prompt, count in zip(prompts, outputs, strict=True)]))
    pages = max(int(16 * mean) // 16 // 4, -(-longest // 16) + 1)
    config = engine.extensions.configure(runner.config.scheduler_config(pages, runner.num_ranks, runner.windows))
    original = engine.scheduler.config
    engine.scheduler.__init__(config)
    found = run_engine(llm, prompts, outputs, [0.0] * len(prompts))
    engine.scheduler.__init__(original)
    closed = trace_of(kind, [prompt.tolist() for prompt in prompts], outputs, runner.config.block_size)
    expected = simulated_row(simulated(runner, closed, num_pages=pages))
    row: Row = {"name": f"{kind} at once"}
    for name in ("steps", "preemptions", "hits", "padding"):
        row |= {name: found[name], f"{name} simulated": expected[name]}
    row["kept"] = all(found[name] == expected[name] for name in ("steps", "preemptions", "hits", "padding"))
    return row


def as_they_come(
    llm: Any, options: dict[str, Any], cases: dict[str, Case], load: float, repeats: int, recorder: Recorder
) -> MeasuredCosts:
    """Add a row for each trace with random arrivals, measured and simulated, and return the costs of all rounds, which
    are also printed and become a note of `recorder`.

    load: arrival rate as a share of the requests per second that the simulated engine manages. repeats: runs of each
    trace. Each run is simulated with costs that were measured right before and right after it; the row has the medians
    of both. Numbers are rounded.
    """
    runner = llm.core.runner
    measured_round(llm)  # warms caches up
    rounds = [measured_round(llm)]
    first = fitted_costs(runner, options, rounds[0])
    opened = {kind: at_random(runner, kind, case, load, first) for kind, case in cases.items()}
    pairs: dict[str, list[tuple[Row, Row]]] = {kind: [] for kind in cases}
    for _ in range(repeats):
        for kind, (_, trace) in opened.items():
            outputs, arrivals = zip(*((each.num_output, each.arrival) for each in trace.requests), strict=True)
            found = run_engine(llm, cases[kind][1], outputs, arrivals)
            rounds.append(measured_round(llm, len(rounds)))
            around = fitted_costs(runner, options, rounds[-2] + rounds[-1])
            pairs[kind].append((found, simulated_row(simulated(runner, trace, around))))
    for kind, runs in pairs.items():
        row: Row = {"name": f"{kind} open", "requests a second": round(opened[kind][0], 2)}
        for name in runs[0][0]:
            measured, expected = (float(np.median([run[side][name] for run in runs])) for side in (0, 1))
            row |= {name: round(measured, 3), f"{name} simulated": round(expected, 3)}
        recorder.add(row)
    costs = fitted_costs(runner, options, [step for measured in rounds for step in measured])
    lines = text(dataclasses.replace(costs, model="the benchmark's model")).splitlines()
    recorder.notes["costs"] = lines
    print(*lines, sep="\n")
    return costs


def at_random(runner: Any, kind: str, case: Case, load: float, costs: MeasuredCosts) -> tuple[float, Trace]:
    """Return (requests a second, the trace with its random arrivals at that rate): `load` times what an engine with
    these costs manages.
    """
    trace, prompts = case
    outputs = [request.num_output for request in trace.requests]
    closed = trace_of(kind, [prompt.tolist() for prompt in prompts], outputs, runner.config.block_size)
    rate = len(prompts) / simulated(runner, closed, costs).seconds * load
    arrivals = [request.arrival / rate for request in trace.requests]
    moved = zip(closed.requests, arrivals, strict=True)
    requests = tuple(dataclasses.replace(each, arrival=arrival) for each, arrival in moved)
    return rate, dataclasses.replace(closed, requests=requests)


def started(name: str, options: dict[str, Any], case: Case) -> Row:
    """Start an engine without a compile cache and run a trace with all arrivals at once; return a row.

    The row has the number of programs, seconds until the engine is ready, padding in percent of the computed tokens,
    and the seconds of the run. options: of the engine, with a "compilation_config". Numbers are rounded.
    """
    from jaxengine import LLM

    trace, prompts = case
    begun = time.monotonic()
    llm = LLM(**{**options, "compile_cache_dir": ""})
    seconds = time.monotonic() - begun
    found = run_engine(llm, prompts, [request.num_output for request in trace.requests], [0.0] * len(prompts))
    stats, programs = llm.core.engine.stats, llm.core.runner.num_compiled
    llm.shutdown()
    padding = found["padding"] / (stats.num_tokens + stats.num_padding_tokens)
    sizes = options["compilation_config"]
    return {
        "name": f"shapes: {name}",
        "compilation_config": str(sizes),
        "programs": programs,
        "seconds to start": round(seconds, 1),
        "padding %": round(100 * padding, 1),
        "seconds": found["seconds"],
    }

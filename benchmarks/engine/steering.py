"""Cost of steering: steps of requests that each add vectors of their own, compared with the same steps without.

Three rows on the default model: an engine without the option, one with it whose requests add nothing, and one where
every request adds its own vector after every layer. A time is that of a decode step of all requests, the least of the
rounds' medians; `ratio` is to the engine without the option.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace

import numpy as np

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, SamplingParams
from jaxengine.api.core import EngineCore

OPTIONS = {
    "requests": Option(64, "that run at once, each with vectors of its own"),
    "steps": Option(40, "decode steps of a round"),
    **shared(rounds=3),
}
ENGINE = engine_options(dtype="float32", max_model_len=1024, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 30)


def step_seconds(core: EngineCore, args: Namespace, *, steered: bool) -> float:
    """Return the median seconds of a decode step of all requests. steered: each request adds its own vectors."""
    drawn = np.random.default_rng(0)
    size = core.inputs.model_config.hidden_size
    for number in range(args.requests):
        vector = drawn.standard_normal(size) * 0.01
        steer = [{"at": "residual:*", "vector": vector}] if steered else None
        params = SamplingParams(
            temperature=0, max_tokens=args.steps + 20, ignore_eos=True, detokenize=False, steer=steer
        )
        core.add(core.inputs.prepare({"prompt_token_ids": [100 + number]}, params))
    ends = [time.perf_counter()]
    while core.has_unfinished:
        core.step()
        ends.append(time.perf_counter())
    return float(np.median(np.diff(ends[-args.steps :])))


def run(args: Namespace, recorder: Recorder) -> None:
    logging.getLogger("jaxengine").setLevel(logging.ERROR)
    found: dict[str, float] = {}
    plain = LLM(**ENGINE, max_num_seqs=args.requests).core
    found["without the option"] = min(step_seconds(plain, args, steered=False) for _ in range(args.rounds))
    del plain
    core = LLM(**ENGINE, max_num_seqs=args.requests, steer=["residual:*"]).core
    found["no vectors"] = min(step_seconds(core, args, steered=False) for _ in range(args.rounds))
    found["a vector each"] = min(step_seconds(core, args, steered=True) for _ in range(args.rounds))
    least = found["without the option"]
    for name, seconds in found.items():
        row = {"requests": f"{args.requests}, {name}", "step_ms": round(seconds * 1e3, 2)}
        recorder.add(row | {"ratio": round(seconds / least, 3)})

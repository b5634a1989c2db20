"""How long it takes to bring an adapter to its slot on the devices, and how long running streams are delayed by that,
on the default model.

Streams without an adapter run all the time. While they do, an adapter is loaded, and a request names it whose prompt is
one token; then the same request is sent without an adapter, to show what any new one costs. `swap` is the time until
the step after the one that finds the adapter on the devices; a gap is the longest time between the ends of two steps.
Times are milliseconds: medians of the repeats, of gaps the longest.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, SamplingParams
from jaxengine.api.core import EngineCore
from jaxengine.requests.params.options import RequestOptions

OPTIONS = {
    "streams": Option(32, "requests that run meanwhile"),
    "rank": Option(8, "of the adapters"),
    **shared(rounds=3),
}
ENGINE = engine_options(
    dtype="float32",
    max_model_len=1024,
    max_num_batched_tokens=64,
    kv_cache_memory_bytes=1 << 30,
    enable_lora=True,
    max_loras=2,
)


def write_adapter(folder: Path, core: EngineCore, rank: int, seed: int) -> str:
    """Write a random adapter for every matrix that can have one to the new folder `folder`, in PEFT's format; return
    its path.

    core: engine with the model. rank: of the adapter. seed: of its random numbers.
    """
    drawn, tensors, shapes = np.random.default_rng(seed), {}, core.runner.extension("adapters").targets.shapes
    for module, (size, out) in shapes.items():
        for name, shape in (("A", (rank, size)), ("B", (out, rank))):
            values = drawn.standard_normal(shape, np.float32) * 0.02
            tensors[f"base_model.model.{module}.lora_{name}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({module.rpartition(".")[2] for module in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


class Streams:
    """Engine with `count` requests that outlast the measurement.

    Attributes:
      ends: the time at which each step ended, in seconds, after a first entry of 0.
      first: ids of the requests that have got a token.
    """

    def __init__(self, core: EngineCore, count: int):
        """Add `count` requests of 900 tokens, and run count + 10 steps, after which all are decoding."""
        self.core, self.ends, self.first = core, [0.0], set[str]()
        self._num = 0
        for _ in range(count):
            self.ask(900)
        for _ in range(count + 10):
            self.step()

    def ask(self, max_tokens: int, lora: str | None = None) -> str:
        """Add a request of one prompt token and return its id. lora: name of its adapter; None for none."""
        self._num += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [100 + self._num]}
        options = RequestOptions(lora=lora)
        self.core.add(self.core.inputs.prepare(prompt, params, request_id=str(self._num), options=options))
        return str(self._num)

    def step(self) -> None:
        """Run one step; append its end to `ends`, and add the requests that got tokens to `first`."""
        self.first |= {output.request_id for output in self.core.step()}
        self.ends.append(time.perf_counter())

    def until(self, condition: Callable[[], bool]) -> None:
        """Run steps until the condition holds."""
        while not condition():
            self.step()

    def intervals(self, begin: int) -> np.ndarray:
        """Return the milliseconds between the ends of consecutive steps, from the entry `begin` of `ends` on."""
        return np.diff(np.array(self.ends[begin:])) * 1e3


def once(streams: Streams, path: str, name: str) -> dict[str, float]:
    """Load an adapter, use it in one request and unload it, while the streams run; return milliseconds by name.

    "step": median of a step before. "load", "swap": until the adapter is loaded, and from the request until it is on
    the devices. "gap": longest step from the start of loading to the request's first token. "gap of a plain request":
    longest step until a request without an adapter has its first token. path, name: of the adapter.
    """
    core, store = streams.core, streams.core.engine.extensions.adapter_store()
    for _ in range(20):
        streams.step()
    steps = float(np.median(streams.intervals(-20)))
    begin, start = len(streams.ends) - 1, time.perf_counter()
    ticket = core.utility("load_adapter", name, path, None)
    streams.until(lambda: core.utility("adapter_is_loaded", ticket))
    loaded = time.perf_counter() - start
    request, start = streams.ask(4, name), time.perf_counter()
    streams.step()  # begins the upload into a slot
    streams.until(lambda: not store.is_uploading)
    swapped = time.perf_counter() - start
    streams.until(lambda: request in streams.first)
    gap = float(streams.intervals(begin).max())
    streams.step()
    streams.step()
    core.utility("unload_adapter", name)
    begin = len(streams.ends) - 1
    plain = streams.ask(4)
    streams.until(lambda: plain in streams.first)
    other = float(streams.intervals(begin).max())
    return {"step": steps, "load": loaded * 1e3, "swap": swapped * 1e3, "gap": gap, "gap of a plain request": other}


def parts(core: EngineCore, path: str) -> dict[str, float]:
    """Time the parts of a swap while nothing else runs: reading the adapter, putting it on the devices, dispatching the
    write to its slot, and the write; return milliseconds by name.

    path: of the adapter. Overwrites slot 1 of the adapters' pools.
    """
    store, found = core.engine.extensions.adapter_store(), {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = jax.block_until_ready(work())
        found[name] = (time.perf_counter() - start) * 1e3
        return value

    weights = timed("alone: read and check", lambda: store.read(path))
    values = timed("alone: put", lambda: core.runner.extension("adapters").put(weights.matrices))
    timed("alone: dispatch of the write", lambda: core.runner.extension("adapters").write(1, values))
    timed("alone: write", lambda: core.runner.stages[0].params)
    return found


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure swaps alone and under streams, and add one row of medians, of gaps the longest. Numbers are rounded."""
    logging.getLogger("jaxengine").setLevel(logging.ERROR)
    core = LLM(**ENGINE, max_num_seqs=args.streams + 1, max_lora_rank=args.rank).core
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_adapter(Path(folder, str(seed)), core, args.rank, seed) for seed in range(args.rounds)]
        alone = [parts(core, path) for path in paths]
        streams = Streams(core, args.streams)
        rows = [once(streams, path, f"a{number}") for number, path in enumerate(paths)]
    result = {name: round(median(row[name] for row in alone), 1) for name in alone[0]}
    worst = {name: max if name.startswith("gap") else median for name in rows[0]}
    result |= {name: round(worst[name](row[name] for row in rows), 1) for name in rows[0]}
    result["gap in steps"] = round(max(row["gap"] / row["step"] for row in rows), 2)
    recorder.add(result)

"""Whether anything compiles or is left behind when weights are replaced again and again, on the default model.

Streams run all the time, every eighth with an adapter, and each one that ends is followed by another. Updates replace,
in turn, all weights, one third of the layers, all with slightly changed numbers, and the adapter's matrices. A row is a
tenth of the updates: programs compiled, bytes of the arrays on the devices, resident anonymous memory, and the medians
in milliseconds of an update of weights while steps go on, and of the time between two steps.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from benchmarks.engines import engine_options
from benchmarks.harness import Option
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from jaxengine import LLM, EngineConfig, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.engine.weight_types import WeightUpdate
from jaxengine.requests.options import RequestOptions

ROWS = 10
RANK = 8
OPTIONS = {
    "updates": Option(1000),
    "streams": Option(256, "requests that run meanwhile"),
    "steps": Option(4, "between two updates"),
}
ENGINE = engine_options(dtype="float32", max_model_len=256, max_num_batched_tokens=256)
ENGINE |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
ADAPTER = {"r": RANK, "lora_alpha": 16, "peft_type": "LORA", "target_modules": ["o_proj"]}


def stored() -> dict[str, np.ndarray]:
    """Return the default model's tensors by name."""
    source = open_model(EngineConfig()).weights
    assert source is not None and not isinstance(source, Path)
    tensors = {name: source.read(name) for name in source.names()}
    source.close()
    return tensors


def moved(tensors: Mapping[str, np.ndarray], number: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield all tensors, one at a time, multiplied by 1 to 1.006, depending on the update's `number`."""
    for name, array in tensors.items():
        yield name, (array * np.float32(1 + 1e-3 * (number % 7))).astype(array.dtype)


def adapter(tensors: Mapping[str, np.ndarray], number: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield random LoRA matrices for the attention's output projections, by name; `number` is their seed."""
    rng = np.random.default_rng(number)
    for name, array in tensors.items():
        if name.endswith("o_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for end, shape in (("A", (RANK, array.shape[1])), ("B", (array.shape[0], RANK))):
                yield f"{stem}.lora_{end}.weight", 0.02 * rng.standard_normal(shape, np.float32)


class Streams:
    """Requests that run continually: each that ends is followed by another."""

    def __init__(self, llm: LLM, count: int):
        self._llm, self._count, self._num = llm, count, 0

    def step(self) -> None:
        core = self._llm.core
        while len(core.engine.scheduler.requests) < self._count:
            self._num += 1
            params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, detokenize=False)
            options = RequestOptions(lora=None if self._num % 8 else "policy")
            prompt = [100 + self._num % 1000, 7]
            core.add(core.inputs.prepare(prompt, params, request_id=str(self._num), options=options))
        core.step()


def update(llm: LLM, tensors: Mapping[str, np.ndarray], number: int) -> WeightUpdate | None:
    """Replace all weights, or every third layer's, or an adapter's, depending on `number`; return None for an
    adapter's.
    """
    kv: Any = ("recompute", "drop", "keep")[number % 3]
    if number % 4 == 0:
        return llm.update_weights(tensors, kv=kv)
    if number % 4 == 3:
        return llm.update_lora("policy", adapter(tensors, number), kv=kv)
    if number % 4 == 1:
        layers = {name: each for name, each in tensors.items() if ".layers." in name}
        third = {name: each for name, each in layers.items() if int(name.split(".layers.")[1].split(".")[0]) % 3 == 0}
        return llm.update_weights(third, strict=False, kv=kv)
    return llm.update_weights(moved(tensors, number), kv=kv)


def run(args: Namespace, recorder: Recorder) -> None:
    llm = LLM(**ENGINE, max_num_seqs=args.streams)
    tensors, streams = stored(), Streams(llm, args.streams)
    llm.update_lora("policy", adapter(tensors, 0), config=ADAPTER, lora_int_id=1)
    for row in range(ROWS):
        done = []
        for number in range(row * args.updates // ROWS, (row + 1) * args.updates // ROWS):
            for _ in range(args.steps):
                streams.step()
            if (found := update(llm, tensors, number)) is not None:
                done.append(found)
        recorder.add(
            {
                "updates": (row + 1) * args.updates // ROWS,
                "compilations": llm.core.runner.compiles.count,
                "MiB of arrays": round(sum(each.nbytes for each in jax.live_arrays()) / 2**20, 1),
                "MiB resident": memory(kind="RssAnon") >> 20,
                "load ms": round(median(each.load_seconds for each in done) * 1e3, 1),
                "switch ms": round(median(each.switch_seconds for each in done) * 1e3, 1),
            }
        )
    llm.core.shutdown()

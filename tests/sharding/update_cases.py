"""Engines over several devices whose weights are replaced and that sleep: run as a module, prints a row per case.

    python -m tests.sharding.update_cases CACHE CASE ...

needs eight devices (XLA_FLAGS=--xla_force_host_platform_device_count=8).
"""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxengine import LLM, SamplingParams
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.runner.weights.weight_update import WeightUpdateError
from tests.fixtures.drawn_weights import checkpoint

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 4,
    "num_gpu_blocks_override": 60,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}
EP = {"enable_expert_parallel": True}
# Recorded model and options.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 pp2": ("llama", {"data_parallel_size": 2, "pipeline_parallel_size": 2}),
    "tp2, rounded to int8": ("llama", {"tensor_parallel_size": 2, "quantization": "int8"}),
    "experts, tp2 dp2 ep": ("qwen3_moe", {"tensor_parallel_size": 2, "data_parallel_size": 2, **EP}),
    "experts, tp2 dp2 pp2 ep, rounded to int8": (
        "qwen3_moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2, "quantization": "int8", **EP},
    ),
    "8 experts, dp3 pp2 ep, rounded to int8": (
        "qwen3_moe",
        {"data_parallel_size": 3, "pipeline_parallel_size": 2, "quantization": "int8", "max_num_seqs": 6, **EP},
    ),
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41, 42, 43, 44], [77] * 20]


def changed(model: str) -> dict[str, np.ndarray]:
    source, rng = SafetensorsCheckpoint(checkpoint(model)), np.random.default_rng(1)
    tensors = {name: source.read(name) for name in source.names()}
    source.close()
    return {name: (each + 0.1 * rng.standard_normal(each.shape)).astype(each.dtype) for name, each in tensors.items()}


def faulty(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, Iterator[tuple[str, Any]]]]:
    """New weights that no engine may take, each with the text of its error: one tensor of the last layer is wrong."""
    name = max(name for name in tensors if name.endswith("self_attn.q_proj.weight"))
    own = tensors[name]
    broken = own.copy()
    broken[-1, -1] = np.nan
    for wrong, fault in ((None, "missing"), (broken, "finite"), (own[:, 1:], "shape"), (own.astype(int), "floating")):
        yield fault, iter([(key, each) for key, each in (tensors | {name: wrong}).items() if each is not None])
    yield "twice", iter([*tensors.items(), (name, own)])

    def until_it_fails() -> Iterator[tuple[str, Any]]:
        yield from [*tensors.items()][:-1]
        raise ConnectionError("the trainer is gone")

    yield "gone", until_it_fails()


class Held:
    """The arrays that an engine has now: weights, and keys and values."""

    def __init__(self, llm: LLM):
        stages = llm.core.runner.stages
        self.weights = [weakref.ref(each) for stage in stages for each in stage.params]
        self.pools = [weakref.ref(each) for stage in stages for each in jax.tree.leaves(stage._kv)]

    def count(self) -> list[int]:
        """Weights and pools that still take memory."""
        return [sum(each() is not None for each in own) for own in (self.weights, self.pools)]


def bytes_alive() -> dict[str, int]:
    """Bytes of all buffers of jax in this process, by the id of the device that holds them. A shard that has become an
    array by itself has the buffer of the whole array's.
    """
    sizes = {
        (str(shard.device.id), shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for each in jax.live_arrays()
        for shard in each.addressable_shards
    }
    found: Counter[str] = Counter()
    for (device, _), size in sizes.items():
        found[device] += size
    return dict(found)


def run(model: str, cache: str, options: dict[str, Any]) -> dict[str, Any]:
    """Tokens with the stored weights, with others, with the first ones again, and after sleeps; `same`: whether the
    first ones were there still after faulty updates, each of which was refused; `alive`: how many of the weights and
    pools are left that an update or a sleep was to give up; `slept`: bytes on each device before a sleep, in it and
    after it; `names`: of weights with checksums;
    `experts`: checksums of experts."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM(str(checkpoint(model)), compile_cache_dir=cache, **OPTIONS | options) as llm:

        def tokens() -> list[list[int]]:
            return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]

        found, sums = [tokens()], llm.weight_info(checksum=True)["checksums"]
        held = Held(llm)
        llm.update_weights(changed(model), chunk_bytes=1000)
        alive = [held.count()[:1]]
        found.append(tokens())
        llm.update_weights(checkpoint(model), kv="drop", chunk_bytes=1000)
        found.append(tokens())
        refused = []
        for fault, tensors in faulty(changed(model)):
            try:
                llm.update_weights(tensors, chunk_bytes=1000 if len(refused) % 2 else None)
            except (WeightUpdateError, ConnectionError) as error:
                refused.append(fault in str(error))
        same = refused == [True] * 6 and llm.weight_version == 2
        same = same and llm.weight_info(checksum=True)["checksums"] == sums
        slept = []
        for level in (1, 2):
            held, sizes = Held(llm), [bytes_alive()]
            llm.sleep(level)
            alive.append(held.count())
            sizes.append(bytes_alive())
            if level == 2:
                llm.update_weights(changed(model))
            llm.wake_up()
            slept.append([*sizes, bytes_alive()])
            found.append(tokens())
        experts = {name: each for name, each in sums.items() if re.search(r"mlp\.(gate_up|down)", name)}
        more = {"names": sorted(sums), "experts": experts, "slept": slept}
        return more | {"tokens": found, "same": same, "alive": alive, "compilations": llm.core.runner.compiles.count}


def main(cache: str, *names: str) -> None:
    assert jax.device_count() == 8
    for name in names:
        model, options = CASES[name]
        quantized = {key: value for key, value in options.items() if key == "quantization"}
        alone, found = run(model, cache, quantized), run(model, cache, options)
        if options.get("enable_expert_parallel"):
            found["same"] = found["same"] and found["experts"] == alone["experts"] != {}
        print(json.dumps({"case": name, "alone": alone["tokens"], "own": alone["names"], **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

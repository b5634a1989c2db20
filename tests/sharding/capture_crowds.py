"""Activations that engines capture in a crowd, beside those that transformers computed.

python -m tests.sharding.capture_crowds EXECUTABLES FAMILY... prints a JSON object for each family and number of
devices, 1 and 2. It needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from jaxengine import LLM, SamplingParams
from tests.conftest import TINY_OPTIONS
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.models.conftest import load_recorded

# Pages for about half of the tokens of all requests.
OPTIONS: dict[str, Any] = TINY_OPTIONS | {
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 40,
}
CROWD, LONGEST = 6, 40


def run(family: str, devices: int, cache: str) -> dict[str, Any]:
    """`error`: the largest difference of an activation, as a part of the tap's largest value; `preempted`: how often
    any request was; `kinds`: of the taps; `shaped`: whether each token that was computed has its activations."""
    with np.load(FOLDER / family / "activations.npz") as file:
        wanted = dict(file)
    places, prompt = wanted.pop("tokens"), load_recorded(family).prompts[1].tolist()
    options = OPTIONS | {"model": str(checkpoint(family)), "compile_cache_dir": cache, "capture": [*wanted]}
    rng = np.random.default_rng(0)
    others = [rng.integers(3, 90, rng.integers(4, 20)).tolist() for _ in range(CROWD)]
    # Two requests that capture, the second of which comes last and is preempted first.
    prompts = [prompt, *others, prompt]
    params = [
        SamplingParams(
            temperature=0,
            ignore_eos=True,
            max_tokens=LONGEST - len(each),
            **({"capture": [*wanted]} if each is prompt else {}),
        )
        for each in prompts
    ]
    if family == "deepseek_v3":  # a page of latents has the tokens of all devices
        options["num_gpu_blocks_override"] //= devices
    with LLM(**options, tensor_parallel_size=devices) as llm:
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        counts = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    errors, shaped = [], True
    for each in (outputs[0], outputs[-1]):
        found = each.outputs[0].captured
        shaped = shaped and found is not None and all(len(found[name]) == LONGEST - 1 for name in wanted)
        errors += [
            float(np.abs(found[name][places] - own).max() / max(1.0, np.abs(own).max())) for name, own in wanted.items()
        ]
    return {
        "family": family,
        "devices": devices,
        "error": max(errors),
        "preempted": counts["vllm:num_preemptions"],
        "kinds": sorted({name.partition(":")[0] for name in wanted}),
        "shaped": shaped,
        "compilations": counts["jaxengine:compilations_since_ready"],
    }


if __name__ == "__main__":
    for name in sys.argv[2:]:
        for count in (1, 2):
            print(json.dumps(run(name, count, sys.argv[1])), flush=True)

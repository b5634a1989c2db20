"""Activations are those of one device where devices split the model and the requests, also with drafts.

Those of pipeline stages are the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxengine.models.config.taps import Tap
from jaxengine.runner.extensions.capture import EngineTaps, stage_taps
from jaxengine.sharding.stages import stages_of

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys

import jax
import numpy as np
from flax import nnx

from jaxengine import LLM, SamplingParams
from tests.conftest import TINY_OPTIONS
from tests.fixtures.drawn_weights import checkpoint
from tests.models.conftest import load_recorded
from tests.models.layers.test_taps import _activations

sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "max_model_len": 64, "max_num_batched_tokens": 16}
drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}} if sys.argv[2] else {}
names = ("residual:*", "attention_output:0", "mlp_output:*", "router_logits:*", "final_norm")
options = TINY_OPTIONS | sizes | drafts | {"compile_cache_dir": sys.argv[1]}
llm = LLM(**options | {"model": str(checkpoint("qwen3_moe")), "capture": names})
prompts = [[7, 8, 9] * 8, [5, 6, 7, 8, 5, 6, 7, 8], list(range(3, 30)), [4]]
# Whole sequences of one length, whose activations one program computes.
counts = [49 - len(each) for each in prompts]
params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=count, capture=names) for count in counts]
outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
state = nnx.split(load_recorded("qwen3_moe").model)
for prompt, output in zip(prompts, outputs, strict=True):
    fed = np.array([*prompt, *output.outputs[0].token_ids[:-1]], np.int32)
    wanted = _activations(*state, fed, names)
    found = output.outputs[0].captured
    assert found.keys() == wanted.keys(), found.keys()
    for name, own in found.items():
        assert own.shape == wanted[name].shape and own.dtype == np.float32, (name, own.shape)
        assert np.abs(own - wanted[name]).max() <= 1e-4 * np.abs(wanted[name]).max(), name
metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
if drafts:
    made, right = (metrics[f"vllm:spec_decode_num_{which}_tokens"] for which in ("draft", "accepted"))
    assert 0 < right < made, (right, made)
assert metrics["jaxengine:compilations_since_ready"] == 0
"""

STAGES = """
import sys

import numpy as np

from jaxengine import LLM, SamplingParams
from tests.conftest import TINY_OPTIONS
from tests.fixtures.drawn_weights import checkpoint

names = sys.argv[3].split()
sizes = {"max_model_len": 64, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40}
options = TINY_OPTIONS | sizes | {"model": str(checkpoint(sys.argv[2])), "compile_cache_dir": sys.argv[1]}
options |= {"capture": names, "capture_layers": sys.argv[4]}
asked = {"capture": names, "return_hidden_states": True}
# Others without it find the prefixes of those that ask, and the other way round nothing is taken from the cache.
params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=20, **(asked if at % 3 else {})) for at in range(9)]
shared = list(range(40, 53))
prompts = [{"prompt_token_ids": shared * (at % 2) + list(range(9, 14 + 3 * at))} for at in range(9)]


def run(stages):
    llm = LLM(**options, pipeline_parallel_size=stages)
    outputs = [each for _ in range(2) for each in llm.generate(prompts, params, use_tqdm=False)]
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0, metrics
    return [each.outputs[0] for each in outputs]


asked = 0
for one, two in zip(run(1), run(2), strict=True):
    assert one.token_ids == two.token_ids
    assert (one.captured is None) == (two.captured is None)
    for name, own in (one.captured or {}).items():
        np.testing.assert_array_equal(two.captured[name], own, name)
    if one.captured is not None:
        assert one.captured.keys() == two.captured.keys() and len(one.captured) >= len(names)
        np.testing.assert_array_equal(two.hidden_states, one.hidden_states)
        asked += 1
assert asked == 12, asked
"""
EVERY = "residual:* attention_output:* mlp_output:1 router_logits:* final_norm"


def run(code: str, num_devices: int, *arguments: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")  # those of fast_compile
    forced = f"{flags} --xla_force_host_platform_device_count={num_devices}"
    env = {**os.environ, "XLA_FLAGS": forced, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param("", id="one token a step", marks=pytest.mark.thorough("test_routed_experts.py compares them")),
        pytest.param("drafts", id="drafts", marks=pytest.mark.thorough("drafts are in tests/jaxengine/engine, too")),
    ],
)
def test_activations_are_those_of_one_device(executables_dir, drafts):
    run(CODE, 4, executables_dir, drafts)


@pytest.mark.parametrize(
    ("name", "names", "layers"),
    [
        pytest.param("qwen3_moe", EVERY, "0,1,-1", id="all", marks=pytest.mark.thorough("two engines, as above")),
        # The second stage has nothing that was asked for.
        pytest.param("llama", "mlp_output:0", "0,1", id="one stage", marks=pytest.mark.thorough("two engines")),
    ],
)
def test_stages_give_the_bits_of_one(executables_dir, name, names, layers):
    """In chunks, preempted, and beside requests that find their prefixes in the cache."""
    run(STAGES, 2, executables_dir, name, names, layers)


def test_each_place_is_of_one_stage():
    """What a layer gives is its stage's, also where the next stage takes it."""
    kinds = ("attention_output", "mlp_output", "router_logits")
    taps = [Tap(kind, layer) for kind in kinds for layer in range(5)] + [Tap("final_norm", 0)]
    layers = tuple(Tap("residual", layer) for layer in range(6))
    first, middle, last = (stage_taps(EngineTaps(tuple(taps), layers, {}), each) for each in stages_of([1, 2, 2]))
    assert set(first.hidden) == {*layers[:2], Tap("attention_output", 0), Tap("mlp_output", 0)}
    assert set(middle.hidden) == {*layers[2:4], *(Tap(kind, layer) for kind in kinds[:2] for layer in (1, 2))}
    assert set(last.hidden) == {*layers[4:], taps[-1], *(Tap(kind, layer) for kind in kinds[:2] for layer in (3, 4))}
    assert [[tap.layer for tap in each.router] for each in (first, middle, last)] == [[0], [1, 2], [3, 4]]

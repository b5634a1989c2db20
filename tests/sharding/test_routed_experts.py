"""What requests get besides tokens is that of one device where stages, replicas and devices with experts of their own
split a model: routed experts and activations.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys

import numpy as np
from flax import nnx

from jaxengine import LLM
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.test_routed_experts import OPTIONS, assert_picked, generate, params, some_prompts
from tests.models.conftest import load_recorded
from tests.models.layers.test_taps import _activations

name, sizes = sys.argv[2], dict.fromkeys(sys.argv[3].split(), 2)
options = {f"{which}_parallel_size": size for which, size in sizes.items()}
options |= {"model": str(checkpoint(name)), "compile_cache_dir": sys.argv[1], "max_num_batched_tokens": 16}
names = ("residual:*", "attention_output:0", "mlp_output:*", "router_logits:*", "final_norm")
options |= {"capture": names, "enable_expert_parallel": True}
llm = LLM(**OPTIONS | options)
for _ in range(2):
    outputs = generate(llm, some_prompts(9), [params(index % 5 + 2) for index in range(9)])
    assert_picked(outputs, name)
assert sum(each.num_cached_tokens for each in outputs) > 40
# Whole sequences of one length, whose activations one program computes.
prompts = [[7, 8, 9] * 8, [5, 6, 7, 8, 5, 6, 7, 8], list(range(3, 30)), [4]]
outputs = generate(llm, prompts, [params(49 - len(each), capture=names) for each in prompts])
state = nnx.split(load_recorded(name).model)
for prompt, output in zip(prompts, outputs, strict=True):
    wanted = _activations(*state, np.array([*prompt, *output.outputs[0].token_ids[:-1]], np.int32), names)
    found = output.outputs[0].captured
    assert found.keys() == wanted.keys(), found.keys()
    for tap, own in found.items():
        assert own.shape == wanted[tap].shape and own.dtype == np.float32, (tap, own.shape)
        assert np.abs(own - wanted[tap]).max() <= 1e-4 * np.abs(wanted[tap]).max(), tap
metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
assert metrics["jaxengine:compilations_since_ready"] == 0
"""


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("qwen3_moe", "tensor data pipeline"),
        pytest.param("deepseek_v3", "tensor data", marks=pytest.mark.thorough("an engine of its own")),
    ],
)
def test_experts_and_activations_are_those_of_one_device(executables_dir, name, split):
    flags = os.environ.get("XLA_FLAGS", "")  # those of fast_compile
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CODE, executables_dir, name, split]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

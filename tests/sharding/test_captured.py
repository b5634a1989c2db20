"""Activations are those of one device where devices split the model and the requests, and drafts are wrong or right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
drafts = {"method": "ngram", "num_speculative_tokens": 2}
names = ("residual:*", "attention_output:0", "mlp_output:*", "router_logits:*", "final_norm")
options = TINY_OPTIONS | sizes | {"speculative_config": drafts, "compile_cache_dir": sys.argv[1]}
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
made, right = (metrics[f"vllm:spec_decode_num_{which}_tokens"] for which in ("draft", "accepted"))
assert 0 < right < made, (right, made)
assert metrics["jaxengine:compilations_since_ready"] == 0
"""


def test_activations_are_those_of_one_device(executables_dir):
    flags = os.environ.get("XLA_FLAGS", "")  # those of fast_compile
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CODE, executables_dir]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

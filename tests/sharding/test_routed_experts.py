"""Routed experts are those of one device where stages, replicas and devices with experts of their own split a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import sys

from jaxengine import LLM, SamplingParams
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.test_routed_experts import OPTIONS, assert_picked, generate, params, some_prompts

name, sizes = sys.argv[2], dict.fromkeys(sys.argv[3].split(), 2)
options = {f"{which}_parallel_size": size for which, size in sizes.items()}
options |= {"model": str(checkpoint(name)), "compile_cache_dir": sys.argv[1], "max_num_batched_tokens": 16}
llm = LLM(**OPTIONS | options | {"enable_expert_parallel": True})
for _ in range(2):
    outputs = generate(llm, some_prompts(9), [params(index % 5 + 2) for index in range(9)])
    assert_picked(outputs, name)
assert sum(each.num_cached_tokens for each in outputs) > 40
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
def test_experts_are_those_of_one_device(executables_dir, name, split):
    flags = os.environ.get("XLA_FLAGS", "")  # those of fast_compile
    env = {**os.environ, "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CODE, executables_dir, name, split]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

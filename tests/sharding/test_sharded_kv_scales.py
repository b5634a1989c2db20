"""Scales of a cache of codes on several devices: measured as on one device, and each head's where the head is.

Run as a module with eight devices it prints them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
# Two kv heads: each is stored twice on four devices.
SPLIT = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "replicate_kv_heads": True}


def main(folder: str) -> None:
    from jaxengine import LLM
    from tests.sharding.parallel_cases import OPTIONS
    from tests.sharding.parallel_models import MODELS

    assert jax.device_count() == 8
    Path(folder, "config.json").write_text(json.dumps(MODELS["tied"]))
    few = {"skip_tokenizer_init": True, "enforce_eager": True, "compile_cache_dir": "", "kv_cache_dtype": "int8"}
    for options in ({}, SPLIT):
        stages = LLM(folder, **OPTIONS | few | options).core.runner.stages
        kinds = (np.concatenate([getattr(stage._kv, name) for stage in stages]) for name in ("k_scale", "v_scale"))
        print(json.dumps([kind.tolist() for kind in kinds]))


@pytest.mark.thorough("half a minute of compiling")
def test_scales_are_those_of_one_device(tmp_path):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.test_sharded_kv_scales", str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, split = (np.array(json.loads(line)) for line in done.stdout.splitlines())
    assert alone.shape == (2, 4, 2) and len(np.unique(alone)) == alone.size
    np.testing.assert_allclose(split, np.repeat(alone, 2, axis=2), rtol=1e-5)


if __name__ == "__main__":
    main(*sys.argv[1:])

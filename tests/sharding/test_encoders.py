"""Encoders over several devices and stages give what transformers gives; four devices forced on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
# Labels are scored in the last stage, which has no token table.
CODE = """
import json, sys
from jaxengine import LLM, PoolingParams
from tests.fixtures.encoder_models import TEXTS
from tests.jaxengine.api.test_encoders import OPTIONS

options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "compile_cache_dir": sys.argv[2]}
llm = LLM(sys.argv[1], **OPTIONS, **options)
outputs = llm.encode(TEXTS, PoolingParams(use_activation=False), use_tqdm=False)
print(json.dumps([each.outputs.data.tolist() for each in outputs]))
"""


@pytest.mark.parametrize("name", ["roberta_labels", pytest.param("jina_v2_code", marks=pytest.mark.thorough("slopes"))])
def test_two_stages_on_two_devices_each(encoder_folder, executables_dir, name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", CODE, encoder_folder(name), executables_dir]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    golden = np.load(ROOT / "tests" / "fixtures" / "encoders.npz")[name]
    found = np.array(json.loads(done.stdout.splitlines()[-1]))
    found = found / (np.linalg.norm(found, axis=1, keepdims=True) if name == "jina_v2_code" else 1)
    assert np.abs(found - golden).max() <= 1e-5

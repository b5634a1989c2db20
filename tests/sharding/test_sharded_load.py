"""Loading into a mesh of several devices, in a process of its own that forces eight of them on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import ModelConfig, read_config_json
from models.declare import declared_params
from models.loading.dummy import dummy_params
from models.loading.params import load_params
from models.loading.safetensors import SafetensorsCheckpoint
from models.registry import build_model
from sharding.mesh import make_mesh
from sharding.rules import named_sharding

folder = sys.argv[1]
assert jax.device_count() == 8
mesh = make_mesh(data=2, attn=2, model=2)
model = build_model(ModelConfig.from_hf(read_config_json(folder)), dtype=jnp.float32)
source = SafetensorsCheckpoint(folder)
sharding_for = partial(named_sharding, mesh)
for make in (partial(load_params, model, source, dtype=jnp.float32), partial(dummy_params, model, seed=1)):
    plain, sharded = make(), make(sharding_for=sharding_for)
    leaves = zip(jax.tree.leaves(plain), jax.tree.leaves(sharded), strict=True)
    for (one, many), param in zip(leaves, declared_params(model), strict=True):
        assert many.sharding == sharding_for(param.decl.axes), param.name
        assert len(many.addressable_shards) == 8
        np.testing.assert_array_equal(np.asarray(one), np.asarray(many), err_msg=param.name)
    layer = sharded["layers"][0]
    assert layer["attention"]["qkv"]["weight"][...].addressable_shards[0].data.shape == (64, 64)
    assert layer["attention"]["out"]["weight"][...].addressable_shards[0].data.shape == (32, 64)
    assert layer["mlp"]["gate_up"]["weight"][...].addressable_shards[0].data.shape == (64, 40)
    assert sharded["embed"]["weight"][...].addressable_shards[0].data.shape == (32, 64)
print("sharded load ok")
"""


def test_sharded_weights_equal_unsharded_ones():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    folder = ROOT / "tests" / "fixtures" / "models" / "qwen2"
    done = subprocess.run([sys.executable, "-c", SCRIPT, folder], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "sharded load ok" in done.stdout

"""Inputs that are rounded before a product and split over two devices: both round as one device does.

Run as a module it compares, with two forced CPU devices: python -m tests.sharding.test_rounded_inputs
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compare() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import PartitionSpec

    from models.quantization.eight_bits import CHANNEL, EightBits
    from models.quantization.quantized import Quantized
    from models.quantization.stored import Activation
    from models.weights.declare import Source
    from sharding.collectives import reduce_tokens
    from sharding.layout import MeshLayout
    from sharding.mesh import make_mesh

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 64)) * np.where(np.arange(64) < 32, 1, 20), jnp.float32)
    codes, scales = rng.integers(-127, 128, (64, 24), np.int8), rng.random((1, 24), np.float32)
    scheme = Quantized(EightBits("test", "int8", CHANNEL, Activation("int8")))

    def product(x, codes, scales, parts):
        weight = scheme.declare((64, 24), (Source("m", 24),), ("ffn", "embed"), dtype="float32", input_parts=parts)
        weight.codes = nnx.Param(codes)
        weight.scales = nnx.Param(scales)
        return reduce_tokens(weight.matmul(x), "ffn")

    alone = product(x, codes, scales, 1)
    mesh = make_mesh(MeshLayout(model=2), jax.devices()[:2])
    specs = PartitionSpec(None, "model"), PartitionSpec("model"), PartitionSpec()
    with jax.set_mesh(mesh):
        split = jax.shard_map(
            lambda *part: product(*part, 2), in_specs=specs, out_specs=PartitionSpec(), check_vma=False
        )
        both = jax.jit(split)(x, codes, scales)
    np.testing.assert_allclose(both, alone, rtol=1e-6, atol=1e-6 * float(jnp.abs(alone).max()))
    print("equal")


def test_two_devices_round_as_one_does():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "tests.sharding.test_rounded_inputs"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "equal\n", done.stderr[-3000:]


if __name__ == "__main__":
    compare()

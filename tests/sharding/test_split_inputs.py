"""Products whose inputs are split over two devices and are rounded, or lie in an order of their own: as on one device.

Run as a module it compares, with two forced CPU devices: python -m tests.sharding.test_split_inputs
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def compare() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.sharding import PartitionSpec

    from jaxengine.models.params.declare import Source
    from jaxengine.models.quantization.base.quantized import Quantized
    from jaxengine.models.quantization.base.stored import Activation
    from jaxengine.models.quantization.base.words import Packed
    from jaxengine.models.quantization.schemes.eight_bits import CHANNEL, EightBits
    from jaxengine.sharding.collectives import reduce_tokens
    from jaxengine.sharding.layout import MeshLayout
    from jaxengine.sharding.mesh import make_mesh

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 64)) * np.where(np.arange(64) < 32, 1, 20), jnp.float32)
    mesh = make_mesh(MeshLayout(model=2), jax.devices()[:2])
    sizes = jnp.array([2, 0, 3], jnp.int32)  # rows of each of three experts

    def both_ways(scheme: Any, x: Any, stack: tuple[int, ...], arrays: dict[str, Any]) -> tuple[Any, Any]:
        """A product with the arrays of a weight, on one device and on two."""

        def product(x, arrays, parts):
            axes = ("ffn", "embed") if not stack else ("experts", "ffn", "embed")
            options = {"dtype": "float32", "input_parts": parts, "num_experts": stack[0] if stack else None}
            name = "m.{expert}" if stack else "m"
            weight = scheme.declare((*stack, 64, 24), (Source(name, 24),), axes, **options)
            for kind, array in arrays.items():
                setattr(weight, kind, nnx.Param(array))
            y = weight.grouped_matmul(x, sizes, None, jnp.float32) if stack else weight.matmul(x)
            return reduce_tokens(y, "ffn")

        def part(array):
            axis = len(stack)  # that of inputs
            is_split = array.ndim == axis + 2 and array.shape[axis] > 1
            return PartitionSpec(*[None] * axis, "model") if is_split else PartitionSpec()

        specs = PartitionSpec(None, "model"), jax.tree.map(part, arrays)
        with jax.set_mesh(mesh):
            split = jax.shard_map(
                lambda x, arrays: product(x, arrays, 2), in_specs=specs, out_specs=PartitionSpec(), check_vma=False
            )
            both = jax.jit(split)(x, arrays)
        return jax.jit(lambda x, arrays: product(x, arrays, 1))(x, arrays), both

    def check(alone, both, expected=None):
        for each in (both,) if expected is None else (alone, both):
            against = alone if expected is None else expected
            np.testing.assert_allclose(each, against, rtol=1e-5, atol=1e-6 * float(np.abs(against).max()))

    arrays = {"codes": rng.integers(-127, 128, (64, 24), np.int8), "scales": rng.random((1, 24), np.float32)}
    check(*both_ways(Quantized(EightBits("test", "int8", CHANNEL, Activation("int8"))), x, (), arrays))

    for stack in ((), (3,)):
        arrays = {
            "codes": rng.integers(-127, 128, (*stack, 64, 24), np.int8),
            "scales": rng.random((*stack, 4, 24), np.float32),  # of 16 inputs each
            "order": np.int32([rng.permutation(64) for _ in range(*stack or (1,))]).reshape(*stack, 64),
        }
        matrix = arrays["codes"] * np.repeat(arrays["scales"].astype(np.float64), 16, axis=-2)
        groups = np.repeat(range(3), sizes) if stack else [()] * 5
        expected = np.stack([np.asarray(row)[arrays["order"][g]] @ matrix[g] for row, g in zip(x, groups, strict=True)])
        check(*both_ways(Quantized(Packed("test", 8, 16, False, reordered=True)), x, stack, arrays), expected)
    print("equal")


def test_two_devices_multiply_as_one_does():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    command = [sys.executable, "-m", "tests.sharding.test_split_inputs"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "equal\n", done.stderr[-3000:]


if __name__ == "__main__":
    compare()

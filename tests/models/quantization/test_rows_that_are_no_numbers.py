"""Rows with NaN at weights that round them: what comes out must say so."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.params.declare import Source
from jaxengine.models.quantization.base.quantized import Quantized
from jaxengine.models.quantization.base.stored import Activation
from jaxengine.models.quantization.schemes.eight_bits import CHANNEL, EightBits


@pytest.mark.parametrize("num_experts", [None, 2])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_row_with_nan_is_one_afterwards(dtype, static, num_experts):
    """Also where rows get int8 codes by a scale of the checkpoint's; other rows know nothing of it."""
    stack = () if num_experts is None else (num_experts,)
    scheme, axes = Quantized(EightBits("test", dtype, CHANNEL, Activation(dtype, static=static))), ("embed", "ffn")
    name = "m" if num_experts is None else "m.{expert}"
    weight = scheme.declare(
        (*stack, 64, 24), (Source(name, 24),), (*[None] * len(stack), *axes), dtype="float32", num_experts=num_experts
    )
    arrays = {"codes": jnp.ones((*stack, 64, 24), dtype), "scales": jnp.ones((*stack, 1, 24))}
    arrays |= {"input_scale": jnp.full((*stack, 1), 0.1)} if static else {}
    for kind, array in arrays.items():
        assert getattr(weight, kind).shape == array.shape
        setattr(weight, kind, nnx.Param(array))
    x = jnp.ones((5, 64)).at[3, 7].set(jnp.nan)
    if num_experts is None:
        y = weight.matmul(x)
    else:
        y = weight.grouped_matmul(x, jnp.array([2, 3], jnp.int32), None, jnp.float32)
    np.testing.assert_array_equal(np.isnan(y), np.arange(5)[:, None] == np.full(24, 3))

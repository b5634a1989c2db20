"""Which gates and ups the Hopper kernel activates, too, and for which cards."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxengine.models.layers.base.mlp import ClampedSwish
from jaxengine.pallas_kernels.matmul.grouped import gated_matmul
from jaxengine.pallas_kernels.matmul.hopper.gated import why_not_fused
from jaxengine.pallas_kernels.matmul.quantized import quantized_gated_matmul
from tests.pallas_kernels.hopper_products import GATED, hopper_gated, silu_times
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, each_on_card
from tests.pallas_kernels.matmul.test_hopper import B200, H100, HERE, mesh_of


@each_on_card(GATED, HERE is not None and HERE.hopper)
def test_gates_and_ups_on_the_device(name):
    hopper_gated(name, IMPLEMENTATIONS["device"])


@pytest.mark.parametrize(
    ("kind", "width", "activation", "fused"),
    [
        (H100, 72, silu_times, True),
        (H100, 64, ClampedSwish(1.7, 7.0), True),
        (H100, 64, lambda gate, up: jax.nn.gelu(gate) * up, True),
        (H100, 68, silu_times, False),
        (H100, 64, lambda gate, up: jax.lax.erf(gate) * up, False),
        (B200, 64, silu_times, False),
    ],
)
@pytest.mark.parametrize("codes", ["bfloat16", "int8"])
def test_gates_and_ups_are_one_kernel_on_hopper_cards(kind, width, activation, fused, codes):
    shapes = ((40, 128), "bfloat16"), ((4, 128, 2 * width), codes), ((4, 1, 2 * width), "float32")
    x, matrix, scales = (jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes)
    sizes, bias = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((4, 2 * width), jnp.bfloat16)
    with mesh_of(kind):
        if codes == "bfloat16":
            traced = jax.jit(partial(gated_matmul, activation=activation)).trace(x, matrix, sizes, bias)
        else:
            product = jax.jit(partial(quantized_gated_matmul, activation=activation))
            traced = product.trace(x, matrix, scales, None, sizes, bias)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = "gated_matmul_", "grouped_matmul_"
    assert [name in text for name in names] == [fused, not fused]


def test_what_the_kernel_of_gates_and_ups_leaves_to_xla():
    assert why_not_fused(68, silu_times) == "68 columns are no multiple of 8"
    assert why_not_fused(64, lambda gate, up: jnp.sin(gate) * jnp.floor(up)) == "the activation has floor, sin"
    array = jnp.arange(64.0)[:, None]
    assert why_not_fused(64, lambda gate, up: gate * array * up) == "the activation holds arrays"

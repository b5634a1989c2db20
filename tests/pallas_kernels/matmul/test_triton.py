"""Triton products: the cards that run them, what they leave to XLA, how they cut the work, and lowering.

Their numbers are under conformance: tests/pallas_kernels/test_interpreted.py.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.params.declare import ParamDecl, Source
from jaxengine.models.weights.views.parts import order_of
from jaxengine.pallas_kernels.cards import Card, card_of_trace, plain_cards
from jaxengine.pallas_kernels.matmul.quantized import product_of, quantized_matmul
from jaxengine.pallas_kernels.matmul.rounding import RoundedRows
from jaxengine.pallas_kernels.matmul.triton.quantized import Shape, why_xla
from jaxengine.pallas_kernels.registry import PLATFORM_ROWS, platform_rows
from jaxengine.pallas_kernels.triton import widened, widened_pairs
from jaxengine.pallas_kernels.tuning import TritonProducts, tuning_of
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, each_on_card
from tests.pallas_kernels.matmul.test_hopper import mesh_of
from tests.pallas_kernels.triton_products import PRODUCTS, triton_product
from tests.tables import each_row

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
CARDS = (
    A100,
    "NVIDIA A10G",
    "NVIDIA RTX A6000",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA L4",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA GB10",
)
HERE = card_of_trace()


@each_on_card(PRODUCTS, HERE is not None and HERE.triton)
def test_products_on_the_device(name):
    triton_product(name, IMPLEMENTATIONS["device"])


@each_row("kind", CARDS)
def test_cards_are_known_by_their_names(kind):
    with mesh_of(kind):
        assert card_of_trace() == Card(False, 114, triton=True)
        assert platform_rows() == PLATFORM_ROWS | {"cuda": "gpu_triton"}
        assert tuning_of("gpu_triton").triton_products.num_ctas == 114
        with plain_cards():
            assert card_of_trace() == Card(False, 114)
            assert platform_rows() == PLATFORM_ROWS
    with mesh_of(H100):
        assert platform_rows() == PLATFORM_ROWS


# Inputs, outputs, scales, codes, dtype; the reason, "" for none.
TAKEN = [
    (4096, 4096, 32, "uint8", "bfloat16", ""),
    (2880, 32, 90, "uint8", "bfloat16", ""),
    (4096, 40, 1, "int8", "bfloat16", ""),
    (48, 40, 1, "float8_e4m3fn", "bfloat16", ""),
    (48, 40, 1, "uint8", "bfloat16", "groups of 48 inputs are no multiple of 32"),
    (64, 40, 8, "int8", "bfloat16", "groups of 8 inputs are no multiple of 16"),
    (4096, 24, 1, "int8", "bfloat16", "24 outputs are fewer than 32"),
    (4096, 4096, 1, "int8", "float32", "the kernel widens to bfloat16, not float32"),
    (2**13, 2**18, 1, "int8", "bfloat16", ""),
    (2**13, 2**18 + 8, 1, "int8", "bfloat16", "2147549184 bytes of codes, whose offsets jax's lowering keeps in 32"),
]


@each_row("row", TAKEN)
def test_what_they_leave_to_xla(row):
    size, out, num_scales, codes, dtype, reason = row
    found = why_xla(size, out, num_scales, jnp.dtype(codes), jnp.dtype(dtype))
    assert found.startswith(reason) if reason else not found, found
    module = product_of("quantized_matmul", "gpu_triton", size, out, num_scales, codes, dtype)
    assert module == (f"matmul.xla.quantized: {found}" if reason else "matmul.triton.quantized")


def test_every_code_is_widened_exactly():
    every = np.arange(256, dtype=np.uint8)
    for name in ("int8", "float8_e4m3fn", "float8_e5m2"):
        codes = jnp.asarray(every).view(jnp.dtype(name))
        np.testing.assert_array_equal(widened(codes, jnp.bfloat16).astype(jnp.float32), codes.astype(jnp.float32))
    pairs = np.stack([every & 15, every >> 4], axis=-1).astype(np.int8)
    assert (np.asarray(widened_pairs(jnp.asarray(every[None])), np.float32) == ((pairs ^ 8) - 8).reshape(1, -1)).all()


@each_row("rows", (1, 16, 17, 64, 65, 2048))
def test_every_input_is_multiplied_once(rows):
    """And tiles fit the shared memory of Ada, with what is in flight."""
    for size, out, group, codes in ((4096, 6144, 128, "uint8"), (2880, 40, 32, "uint8"), (14336, 1024, 14336, "int8")):
        for num_ctas in (1, 58, 108):
            sizes = TritonProducts(num_ctas=num_ctas)
            given = rows, size, out, size // group, jnp.dtype(codes), True, jnp.dtype("bfloat16"), sizes
            shape = Shape(*given)
            assert shape.steps * shape.products * shape.inputs == size and group % shape.inputs == 0
            assert (shape.splits - 1) * shape.per_split < shape.steps <= shape.splits * shape.per_split
            assert shape.splits == 1 or 2 * shape.row_tiles * shape.out_tiles <= num_ctas
            assert shape.row_tiles * shape.tile_rows >= rows and shape.out_tiles * shape.outputs >= out
            stage = shape.step_inputs * (2 * shape.tile_rows + shape.outputs // shape.packed)
            assert stage * sizes.stages <= 99 << 10


def _program(kind: str, rows: int, *, rounded: bool = False, codes: str = "uint8") -> str:
    size, out = 256, 128
    x: Any = jax.ShapeDtypeStruct((rows, size), jnp.int8 if rounded else jnp.bfloat16)
    x_scales: Any = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    x = RoundedRows(x, x_scales) if rounded else x
    matrix = jax.ShapeDtypeStruct((size // (2 if codes == "uint8" else 1), out), jnp.dtype(codes))
    scales = jax.ShapeDtypeStruct((2 if codes == "uint8" else 1, out), jnp.float32)
    with mesh_of(kind):
        traced = jax.jit(partial(quantized_matmul, dtype=jnp.bfloat16)).trace(x, matrix, scales)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.versions
def test_they_lower_for_a_card(caplog):
    """To one Triton module; not for other cards, for rounded rows, or where XLA's product is as good or better."""
    mark, most = "@__gpu$xla.gpu.triton", TritonProducts().most_rows
    assert [_program(A100, rows).count(mark) for rows in (1, most, most + 1)] == [1, 1, 0]
    assert [_program(A100, rows, codes="int8").count(mark) for rows in (64, 65)] == [1, 0]
    assert mark not in _program(H100, 1) and mark not in _program(A100, 1, rounded=True)


def test_columns_of_codes_are_in_one_piece_but_for_experts():
    decl = ParamDecl(("embed", "mlp"), (Source("up.weight:pairs", 4),), transposed_on_gpu=True)
    stack = ParamDecl(("experts", "embed", "mlp"), (Source("up.weight", 4),), num_experts=4, transposed_on_gpu=True)
    for capability in ("8.0", "12.0"):
        sharding: Any = SimpleNamespace(device_set=[SimpleNamespace(platform="gpu", compute_capability=capability)])
        assert order_of(decl, sharding) == (1, 0)
        assert order_of(stack, sharding) is None

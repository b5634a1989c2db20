"""Which products with quantised matrices the Hopper kernel takes, for which cards, and how it cuts them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from models.weights.declare import ParamDecl, Source
from models.weights.parts import order_of
from pallas_kernels.matmul.hopper.shape import OUTPUTS, Shape, why_xla
from pallas_kernels.matmul.quantized import product_of, quantized_matmul
from pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES
from pallas_kernels.tuning import Card, HopperProducts, card_of_trace, tuning_of
from tests.pallas_kernels.hopper_products import PRODUCTS, hopper_product
from tests.pallas_kernels.implementations import IMPLEMENTATIONS

HERE = card_of_trace()
CARDS = {"NVIDIA H100 80GB HBM3": True, "NVIDIA GH200 480GB": True, "NVIDIA H20": True, "NVIDIA B200": False}
CARDS |= {"NVIDIA A100-SXM4-80GB": False, "NVIDIA GeForce RTX 4090": False}


@pytest.mark.skipif(HERE is None or not HERE.hopper, reason="there is no Hopper card here")
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_on_the_device(name):
    hopper_product(name, IMPLEMENTATIONS["device"])


def mesh_of(kind: str, num_cores: int | None = 114) -> Any:
    device: Any = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="gpu" if "NVIDIA" in kind else "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize(("kind", "hopper"), CARDS.items())
def test_cards_are_known_by_their_names(kind, hopper):
    with mesh_of(kind):
        assert card_of_trace() == Card(hopper, 114)
        assert tuning_of("gpu").hopper_products.num_ctas == 114
    with mesh_of("TPU v6e", 1):
        assert card_of_trace() is None


@pytest.mark.parametrize(
    ("size", "dtype", "kind", "taken"),
    [
        (256, "bfloat16", "NVIDIA H100 80GB HBM3", True),
        (256, "bfloat16", "NVIDIA B200", False),
        (256, "float32", "NVIDIA H100 80GB HBM3", False),
        (96, "bfloat16", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_the_kernel_is_in_programs_for_hopper_cards(size, dtype, kind, taken):
    shapes = [((4, size), dtype), ((size // 2, 128), "uint8"), ((size // 32, 128), "float32")]
    with mesh_of(kind):
        traced = jax.jit(partial(quantized_matmul, out_dtype=jnp.float32)).trace(
            *(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == taken


@pytest.mark.parametrize(
    ("size", "out", "num_scales", "codes", "dtype", "reason"),
    [
        (4096, 4096, 32, "uint8", "bfloat16", ""),
        (4096, 4096, 1, "uint8", "bfloat16", ""),
        (576, 1544, 9, "int8", "bfloat16", ""),
        (4096, 4096, 32, "uint8", "float32", "widens to bfloat16, not float32"),
        (4096, 4096, 1, "int8", "bfloat16", "one scale a channel"),
        (4128, 4096, 129, "uint8", "bfloat16", "4128 inputs are no multiple of 64"),
        (4096, 4096, 256, "uint8", "bfloat16", "groups of 16 inputs"),
        (576, 4096, 6, "uint8", "bfloat16", "groups of 96 inputs do not fit into tiles of 64"),
        (4096, 120, 32, "uint8", "bfloat16", "120 outputs"),
        (4096, 1004, 32, "uint8", "bfloat16", "1004 outputs"),
    ],
)
def test_what_is_left_to_xla_says_why(size, out, num_scales, codes, dtype, reason):
    given = size, out, num_scales, jnp.dtype(codes), jnp.dtype(dtype)
    assert reason in why_xla(*given) and bool(reason) == bool(why_xla(*given))
    told = product_of("gpu", *given)
    assert told == (f"matmul.quantized_xla: {why_xla(*given)}" if reason else "matmul.hopper.quantized")


@pytest.mark.parametrize("rows", [1, 8, 100, 256, 2048])
@pytest.mark.parametrize(("size", "out"), [(4096, 6144), (4096, 28672), (14336, 4096), (64, 128)])
@pytest.mark.parametrize(("codes", "packed"), [("uint8", 2), ("int8", 1)])
def test_tiles_cover_the_product_and_fit(rows, size, out, codes, packed):
    shape = Shape(rows, size, out, size // 32, jnp.dtype(codes), False, True, True, jnp.float32, HopperProducts())
    assert shape.row_tiles * shape.tile_rows >= rows and shape.out_tiles * OUTPUTS >= out
    assert (shape.splits - 1) * shape.per_split < shape.input_tiles <= shape.splits * shape.per_split
    assert min(2, shape.per_split) <= shape.stages <= shape.per_split, "nothing is under way while a tile is multiplied"
    of_rows = shape.tile_rows * shape.inputs * 2
    vectors = 4 * shape.sums * 2 * (OUTPUTS + shape.vector_rows)
    stored = OUTPUTS * shape.stored_rows * shape.stored_dtype.itemsize
    assert shape.stages * (OUTPUTS * shape.inputs // packed + of_rows + vectors) + stored < SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("platform", "capability", "order"), [("gpu", "9.0", (1, 0)), ("gpu", "10.0", None), ("cpu", "", None)]
)
def test_columns_of_codes_are_in_one_piece_on_hopper_cards(platform, capability, order):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    sharding: Any = SimpleNamespace(device_set=[device])
    decl = ParamDecl(("embed", "mlp"), (Source("up.weight:pairs", 4),), turned_on_gpu=True)
    assert order_of(decl, sharding) == order

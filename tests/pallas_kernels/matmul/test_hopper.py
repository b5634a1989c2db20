"""Which products with quantised matrices the Hopper kernel takes, for which cards, and how it cuts them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxengine.models.params.declare import ParamDecl, Source
from jaxengine.models.weights.views.parts import order_of
from jaxengine.pallas_kernels.cards import Card, card_of_trace, plain_cards
from jaxengine.pallas_kernels.matmul.grouped import grouped_matmul
from jaxengine.pallas_kernels.matmul.hopper import grouped, lora_shape, quantized
from jaxengine.pallas_kernels.matmul.hopper.grouped import Tiles, most_rows_of, most_tiles_of, tile_rows_of, tiles_of
from jaxengine.pallas_kernels.matmul.hopper.shape import OUTPUTS, Shape, step_of, why_xla
from jaxengine.pallas_kernels.matmul.lora import grouped_form, lora_product, lora_visits
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.quantized import product_of, quantized_matmul
from jaxengine.pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES
from jaxengine.pallas_kernels.registry import platform_of
from jaxengine.pallas_kernels.tuning import HopperProducts, LoraTiles, tuning_of
from tests.pallas_kernels import lora_products
from tests.pallas_kernels.hopper_products import GROUPS, PRODUCTS, hopper_grouped, hopper_product, silu_times
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, each_on_card
from tests.pallas_kernels.lora_products import HOPPER
from tests.tables import each_row

HERE = card_of_trace()
H100, B200, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA A100-SXM4-80GB"
# (Hopper, Blackwell); B300 is of compute capability 10.3.
CARDS = dict.fromkeys((H100, "NVIDIA GH200 480GB", "NVIDIA H20"), (True, False))
CARDS |= dict.fromkeys((B200, "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA GB300"), (False, True))
OTHERS = ("NVIDIA TITAN RTX", "NVIDIA GeForce RTX 2080 Ti")
CARDS |= dict.fromkeys(OTHERS, (False, False))
MULTIPLIES = HERE is not None and HERE.multiplies


@each_on_card(PRODUCTS, MULTIPLIES)
def test_products_on_the_device(name):
    hopper_product(name, replace(IMPLEMENTATIONS["device"], platform="gpu"))


@each_on_card(GROUPS, MULTIPLIES)
def test_products_of_groups_on_the_device(name):
    hopper_grouped(name, replace(IMPLEMENTATIONS["device"], platform="gpu"))


@each_on_card(HOPPER, HERE is not None and HERE.hopper)
def test_products_with_adapters_on_the_device(name):
    lora_products.lora_product(name, IMPLEMENTATIONS["device"])


def mesh_of(kind: str, num_cores: int | None = 114) -> Any:
    device: Any = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="gpu" if "NVIDIA" in kind else "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


@pytest.mark.parametrize("kind", CARDS)
def test_cards_are_known_by_their_names(kind):
    hopper, blackwell = CARDS[kind]
    with mesh_of(kind):
        assert card_of_trace() == Card(hopper, 114, blackwell)
        with plain_cards():
            assert card_of_trace() == Card(False, 114)
        assert tuning_of("gpu").hopper_products.num_ctas == 114
        assert tuning_of("gpu_blackwell").hopper_attention.num_ctas == 114
    with mesh_of("TPU v6e", 1):
        assert card_of_trace() is None


@pytest.mark.parametrize(
    ("size", "dtype", "kind", "taken"),
    [
        (256, "bfloat16", H100, True),
        (256, "bfloat16", B200, True),
        (256, "bfloat16", A100, False),
        (256, "float32", H100, False),
        (96, "bfloat16", B200, False),
    ],
)
def test_the_kernel_is_in_programs_for_cards_that_it_is_for(size, dtype, kind, taken):
    shapes = [((4, size), dtype), ((size // 2, 128), "uint8"), ((size // 32, 128), "float32")]
    with mesh_of(kind):
        traced = jax.jit(partial(quantized_matmul, out_dtype=jnp.float32)).trace(
            *(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == taken


@pytest.mark.parametrize(
    ("size", "dtype", "kind", "taken"),
    [
        (128, "bfloat16", H100, True),
        (128, "bfloat16", B200, True),
        (128, "bfloat16", A100, False),
        (128, "float32", H100, False),
        (96, "bfloat16", B200, False),
    ],
)
def test_the_kernel_of_groups_is_in_programs_for_cards_that_it_is_for(size, dtype, kind, taken):
    shapes = [((40, size), dtype), ((4, size, 128), dtype), ((4,), "int32")]
    with mesh_of(kind):
        traced = jax.jit(partial(grouped_matmul, out_dtype=jnp.float32)).trace(
            *(jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes)
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("mosaic_gpu" in text) == taken and ("scatter" in text) != taken


@pytest.mark.parametrize(("kind", "taken"), [("NVIDIA H100 80GB HBM3", True), ("NVIDIA B200", False)])
def test_the_kernels_of_adapters_are_in_programs_for_hopper_cards(kind, taken):
    shapes = [((8, 128), "float32"), ((8, 128), "bfloat16"), ((320, 128), "bfloat16"), ((320, 128), "bfloat16")]

    def product(slots, y, x, a, b):
        visits = lora_visits(slots, num_slots=20, rank=16)
        return lora_product(y, x, a, [b], visits, modules=(0,), rank=16)

    with mesh_of(kind):
        given = [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in [((8,), "int32"), *shapes]]
        text = jax.jit(product).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") > 1 if taken else "mosaic_gpu" not in text


def test_what_the_kernels_leave_to_xla_of_adapters():
    assert not any(lora_shape.why_xla(4096, (4096, 1024), rank, np.dtype("bfloat16")) for rank in (8, 16, 32, 64, 128))
    assert "rank 256" in lora_shape.why_xla(4096, (4096,), 256, np.dtype("bfloat16"))
    assert "multiply bfloat16" in lora_shape.why_xla(4096, (4096,), 16, np.dtype("float32"))
    assert "4096 inputs and 688 outputs" in lora_shape.why_xla(4096, (688,), 16, np.dtype("bfloat16"))
    assert grouped_form("gpu", 4096, (128,), 16, np.dtype("bfloat16")) == "matmul.hopper.lora"


@each_row("rows", [1, 8, 64, 80, 128, 144, 192, 256, 320, 8192])
@each_row("rank", [8, 128])
def test_tiles_of_adapters_fit_shared_memory(rows, rank):
    """Two stages at least; parts of sums take no more memory than rows times all slots' columns, or little."""
    slots = -(-min(64, rows) // (128 // rank))
    of = lora_shape.Shape(rows, 14336, (4096,), (0,), rank, slots, LoraTiles(), HopperProducts())
    assert of.stages_of_a >= 2 and of.stages_of_b >= 2
    assert (of.row_tiles - 1) * of.tile_rows < rows <= of.row_tiles * of.tile_rows <= of.padded
    assert (of.splits - 1) * of.per_split * of.inputs < of.size <= of.splits * of.per_split * of.inputs
    assert of.splits == 1 or 4 * of.splits * of.slot_tiles * of.row_tiles * of.tile_rows * 128 < 36 << 20


def test_plain_cards_have_no_kernels():
    """What `check --kernels gpu_xla` compiles."""
    shapes = ((4, 256), "bfloat16"), ((128, 128), "uint8"), ((8, 128), "float32")
    operands = [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for shape, name in shapes]
    device: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")
    for plain in (True, False):
        with mesh_of("NVIDIA H100 80GB HBM3"), plain_cards() if plain else nullcontext():
            traced = jax.jit(partial(quantized_matmul, out_dtype=jnp.float32)).trace(*operands)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert platform_of(device) == ("gpu_xla" if plain else "gpu")
        assert ("mosaic_gpu" in text) != plain


@pytest.mark.parametrize(
    ("tokens", "experts", "picked", "most"),
    [
        *((8192, 128, 8, 1.02), (1024, 256, 8, 1.13)),
        *(
            pytest.param(*row, marks=pytest.mark.thorough("between sizes that are measured"))
            for row in ((8192, 8, 2, 1.01), (16384, 128, 4, 1.02), (1024, 128, 8, 1.07))
        ),
    ],
)
def test_tiles_of_groups_multiply_few_rows_more(tokens, experts, picked, most):
    """Spread at random: groups are filled up to the next eighth row, and the room for them is little more than rows."""
    rows = tokens * picked
    tile = tile_rows_of(rows, experts, HopperProducts().rows)
    step = step_of(tile, tensor_memory=False)
    spread = np.random.default_rng(0).multinomial(rows, [1 / experts] * experts)
    tiles = tiles_of(jnp.asarray(spread, jnp.int32), rows, tile, step)
    assert listed(tiles)[:, 2].sum() * step <= most * rows
    assert tiles.source.size <= rows + (step - 1) * experts


def listed(tiles: Tiles) -> np.ndarray:
    """(group, first step, steps) of each tile there is."""
    rows = np.asarray(tiles.tiles).reshape(-1, quantized.TILE)
    return rows[rows[:, 0] >= 0]


@pytest.mark.parametrize("step", [8, 16])
@pytest.mark.parametrize("sizes", [[0, 5, 8, 0, 57], [0] * 5, [70, 0, 0, 0, 0], [0, 0, 0, 0, 1], [9, 1, 1, 1, 58]])
def test_rows_of_groups_have_places_in_tiles_of_their_own(sizes, step):
    tile_rows, num_rows = 32, 70
    tiles = jax.tree.map(np.asarray, tiles_of(jnp.asarray(sizes, jnp.int32), num_rows, tile_rows, step))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    assert tiles.is_row.sum() == len(owners) and tiles.is_row[: len(owners)].all()
    assert len(tiles.tiles) == quantized.TILE * most_tiles_of(num_rows, len(sizes), tile_rows)
    assert len(tiles.source) == most_rows_of(num_rows, len(sizes), step)
    group_of = {}  # of every row in tiles
    for group, first, steps in listed(tiles):
        assert 1 <= steps <= tile_rows // step
        for place in range(first * step, (first + steps) * step):
            assert place not in group_of and place < len(tiles.source)
            group_of[place] = group
    assert len(group_of) == sum(-(-size // step) * step for size in sizes)
    for row, owner in enumerate(owners):
        assert tiles.source[tiles.index[row]] == row and group_of[tiles.index[row]] == owner


@each_row("rows", [1, 9, 100, 4000])
@each_row("groups", [1, 7, 128])
def test_there_are_tiles_for_every_spread(rows, groups):
    tile = tile_rows_of(rows, groups, 128)
    rng = np.random.default_rng(rows)
    spreads = [[1] * (min(groups, rows) - 1) + [rows - min(groups, rows) + 1], [rows]]
    spreads += [rng.multinomial(rows, rng.dirichlet([0.2] * groups)) for _ in range(20)]
    assert max(sum(-(-n // tile) for n in spread) for spread in spreads) <= most_tiles_of(rows, groups, tile)
    for step in (8, 16):
        assert tile % step == 0
        most = most_rows_of(rows, groups, step)
        assert max(sum(-(-n // step) * step for n in spread) for spread in spreads) <= most
        assert most % step == 0


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
    told = product_of("quantized_matmul", "gpu", *given)
    assert told == (f"matmul.xla.quantized: {why_xla(*given)}" if reason else "matmul.hopper.quantized")


@pytest.mark.parametrize(
    ("size", "codes", "reason"),
    [
        (768, "bfloat16", ""),
        (96, "bfloat16", "96 inputs are no multiple of 64"),
        (768, "int8", ""),
        (768, "float8_e4m3fn", ""),
    ],
)
def test_matrices_of_groups_need_no_scales_of_groups(size, codes, reason):
    op = "grouped_matmul" if codes == "bfloat16" else "quantized_grouped_matmul"
    told = product_of(op, "gpu", size, 2048, 1, jnp.dtype(codes), jnp.bfloat16)
    assert told == (f"matmul.xla.grouped: {reason}" if reason else "matmul.hopper.grouped")


@pytest.mark.parametrize("tensor_memory", [False, True])
@pytest.mark.parametrize(
    ("codes", "group"), [("bfloat16", 256), ("uint8", 32), ("uint8", 128), ("int8", 16), ("int8", 32)]
)
def test_tiles_of_groups_are_those_of_the_kernel(codes, group, tensor_memory, monkeypatch):
    """Each tile of the kernel has its group, however many rows its memories hold."""
    codes, made = jnp.dtype(codes), []

    def multiply(shape, x, x_scales, codes, scales, zeros, tiles, **_):
        assert shape.tile_rows % shape.step == 0 and shape.tile_rows // shape.step <= 8
        made.append(((shape.row_tiles * quantized.TILE, shape.padded), (tiles.size, x.shape[0])))
        return jnp.zeros((x.shape[0], shape.out), shape.out_dtype)

    monkeypatch.setattr(quantized, "multiply", multiply)
    options = {"out_dtype": jnp.float32, "interpret": True, "tensor_memory": tensor_memory}
    for rows, groups in ((8, 4), (100, 16), (300, 4), (1500, 2), (4096, 2)):
        x, sizes = jnp.zeros((rows, 256), jnp.bfloat16), jnp.zeros(groups, jnp.int32)
        matrix = jnp.zeros((groups, 256 // per_byte(codes), 128), codes)
        if codes == jnp.bfloat16:
            jax.eval_shape(partial(grouped.grouped_matmul, **options), x, matrix, sizes)
            continue
        scales = jnp.ones((groups, 256 // group, 128))
        product = partial(grouped.quantized_grouped_matmul, dtype=jnp.bfloat16, **options)
        jax.eval_shape(product, QuantizedOperands(x, None, matrix, scales, None), sizes)
    assert len(made) == 5 and all(of_kernel == of_rows for of_kernel, of_rows in made), made


@each_row("rows", [16, 32, 64, 128])
@each_row(("codes", "group"), [("bfloat16", 2880), ("uint8", 32), ("float8_e4m3fn", 2880)])
@each_row("gating", [None, silu_times])
def test_tiles_of_groups_fit_twice(rows, codes, group, gating):
    """The inputs of gpt-oss; two CTAs share a multiprocessor unless registers are too few for it."""
    codes, plain = jnp.dtype(codes), codes == "bfloat16"
    of_groups = {"tiles": 4, "has_scales": not plain, "gating": gating}
    sizes = HopperProducts(num_ctas=1, rows=rows)
    shape = Shape(4 * rows, 2880, 2880, 2880 // group, codes, plain, not plain, False, jnp.float32, sizes, **of_groups)
    assert shape.splits == 1 and shape.stages >= 2
    vectors = 4 * shape.sums * (2 * OUTPUTS + shape.vector_rows) * (not plain)
    stage = OUTPUTS * shape.columns * codes.itemsize + shape.tile_rows * shape.inputs * 2 + vectors
    stored = OUTPUTS * shape.stored_rows * 4 if gating is None else 64 * (shape.stored_rows + rows + 8) * 4
    assert (2 if rows <= (64 if plain else 32) else 1) * (shape.stages * stage + stored) < SHARED_MEMORY_BYTES


@each_row("rows", [1, 8, 100, 256, 2048])
@each_row(("size", "out"), [(4096, 6144), (4096, 28672), (14336, 4096), (64, 128)])
@each_row(("codes", "packed"), [("uint8", 2), ("int8", 1)])
def test_tiles_cover_the_product_and_fit(rows, size, out, codes, packed):
    shape = Shape(rows, size, out, size // 32, jnp.dtype(codes), False, True, True, jnp.float32, HopperProducts())
    assert shape.row_tiles * shape.tile_rows >= rows and shape.out_tiles * OUTPUTS >= out
    assert (shape.splits - 1) * shape.per_split < shape.input_tiles <= shape.splits * shape.per_split
    assert min(2, shape.per_split) <= shape.stages <= shape.per_split, "nothing is under way while a tile is multiplied"
    of_rows = shape.tile_rows * shape.inputs * 2
    vectors = 4 * shape.sums * 2 * (OUTPUTS + shape.vector_rows)
    stored = OUTPUTS * shape.stored_rows * shape.stored_dtype.itemsize
    assert shape.stages * (OUTPUTS * shape.inputs // packed + of_rows + vectors) + stored < SHARED_MEMORY_BYTES


@each_row("rows", [1, 16, 20, 100, 2048])
@each_row("tiles", [0, 32])
@each_row(
    ("codes", "group", "native"),
    [("uint8", 32, False), ("uint8", 128, False), ("int8", 16, False), ("int8", 4096, False)]
    + [("float8_e4m3fn", 32, True), ("float8_e4m3fn", 128, True), ("bfloat16", 4096, True)],
)
def test_tiles_fit_the_memories_of_a_blackwell_card(rows, tiles, codes, group, native):
    """Two tiles at least are in flight, or the first would wait for the second to come: a product begins before the
    sums of the one before are scaled."""
    codes, plain = jnp.dtype(codes), codes == "bfloat16"
    of_groups = {"tiles": tiles, "has_scales": not plain, "tensor_memory": True}
    given = codes, native, not native, not plain, jnp.float32, HopperProducts()
    shape = Shape(rows, 4096, 4096, 4096 // group, *given, **of_groups)
    assert shape.tile_rows % 16 == 0
    assert tiles or (shape.row_tiles - 1) * shape.tile_rows < rows <= shape.row_tiles * shape.tile_rows
    assert min(2, shape.per_split) <= shape.stages <= shape.per_split
    assert shape.sum_columns <= 512
    assert shape.has_scales or shape.sum_columns == shape.tile_rows
    width = shape.row_dtype.itemsize
    stage = OUTPUTS * shape.columns * codes.itemsize + shape.tile_rows * shape.inputs * width
    stage += 4 * shape.sums * (1 + shape.has_zeros) * (OUTPUTS + shape.vector_rows) * (not plain)
    widened = 0 if native else 2 * OUTPUTS * shape.inputs * 2
    assert shape.stages * stage + widened + 2 * shape.stored_rows * OUTPUTS * 4 < SHARED_MEMORY_BYTES


@pytest.mark.parametrize(
    ("rows", "group", "codes", "tile"),
    [
        (128, 32, "uint8", 64),
        (96, 32, "uint8", 96),
        (1024, 32, "uint8", 96),
        (128, 64, "uint8", 128),
        (5, 32, "uint8", 8),
    ]
    + [(128, 32, "int8", 128)],
)
def test_tiles_have_the_rows_that_registers_hold(rows, group, codes, tile):
    """ptxas spills the sums of pairs in groups of 32 where a tile has 128 rows."""
    shape = Shape(rows, 4096, 4096, 4096 // group, jnp.dtype(codes), False, True, False, jnp.float32, HopperProducts())
    assert shape.tile_rows == tile and (shape.row_tiles - 1) * tile < rows <= shape.row_tiles * tile


@pytest.mark.parametrize(
    ("platform", "capability", "order"),
    [
        ("gpu", "9.0", (1, 0)),
        ("gpu", "10.0", (1, 0)),
        ("gpu", "10.3", (1, 0)),
        ("gpu", "7.5", None),
        ("cpu", "", None),
    ],
)
def test_columns_of_codes_are_in_one_piece_where_kernels_read_them_so(platform, capability, order):
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    sharding: Any = SimpleNamespace(device_set=[device])
    decl = ParamDecl(("embed", "mlp"), (Source("up.weight:pairs", 4),), transposed_on_gpu=True)
    assert order_of(decl, sharding) == order
    stack = ParamDecl(("experts", "embed", "mlp"), (Source("up.weight", 4),), num_experts=4, transposed_on_gpu=True)
    assert order_of(stack, sharding) == (None if order is None else (0, 2, 1))
    # What TPUs' kernels read row by row is turned there, too.
    both = replace(stack, row_major=True)
    assert order_of(both, sharding) == ((0, 1, 2) if order is None else (0, 2, 1))

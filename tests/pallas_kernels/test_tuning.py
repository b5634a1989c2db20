"""The tiles that the table gives to well-known shapes, written down, so that a change of a size or a rule is seen.

`python -m benchmarks tpu_cycles` and `attention` say what a change costs or gains.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.attention.blackwell.attend import COMPUTING as BLACKWELL
from jaxengine.pallas_kernels.attention.hopper import latent
from jaxengine.pallas_kernels.attention.hopper.attend import why_not
from jaxengine.pallas_kernels.attention.hopper.decode import DecodeShape
from jaxengine.pallas_kernels.attention.hopper.latent import LatentShape
from jaxengine.pallas_kernels.attention.hopper.prefill import registers as prefill_registers
from jaxengine.pallas_kernels.attention.hopper.prefill_shape import Shape
from jaxengine.pallas_kernels.attention.hopper.schedule import head_tiles, prefill_block_q, tiled_heads
from jaxengine.pallas_kernels.attention.op import AttentionSpec, gathered_by
from jaxengine.pallas_kernels.attention.tpu.schedule import block_q_of
from jaxengine.pallas_kernels.attention.tpu.tiles import SUBLANES, buffer_lanes, choose_blocks, choose_parts, fits_smem
from jaxengine.pallas_kernels.kv.pages import LANES
from jaxengine.pallas_kernels.matmul.hopper import lora, quantized, ring
from jaxengine.pallas_kernels.tuning import HopperAttention, TpuAttention, Tuning, XlaAttention, tuning_of
from tests.tables import each_row

# (query, kv) heads, head dim, page size, bytes of an element, tokens, columns of the page table; then tokens of a run
# tile, and (pages of a block, buffers, tiles of a grid step, heads at a time) of single and of run tiles.
TPU_TILES = [
    ((9, 3), 64, 16, 2, 8192, 513, 128, (64, 8, 8, 3), (32, 8, 1, 2)),
    ((9, 3), 64, 128, 1, 256, 257, 32, (8, 8, 8, 3), (4, 8, 1, 3)),
    ((15, 5), 64, 16, 2, 8192, 513, 128, (64, 6, 8, 5), (32, 8, 1, 2)),
    ((15, 5), 64, 128, 1, 256, 257, 32, (8, 8, 8, 5), (4, 8, 1, 5)),
    ((32, 32), 64, 16, 2, 8192, 513, 128, (64, 3, 8, 8), (32, 3, 1, 6)),
    ((32, 32), 64, 128, 1, 256, 257, 32, (8, 3, 8, 8), (4, 4, 1, 8)),
    ((32, 8), 64, 16, 2, 8192, 513, 128, (64, 4, 8, 8), (32, 7, 1, 1)),
    ((32, 8), 64, 16, 2, 64, 32, 16, (32, 7, 8, 8), (32, 7, 1, 8)),
    ((32, 8), 64, 64, 1, 2048, 64, 128, (16, 7, 8, 8), (8, 8, 1, 1)),
    ((32, 8), 64, 128, 1, 256, 257, 32, (8, 7, 8, 8), (4, 8, 1, 4)),
    ((32, 8), 64, 128, 4, 512, 3, 64, (3, 5, 8, 8), (3, 5, 1, 4)),
    ((24, 8), 128, 16, 2, 8192, 513, 128, (64, 3, 8, 8), (32, 4, 1, 2)),
    ((24, 8), 128, 128, 1, 256, 257, 32, (8, 4, 8, 8), (4, 7, 1, 8)),
    ((32, 8), 128, 16, 2, 8192, 513, 128, (64, 3, 8, 8), (32, 4, 1, 1)),
    ((32, 8), 128, 16, 2, 64, 32, 16, (32, 4, 8, 8), (32, 4, 1, 8)),
    ((32, 8), 128, 64, 1, 2048, 64, 128, (16, 4, 8, 8), (8, 7, 1, 1)),
    ((32, 8), 128, 128, 1, 256, 257, 32, (8, 4, 8, 8), (4, 7, 1, 4)),
    ((32, 8), 128, 128, 4, 512, 3, 64, (3, 3, 8, 8), (3, 3, 1, 4)),
    ((8, 1), 128, 16, 2, 8192, 513, 128, (64, 8, 8, 1), (32, 8, 1, 1)),
    ((8, 1), 128, 128, 1, 256, 257, 32, (32, 7, 8, 1), (4, 8, 1, 1)),
    ((14, 2), 64, 16, 2, 8192, 513, 128, (64, 8, 8, 2), (32, 8, 1, 1)),
    ((14, 2), 64, 128, 1, 256, 257, 32, (8, 8, 8, 2), (4, 8, 1, 2)),
    ((28, 4), 128, 16, 2, 8192, 513, 128, (64, 4, 8, 4), (32, 7, 1, 1)),
    ((28, 4), 128, 128, 1, 256, 257, 32, (8, 7, 8, 4), (4, 8, 1, 2)),
    ((16, 8), 128, 16, 2, 8192, 513, 128, (64, 3, 8, 8), (32, 4, 1, 3)),
    ((16, 8), 128, 128, 1, 256, 257, 32, (8, 4, 8, 8), (4, 7, 1, 8)),
    ((64, 8), 128, 16, 2, 8192, 513, 64, (64, 3, 8, 8), (32, 4, 1, 1)),
    ((64, 8), 128, 128, 1, 256, 257, 32, (8, 4, 8, 8), (4, 7, 1, 3)),
]
# (query, kv) heads, head dim, dtype of the pool, page size; then blocks and queries in flight of decode, and tokens of
# a tile, keys of a block and blocks in flight of prefill.
HOPPER_TILES = [
    ((9, 3), 64, "bfloat16", 16, (6, 2), 128, 128, 4),
    ((9, 3), 64, "int8", 64, (6, 2), 128, 64, 4),
    ((15, 5), 64, "bfloat16", 16, (6, 2), 128, 128, 4),
    ((15, 5), 64, "int8", 64, (6, 2), 128, 64, 4),
    ((32, 32), 64, "bfloat16", 16, (6, 2), 128, 128, 4),
    ((32, 32), 64, "int8", 64, (6, 2), 128, 64, 4),
    ((32, 8), 64, "bfloat16", 16, (6, 2), 32, 128, 4),
    ((32, 8), 64, "int8", 64, (6, 2), 32, 64, 4),
    ((24, 8), 128, "bfloat16", 16, (4, 2), 128, 128, 2),
    ((24, 8), 128, "int8", 64, (6, 2), 128, 64, 3),
    ((32, 8), 128, "bfloat16", 16, (4, 2), 32, 128, 2),
    ((32, 8), 128, "int8", 64, (6, 2), 32, 64, 3),
    ((8, 1), 128, "bfloat16", 16, (4, 2), 16, 128, 2),
    ((8, 1), 128, "int8", 64, (6, 2), 16, 64, 3),
    ((14, 2), 64, "bfloat16", 16, (6, 2), 128, 128, 4),
    ((14, 2), 64, "int8", 64, (6, 2), 128, 64, 4),
    ((28, 4), 128, "bfloat16", 16, (4, 2), 128, 128, 2),
    ((28, 4), 128, "int8", 64, (6, 2), 128, 64, 3),
    ((16, 8), 128, "bfloat16", 16, (4, 2), 64, 128, 2),
    ((16, 8), 128, "int8", 64, (6, 2), 64, 64, 3),
    ((64, 8), 128, "bfloat16", 16, (4, 2), 16, 128, 2),
    ((64, 8), 128, "int8", 64, (6, 2), 16, 64, 3),
    ((8, 8), 256, "bfloat16", 16, (2, 1), 128, 64, 2),
]
# (query, kv) heads, head dim, dtype of the pool; then blocks and queries in flight of decode, and tokens, rows and
# blocks in flight of a prefill tile.
BLACKWELL_TILES = [
    ((64, 8), 64, "bfloat16", (6, 2), 32, 256, 4),
    ((32, 32), 80, "int8", (6, 2), 256, 256, 4),
    ((32, 8), 128, "bfloat16", (4, 2), 64, 256, 3),
    ((32, 8), 128, "int8", (4, 2), 64, 256, 2),
    ((28, 4), 128, "bfloat16", (4, 2), 256, 256, 3),
    ((16, 8), 192, "bfloat16", (2, 2), 64, 128, 3),
    ((16, 8), 192, "int8", (2, 1), 64, 128, 2),
    ((16, 8), 256, "bfloat16", (2, 1), 64, 128, 2),
]


@each_row(
    ("heads", "head_dim", "page_size", "itemsize", "num_tokens", "columns", "block_q", "single", "runs"), TPU_TILES
)
def test_tpu_tiles(heads, head_dim, page_size, itemsize, num_tokens, columns, block_q, single, runs):
    sizes, group = TpuAttention(), heads[0] // heads[1]
    assert block_q_of(sizes, num_tokens, AttentionSpec(*heads, head_dim, head_dim, 1.0)) == block_q
    lanes = -(-heads[1] * 2 * head_dim // LANES) * LANES

    def blocks(rows, num_tiles, is_single):
        return choose_blocks(
            sizes,
            rows=rows,
            num_kv_heads=heads[1],
            row_bytes=buffer_lanes(lanes) * itemsize,
            page_size=page_size,
            max_pages=columns,
            num_tiles=num_tiles,
            single=is_single,
        )

    assert blocks(-(-group // SUBLANES) * SUBLANES, num_tokens, True) == single
    assert blocks(group * block_q, -(-num_tokens // block_q), False) == runs


@pytest.mark.parametrize(
    ("num_kv_heads", "group", "block_q", "pages", "page_size", "parts"),
    [(8, 4, 1, 8, 128, 1), (1, 128, 1, 32, 128, 4), (1, 128, 1, 8, 128, 4), (1, 16, 1, 6, 64, 3), (1, 16, 1, 1, 128, 1)]
    + [(1, 128, 16, 4, 128, 4), (1, 16, 16, 4, 128, 1), (1, 96, 16, 4, 128, 2)]
    + [(1, 8, 128, 4, 128, 2), (1, 7, 128, 4, 128, 1), (1, 20, 64, 4, 128, 2), (2, 8, 128, 4, 128, 1)]
    + [(1, 8, 256, 4, 128, 4), (1, 7, 256, 4, 128, 7), (1, 71, 16, 4, 128, 1), (1, 6, 256, 4, 128, 3)],
)
def test_parts_of_a_single_kv_head(num_kv_heads, group, block_q, pages, page_size, parts):
    shape = {"num_kv_heads": num_kv_heads, "group": group, "block_q": block_q}
    assert choose_parts(TpuAttention(), **shape, pages=pages, page_size=page_size) == parts


@pytest.mark.parametrize(
    ("heads", "dims", "tiles", "stages"),
    [(128, (576, 512), 2, 2), (64, (576, 512), 1, 2), (96, (576, 512), 2, 2), (40, (288, 256), 1, 5)],
)
def test_hopper_latents(heads, dims, tiles, stages):
    spec = AttentionSpec(heads, 1, *dims, 1.0, values_in_keys=True)
    assert head_tiles(spec) == tiles and why_not(spec, 64) is None
    shape = LatentShape(tiled_heads(spec), tiles, 64, 1, jnp.dtype("bfloat16"), HopperAttention().decode_stages)
    assert shape.stages() == (stages, 1)


@each_row(("heads", "head_dim", "kv_dtype", "page_size", "decode", "block_q", "keys", "stages"), HOPPER_TILES)
def test_hopper_tiles(heads, head_dim, kv_dtype, page_size, decode, block_q, keys, stages):
    sizes, spec = HopperAttention(), AttentionSpec(*heads, head_dim, head_dim, 1.0)
    dtype, codes = jnp.dtype("bfloat16"), jnp.dtype(kv_dtype)
    assert DecodeShape(spec, page_size, 1, dtype, codes, sizes.decode_stages).stages() == decode
    assert prefill_block_q(spec) == block_q
    prefill = Shape(spec, 4096, page_size, block_q, dtype, codes, sizes.num_ctas, False, sizes.prefill_stages)
    assert (prefill.block_kv, prefill.stages) == (keys, stages)
    check_registers(*prefill_registers(prefill), num_computing=2)


@each_row(("heads", "head_dim", "kv_dtype", "decode", "block_q", "rows", "stages"), BLACKWELL_TILES)
def test_blackwell_tiles(heads, head_dim, kv_dtype, decode, block_q, rows, stages):
    sizes, spec = HopperAttention(), AttentionSpec(*heads, head_dim, head_dim, 1.0)
    dtype, codes, most = jnp.dtype("bfloat16"), jnp.dtype(kv_dtype), BLACKWELL.prefill_rows
    assert DecodeShape(spec, 64, 1, dtype, codes, sizes.decode_stages, tensor_memory=True).stages() == decode
    assert prefill_block_q(spec, most) == block_q
    rest = sizes.num_ctas, True, sizes.prefill_stages, most // 2, True
    prefill = Shape(spec, 4096, 64, block_q, dtype, codes, *rest)
    assert (prefill.tile_rows, prefill.stages) == (rows, stages)
    assert prefill.computing * (prefill.block_kv + head_dim) <= 512, "columns of tensor memory"
    if prefill.computing == 2:
        check_registers(*prefill_registers(prefill), num_computing=2)


def check_registers(producer: int, compute: int, *, num_computing: int) -> None:
    """Warpgroups ask for no more than a kernel begins with, in steps of 8: one that did would wait for ever."""
    begun = 65536 // ((num_computing + 1) * 128) // 8 * 8
    assert producer <= begun <= compute <= 256 and producer >= 24 and producer % 8 == compute % 8 == 0
    assert producer + num_computing * compute <= (num_computing + 1) * begun


def test_other_hopper_kernels_ask_for_registers_that_are_there():
    check_registers(latent.LOADER_REGISTERS, latent.COMPUTE_REGISTERS, num_computing=latent.COMPUTING)
    for registers in (quantized.REGISTERS, lora.A_REGISTERS, lora.B_REGISTERS):
        check_registers(*registers, num_computing=ring.PRODUCER)


@pytest.mark.parametrize(
    ("page_size", "several_rows", "one_row"),
    [(8, 128, 256), (16, 128, 256), (24, 120, 240), (64, 128, 256), (128, 128, 256), (256, 256, 256)],
)
def test_xla_blocks(page_size, several_rows, one_row):
    assert XlaAttention().block_kv_of(page_size, 2) == several_rows
    assert XlaAttention().block_kv_of(page_size, 1) == one_row


def test_a_page_table_is_in_scalar_memory_while_it_fits():
    assert fits_smem(TpuAttention(), (256, 896)) and not fits_smem(TpuAttention(), (256, 1024))


@pytest.mark.parametrize(("chip", "one_head"), [("v5e", 128), ("v5p", 128), ("v6e", 256), ("7x", 256)])
def test_tiles_of_one_kv_head_on_each_chip(chip, one_head, monkeypatch):
    found = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(chip), 1)
    monkeypatch.setattr(pltpu, "is_tpu_device", lambda: True)
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: found)
    sizes = tuning_of("tpu").tpu_attention

    def tokens(heads: tuple[int, int], num_tokens: int) -> int:
        return block_q_of(sizes, num_tokens, AttentionSpec(*heads, 128, 128, 1.0))

    assert tokens((8, 1), 2048) == tokens((4, 1), 8192) == one_head and tokens((16, 1), 8192) == one_head // 2
    latent = AttentionSpec(4, 1, 576, 512, 1.0, values_in_keys=True)
    assert block_q_of(sizes, 8192, latent) == 128
    assert tokens((8, 1), 512) == 64 and tokens((16, 2), 8192) == tokens((16, 16), 8192) == 128


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_without_a_chip_the_table_is_the_usual_one(platform):
    assert tuning_of(platform) == Tuning() and hash(tuning_of(platform)) == hash(Tuning())


def test_sequences_of_a_tile_on_a_card_fit_its_memory():
    sizes = tuning_of("gpu_xla").xla_attention
    assert sizes == tuning_of("gpu").xla_attention and sizes.block_kv == 1024

    def num_seqs(heads: int, head_dim: int, **more) -> int:
        spec = AttentionSpec(heads, heads, head_dim, head_dim, 1.0, **more)
        found = gathered_by(spec, "gpu_xla", 256, 16)
        return found // (2 * spec.stored_width * sizes.block_kv)

    assert [num_seqs(heads, 128) for heads in (1, 8, 16, 32, 1000)] == [64, 64, 32, 16, 2]
    assert num_seqs(1, 576, values_in_keys=True) == 64
    assert gathered_by(AttentionSpec(8, 8, 128, 128, 1.0), "cpu", 256, 16) == 0

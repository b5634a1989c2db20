"""What the kernels of experts multiply, by their own lists of visits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.expert_tiles import measure
from jaxengine.models.layers.experts.expert_counts import routed
from jaxengine.pallas_kernels.matmul.tpu.grouped import STEP, blocks_of, shape_of
from jaxengine.pallas_kernels.matmul.tpu.visits import visits_of
from jaxengine.pallas_kernels.tuning import TpuProducts


def further(*row):
    return pytest.param(*row, marks=pytest.mark.thorough("between sizes that are measured"))


@pytest.mark.parametrize(
    ("model", "tokens", "ratio", "on_hopper"),
    [
        ("qwen3-moe-30b-a3b", 64, 2.8, 2.1),
        further("gpt-oss-120b", 1024, 1.23, 1.12),
        further("deepseek-v3", 1024, 1.26, 1.12),
        # From 64 rows of an expert on, on average, experts are filled up to multiples of eight.
        ("qwen3-moe-30b-a3b", 1024, 1.08, 1.06),
        further("gpt-oss-120b", 2048, 1.08, 1.06),
        further("deepseek-v3", 2048, 1.08, 1.06),
        further("qwen3-moe-30b-a3b", 2048, 1.1, 1.03),
        further("qwen3-moe-30b-a3b", 4096, 1.1, 1.02),
        ("gpt-oss-120b", 4096, 1.1, 1.03),
        further("deepseek-v3", 4096, 1.1, 1.03),
        further("qwen3-moe-30b-a3b", 8192, 1.07, 1.01),
        further("gpt-oss-120b", 8192, 1.1, 1.02),
        further("deepseek-v3", 8192, 1.1, 1.02),
    ],
)
def test_kernels_multiply_little_beyond_the_rows(model, tokens, ratio, on_hopper):
    """In tiles of 256 rows, by blocks of four sizes that began at every sixteenth row, it was 1.5 times those of 1,024
    tokens on TPUs."""
    row = measure(model, tokens)
    assert 1 <= row["TPU ratio"] <= ratio and 1 <= row["Hopper ratio"] <= on_hopper


@pytest.mark.parametrize(
    ("experts", "k", "tokens", "most"),
    [
        (128, 8, 64, 125),
        further(128, 8, 1024, 143),
        further(128, 8, 8192, 253),
        further(128, 4, 1024, 135),
        further(128, 4, 8192, 191),
        further(256, 8, 1024, 270),
        further(256, 8, 2048, 286),
        further(256, 8, 8192, 382),
    ],
)
def test_visits_are_few(experts, k, tokens, most):
    """Each gives its expert's matrix to the matrix unit anew; a group is in two tiles of 512 rows at most, unless it
    has more."""
    sizes = jnp.asarray(routed(tokens, experts, k), jnp.int32)
    assert int(visits_of(sizes, k * tokens, min(k * tokens, 512)).products[0]) <= most


@pytest.mark.parametrize("most", [96, 256])
def test_blocks_are_few_and_close_to_each_other(most):
    for mean in (16, 32, 64, 79, 80, 128, 200, 512, 4096):
        blocks = blocks_of(mean, most)
        assert len(blocks) <= 14 and max(blocks) <= most and all(block % STEP == 0 for block in blocks)
        apart = np.diff([block for block in blocks if mean // 2 <= block <= mean * 3 // 2])
        assert (apart <= max(STEP, mean / 5)).all(), (mean, blocks)


@pytest.mark.parametrize("rows", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("tokens", "blocks"), [(128, (8, 16, 24, 32)), (1024, (16, 32, 40, 48, 64)), (2048, (8, 24, 40, 56, 64))]
)
def test_sizes_are_few_where_many_sums_are_scaled(rows, tokens, blocks):
    """DeepSeek-V3's, by groups of 128 inputs: the code of each size is as long as there are groups."""
    e4m3 = jnp.float8_e4m3fn
    assert shape_of(8 * tokens, 7168, 4096, 56, 256, jnp.dtype(rows), e4m3, TpuProducts()).blocks == blocks


@pytest.mark.parametrize(("num_rows", "tile", "blocks"), [(31, 31, (31,)), (33, 32, (8, 16, 24, 32))])
def test_rows_of_bytes_are_moved_by_whole_registers(num_rows, tile, blocks):
    """Of which a tile has some, or else one block, which is not moved."""
    e4m3 = jnp.dtype("float8_e4m3fn")
    shape = shape_of(num_rows, 2048, 768, 16, 4, e4m3, e4m3, TpuProducts())
    assert (shape.rows, shape.blocks) == (tile, blocks)


@pytest.mark.parametrize(
    ("width", "cores", "piece", "columns"),
    [(768, 1, 256, 768), (768, 2, 128, 384), (2048, 1, 256, 512), (640, 2, 128, 128)],
)
def test_gates_and_ups_are_divided_alike(width, cores, piece, columns):
    """Strips of both begin at whole ones, two cores have about as many, and two pieces are one of a product."""
    sizes = TpuProducts(cores=cores)
    shape = shape_of(8192, 2048, width, 1, 128, jnp.bfloat16, jnp.dtype("int8"), sizes, gated=True)
    assert (shape.piece, shape.columns) == (piece, columns)

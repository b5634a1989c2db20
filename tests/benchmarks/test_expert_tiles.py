"""What the kernels of experts multiply, by their own lists of visits."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.expert_tiles import measure
from pallas_kernels.matmul.tpu.grouped import blocks_of, shape_of
from pallas_kernels.tuning import TpuProducts


@pytest.mark.parametrize(
    ("model", "tokens", "visits", "ratio", "on_hopper"),
    [
        ("qwen3-moe-30b-a3b", 64, 125, 2.8, 2.1),
        ("qwen3-moe-30b-a3b", 1024, 143, 1.12, 1.06),
        ("gpt-oss-120b", 1024, 135, 1.23, 1.12),
        ("qwen3-moe-30b-a3b", 8192, 253, 1.07, 1.01),
        ("gpt-oss-120b", 8192, 191, 1.1, 1.02),
        ("deepseek-v3", 8192, 382, 1.13, 1.02),
    ],
)
def test_visits_multiply_little_beyond_the_rows(model, tokens, visits, ratio, on_hopper):
    """In tiles of 256 rows, by blocks of four sizes that began at every sixteenth row, it was 1.5 times those of 1,024
    tokens. Blocks begin and end at an eighth row, which is much where an expert has 32, and little where it has 64."""
    row = measure(model, tokens)
    assert row["TPU visits"] <= visits and row["TPU ratio"] <= ratio
    assert row["Hopper ratio"] <= on_hopper


@pytest.mark.parametrize("step", [8, 32])
@pytest.mark.parametrize("most", [96, 256])
def test_blocks_are_few_and_close_to_each_other(step, most):
    for mean in (16, 32, 64, 79, 80, 128, 200, 512, 4096):
        blocks = blocks_of(mean, most, step)
        assert len(blocks) <= 14 and max(blocks) <= most and all(block % step == 0 for block in blocks)
        apart = np.diff([block for block in blocks if mean // 2 <= block <= mean * 3 // 2])
        assert (apart <= max(step, mean / 5)).all(), (mean, blocks)


@pytest.mark.parametrize(("rows", "blocks"), [("bfloat16", (32, 48, 64)), ("float8_e4m3fn", (32, 64))])
def test_sizes_are_few_where_many_sums_are_scaled(rows, blocks):
    """DeepSeek-V3's 1,024 tokens, by groups of 128 inputs: the code of each size is as long as there are groups."""
    e4m3 = jnp.float8_e4m3fn
    assert shape_of(8192, 7168, 4096, 56, 256, jnp.dtype(rows), e4m3, TpuProducts()).blocks == blocks


@pytest.mark.parametrize(
    ("width", "cores", "piece", "columns"),
    [(768, 1, 256, 768), (768, 2, 128, 384), (2048, 1, 256, 512), (640, 2, 128, 128)],
)
def test_gates_and_ups_are_divided_alike(width, cores, piece, columns):
    """Strips of both begin at whole ones, two cores have about as many, and two pieces are one of a product."""
    sizes = TpuProducts(cores=cores)
    shape = shape_of(8192, 2048, width, 1, 128, jnp.bfloat16, jnp.dtype("int8"), sizes, gated=True)
    assert (shape.piece, shape.columns) == (piece, columns)

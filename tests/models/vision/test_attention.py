"""Attention of packed patches against softmax over all pairs in float64, and what must not matter to a picture."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.vision.base.attention import UNIT, segment_attention, window_attention, window_block
from jaxengine.models.vision.base.layers import in_blocks
from jaxengine.models.vision.base.vit import attend_units

HEADS, HEAD_DIM = 2, 8
LONGEST = 16
segments = jax.jit(partial(segment_attention, scale=0.3))
windows = jax.jit(partial(window_attention, scale=0.3, longest=LONGEST))


def drawn(num_patches: int, seed: int = 0) -> list[np.ndarray]:
    shape = num_patches, HEADS, HEAD_DIM
    return [np.random.RandomState(seed + n).standard_normal(shape).astype(np.float32) for n in range(3)]


def numbered(num_patches: int, *lengths: int) -> np.ndarray:
    """0, 0, ..., 1, 1, ... of these lengths, then padding; a negative length is padding too."""
    column, end = np.full(num_patches, -1, np.int32), 0
    for number, length in enumerate(lengths):
        if length > 0:
            column[end : end + length] = number
        end += abs(length)
    return column


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, *columns: np.ndarray) -> np.ndarray:
    seen = np.all([column[:, None] == column[None, :] for column in columns], axis=0) & (columns[0] >= 0)[:, None]
    scores = np.einsum("qnh,knh->nqk", q.astype(np.float64), k) * 0.3
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
    return np.einsum("nqk,knh->qnh", weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300), v)


@pytest.mark.parametrize(
    "lengths",
    [(6 * UNIT,), (1, 5, 1200, 7, 300), (-UNIT, 200, -56, 3, 1000), (255, 1, 256, 257), (-6 * UNIT,)],
    ids=["one", "ragged", "gaps", "edges", "nothing"],
)
def test_patches_see_their_segment(lengths):
    q, k, v = drawn(6 * UNIT)
    segment = numbered(6 * UNIT, *lengths)
    np.testing.assert_allclose(segments(q, k, v, segment), expected(q, k, v, segment), atol=2e-5)


@pytest.mark.parametrize("seed", range(3))
def test_patches_see_their_window(seed):
    count, rng = 2 * UNIT, np.random.RandomState(seed)
    window = np.repeat(np.arange(count), rng.randint(1, LONGEST + 1, count))[:count].astype(np.int32)
    segment = numbered(count, 100, 150, -6, 1, 200)
    for number in range(5):  # each segment counts its own
        window[segment == number] -= window[segment == number].min(initial=count)
    q, k, v = drawn(count)
    np.testing.assert_allclose(windows(q, k, v, segment, window), expected(q, k, v, segment, window), atol=2e-5)


@pytest.mark.parametrize("kind", ["segments", "windows"])
def test_neighbours_and_padding_do_not_matter_to_a_picture(kind):
    """Not by a bit, wherever among multiples of UNIT the picture begins."""
    count, length = 6 * UNIT, 700
    picture = drawn(length)
    inside = np.repeat(np.arange(length), LONGEST)[:length].astype(np.int32)

    def run(start: int, others: int) -> np.ndarray:
        arrays = drawn(count, seed=others)
        segment, window = numbered(count, *[37] * (count // 37)), np.zeros(count, np.int32)
        if not others:
            segment[:] = -1
        for array, own in zip((*arrays, segment, window), (*picture, np.full(length, 99), inside), strict=True):
            array[start : start + length] = own
        out = segments(*arrays, segment) if kind == "segments" else windows(*arrays, segment, window)
        return np.asarray(out[start : start + length])

    alone = run(0, 0)
    for start, others in ((0, 5), (UNIT, 7), (3 * UNIT, 0)):
        np.testing.assert_array_equal(run(start, others), alone)


def test_many_patches_take_little_memory():
    """Both forms at 16,384 patches of 16 heads, in float32: beyond what goes in and comes out, less than 256 MiB."""
    count = 16384
    x = jax.ShapeDtypeStruct((count, 16, 80), jnp.float32)
    column = jax.ShapeDtypeStruct((count,), jnp.int32)
    for function, columns in (
        (partial(segment_attention, scale=0.1), [column]),
        (partial(window_attention, scale=0.1, longest=64), [column, column]),
    ):
        needed = jax.jit(function).lower(x, x, x, *columns).compile().memory_analysis()
        assert needed is not None and needed.temp_size_in_bytes < 256 << 20


def test_blocks_of_windows_hold_the_longest():
    assert [window_block(longest) for longest in (1, 2, 16, 17, 64, 100)] == [1, 2, 16, 32, 64, 128]


def test_units_see_the_keys_that_they_may():
    """Of a unit of so many positions that its queries take two blocks, and of one that may see nothing."""
    count, limits = 1300, (1111, 0)
    q, k, v = (np.stack([each, each]) for each in drawn(count))
    is_key = np.arange(count) < np.asarray(limits)[:, None]
    found = jax.jit(attend_units)(q, k, v, is_key)
    segment = numbered(count, limits[0])
    scaled = q[0] * HEAD_DIM**-0.5 / 0.3  # the scale that `expected` has
    wanted = expected(scaled[: limits[0]], k[0][: limits[0]], v[0][: limits[0]], segment[: limits[0]])
    np.testing.assert_allclose(found[0][: limits[0]], wanted, atol=2e-5)
    assert np.isfinite(found).all()


def test_a_wide_mlp_is_computed_in_blocks():
    """Rows are those of all at once; of Idefics2's (five units of 4,928 patches) few of the inner rows exist."""
    w = jnp.asarray(np.random.RandomState(0).standard_normal((3, 5)), jnp.float32)
    for count in (4, 11):
        x = jnp.arange(3.0 * count).reshape(count, 3)
        np.testing.assert_allclose(in_blocks(lambda each: each @ w, x, 4), x @ w, rtol=1e-6)
    x, up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((24640, 1152), (1152, 28672), (28672, 64)))
    run = jax.jit(lambda x, up, down: in_blocks(lambda each: jax.nn.silu(each @ up) @ down, x, 1024))
    needed = run.lower(x, up, down).compile().memory_analysis()
    assert needed is not None and needed.temp_size_in_bytes < 24640 * 28672 * 4 // 8

"""Blocks of a device's rows, and their sums, which no block's end and no other token may change."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.layers.experts import expert_rows
from jaxengine.models.layers.experts.expert_rows import add_rows, by_expert, in_blocks, mix, rows_of_block

TOKENS, WIDTH = 9, 5
SIZES = ([0, 7, 0, 1, 5], [0, 0, 0, 0, 0], [9, 9, 2, 9, 9], [0, 0, 0, 0, 1])


@cache
def summed(block: int):
    """(rows [G * T, D], their tokens, sizes) -> what add_rows makes of all of them, so many at a time."""
    most = TOKENS * len(SIZES[0])

    def run(y, tokens, sizes):
        y, tokens = jnp.pad(y, ((0, -most % block), (0, 0))), jnp.pad(tokens, (0, -most % block))

        def step(first, sizes, total):
            there = jnp.arange(block) < jnp.sum(sizes)
            own = jnp.where(there, jax.lax.dynamic_slice_in_dim(tokens, first, block), TOKENS)
            rows = jnp.where(there[:, None], jax.lax.dynamic_slice_in_dim(y, first, block), jnp.nan)
            return add_rows(total, rows, own, len(SIZES[0]))

        return in_blocks(sizes, most, block, step, jnp.zeros((TOKENS, WIDTH)))

    return jax.jit(run)


def routed(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of groups of these sizes and their tokens, none of which a group has twice; behind them anything."""
    rng = np.random.default_rng(sum(sizes))
    tokens = np.concatenate([np.sort(rng.permutation(TOKENS)[:size]) for size in sizes])
    most = TOKENS * len(sizes)
    y = rng.standard_normal((most, WIDTH)).astype(np.float32)
    return y, np.pad(tokens, (0, most - len(tokens))).astype(np.int32)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_row_is_added_once_and_in_order(sizes):
    y, tokens = routed(sizes)
    wanted = np.zeros((TOKENS, WIDTH), np.float32)
    for row, token in zip(y[: sum(sizes)], tokens, strict=False):
        wanted[token] += row
    for block in (2, 7, TOKENS * len(sizes)):
        got = summed(block)(y, tokens, jnp.asarray(sizes, jnp.int32))
        np.testing.assert_array_equal(got, wanted, err_msg=str(block))


@pytest.mark.parametrize("form", [mix, expert_rows._mixed_at_once, expert_rows._mixed_one_by_one])
def test_tokens_are_mixed_alike_in_every_form(form, monkeypatch):
    """Three rows of each of nine tokens, brought back to their order at once, or one by one as a TPU has them."""
    monkeypatch.setattr(expert_rows, "_MOST_REORDERED", 0)
    rng = np.random.default_rng(0)
    order = rng.permutation(3 * TOKENS)
    y, weights = (rng.standard_normal(shape).astype(np.float32) for shape in ((3 * TOKENS, WIDTH), (TOKENS, 3)))
    wanted = np.zeros((TOKENS, WIDTH), np.float32)
    for row in np.argsort(order):  # those of a token in the order of its experts
        wanted[order[row] // 3] += weights.ravel()[order[row]] * y[row]
    places = order if form is mix else np.argsort(order).reshape(weights.shape)
    got = form(*map(jnp.asarray, (y, weights, places)))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    # In any other order the last one is lost.
    numbers = np.float32([1e8, -1e8, 1])[np.argsort(np.argsort(order)) * 0 + order % 3][:, None]
    np.testing.assert_array_equal(form(numbers, np.ones_like(weights), places), 1)


@pytest.mark.parametrize("step", [1, 8])
def test_rows_are_sorted_by_expert_and_filled_up(step):
    """Of five experts, of which the third has none; what belongs to none, 5 or more, stays behind all rows."""
    ids = np.array([[4, 0], [5, 4], [0, 1], [7, 4], [4, 0], [3, 4]] * 3, np.int32)
    order, sizes = map(np.asarray, jax.jit(by_expert, static_argnums=(1, 2))(ids, 5, step))
    assert len(order) == ids.size + 5 * (step - 1) and set(order) == set(range(len(order)))
    counts = [np.sum(ids == expert) for expert in range(5)]
    np.testing.assert_array_equal(sizes, [-(-count // step) * step for count in counts])
    for expert, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
        own = order[end - size : end]
        np.testing.assert_array_equal(own[: counts[expert]], np.flatnonzero(ids.ravel() == expert))
        assert (own[counts[expert] :] >= ids.size).all()
    # Each row's result is found again, and what fills up is in no sum.
    y = np.where(order < ids.size, order + 1.0, np.nan)[:, None].astype(np.float32)
    wanted = np.arange(1, ids.size + 1, dtype=np.float32).reshape(ids.shape).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(mix(jnp.asarray(y), jnp.ones(ids.shape), jnp.asarray(order)), wanted)


def test_blocks_are_of_the_groups_that_have_rows():
    def note(first, sizes, seen):
        return seen.at[first // 4].set(jnp.append(sizes, first))

    seen = jax.jit(lambda sizes: in_blocks(sizes, 20, 4, note, jnp.full((5, 4), -1)))(jnp.array([3, 0, 6]))
    np.testing.assert_array_equal(seen, [[3, 0, 1, 0], [0, 0, 4, 4], [0, 0, 1, 8], [-1] * 4, [-1] * 4])


@pytest.mark.parametrize(
    ("most", "average", "block"),
    [(64, 4, 64), (4096, 256, 384), (4096, 1, 128), (65536, 32768, 4096), (16384, 512, 640)],
)
def test_a_block_holds_some_more_rows_than_there_are_on_average(most, average, block):
    assert rows_of_block(most, average) == block

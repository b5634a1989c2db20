"""Rows of tokens at experts: their order, and blocks of them where a device has few of many.

Of n devices with different experts each has one n-th of all rows on average, and at most all rows, if every token goes
to it. Memory is for a block a little above the average; a loop runs over as many blocks as there are rows for. Shape
letters as in jaxengine.models.layers.experts.moe.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Up to this many results, TPUs, too, reorder all of them at once to the order of the tokens.
_MOST_REORDERED = 2048
# Rows of a block. Fewer than the least are not worth a loop; beyond the most, reading an expert's weights once more
# for the rows of the next block costs little compared with using them.
_LEAST_ROWS, _MOST_ROWS = 128, 4096


def tokens_per_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """Return the number of occurrences of each expert in ids i32[...]: i32[num_experts]. Ids outside 0 to num_experts -
    1 are not counted.
    """
    return jnp.sum(ids.reshape(-1, 1) == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)


def by_expert(ids: jax.Array, num_experts: int, step: int = 1) -> tuple[jax.Array, jax.Array]:
    """Return the order i32[M] that sorts ids i32[N] (flattened) by expert, and the number of rows of each expert,
    i32[num_experts], padding included.

    Element i of the order is the index in `ids` of row i. Each expert has a multiple of `step` rows: its own in the
    order of `ids`, then up to step - 1 rows of padding, whose indices are N or more. Rows of no expert, with ids from
    num_experts on, come last. M is N + num_experts * (step - 1).
    """
    ids, sizes = ids.ravel(), tokens_per_expert(ids, num_experts)
    if step > 1:
        missing, expert = -sizes % step, jnp.arange(num_experts, dtype=ids.dtype)[:, None]
        filling = jnp.where(jnp.arange(step - 1) < missing[:, None], expert, num_experts)
        ids, sizes = jnp.append(ids, filling), sizes + missing
    return jnp.argsort(ids, stable=True), sizes


def mix(y: jax.Array, weights: jax.Array, order: jax.Array) -> jax.Array:
    """Return f32[T, D]: for each token, the sum of its k results in y [M, D], multiplied by weights f32[T, k].

    order: i32[M], from `by_expert` for the T * k choices; row i of y belongs to token order[i] // k, or is padding.
    Rows of no expert are added like others, so they must be 0. Results are added one after the other in the order of k,
    so that no token's sum depends on another token.
    """
    indexes = jnp.argsort(order)[: weights.size].reshape(weights.shape)
    if y.shape[0] <= _MOST_REORDERED:
        return _mixed_at_once(y, weights, indexes)
    return lax.platform_dependent(y, weights, indexes, tpu=_mixed_one_by_one, default=_mixed_at_once)


def _mixed_at_once(y: jax.Array, weights: jax.Array, indexes: jax.Array) -> jax.Array:
    """Return the weighted sum of each token's results, f32[T, D], from one array [T, k, D] with the results of all
    tokens reordered.

    y: results [M, D]. weights: f32[T, k]. indexes: i32[T, k], rows of y.
    """
    rows = y[indexes]
    mixed = weights[:, :1] * rows[:, 0]
    for k in range(1, weights.shape[1]):
        mixed = mixed + weights[:, k, None] * rows[:, k]
    return mixed


def _mixed_one_by_one(y: jax.Array, weights: jax.Array, indexes: jax.Array) -> jax.Array:
    """Return the weighted sum of each token's results, f32[T, D], reordering and adding one result of each token at a
    time: XLA:TPU stores every array that it reorders.

    y: results [M, D]. weights: f32[T, k]. indexes: i32[T, k], rows of y.
    """
    mixed = weights[:, :1] * y[indexes[:, 0]]
    for k in range(1, weights.shape[1]):
        mixed, index = lax.optimization_barrier((mixed, indexes[:, k]))
        mixed = mixed + weights[:, k, None] * y[index]
    return mixed


def rows_of_block(most: int, average: int) -> int:
    """Return the number of rows of a block for a device that has `average` rows and at most `most`, with a margin of a
    quarter for uneven routing: a multiple of 128 from 128 to 4096, or `most` if that is less.
    """
    wanted = -(-average * 5 // 4 // _LEAST_ROWS) * _LEAST_ROWS
    return min(most, max(_LEAST_ROWS, min(wanted, _MOST_ROWS)))


def rows_of_own(num_tokens: int, most_of_token: int, own: int, average: int, step: int = 1) -> tuple[int, int]:
    """Return (the most rows of a device with `own` full experts, the number of rows of a block), padding included.

    most_of_token: the most rows of a token there. average: the device's average number of rows. step: each expert's
    rows are padded to a multiple of it.
    """
    most, more = num_tokens * most_of_token, own * (step - 1)
    return most + more, rows_of_block(most, average) + more


def in_blocks(
    sizes: jax.Array,
    most: int,
    block: int,
    step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    carry: jax.Array,
) -> jax.Array:
    """Call `step` for each block of rows in order, passing its result on as the next `carry`; return the last result.

    step: function of (index of the block's first row, i32[G] rows of each group in the block, carry). sizes: i32[G],
    rows of consecutive groups, together at most `most`. block: rows of a block; the last one may extend beyond `most`.
    carry: argument of the first call. Blocks without rows are skipped, unless a single block has room for `most` rows:
    that one is always run.
    """
    ends = jnp.cumsum(sizes)

    def of_block(index: jax.Array, carry: jax.Array) -> jax.Array:
        first = index * block
        return step(first, jnp.diff(jnp.clip(ends - first, 0, block), prepend=0), carry)

    if most <= block:
        return of_block(jnp.int32(0), carry)
    return lax.fori_loop(0, -(-ends[-1] // block), of_block, carry)


def add_rows(total: jax.Array, y: jax.Array, tokens: jax.Array, most_of_token: int) -> jax.Array:
    """Return total f32[T, D] with rows y f32[B, D] added to the rows of their tokens i32[B].

    tokens: >= 0, in any order. Rows of tokens >= T are dropped, and so are a token's rows after the first
    `most_of_token`. Rows are added one after the other, in their order, so that a token's sum depends neither on other
    tokens nor on where a block ends.
    """
    (num_tokens, _), num_rows = total.shape, tokens.size
    order = jnp.argsort(tokens, stable=True)
    tokens = tokens[order]
    # A token's rows are now adjacent, and entries after the last row belong to no token.
    y = y[jnp.pad(order, (0, most_of_token - 1))]
    behind = jnp.pad(tokens, (0, most_of_token - 1), constant_values=-1)
    added = total.at[tokens].get(mode="clip") + y[:num_rows]
    for k in range(1, most_of_token):
        is_same = (tokens == behind[k : k + num_rows])[:, None]
        added = jnp.where(is_same, added + y[k : k + num_rows], added)
    is_first = jnp.diff(tokens, prepend=-1) > 0
    # Other rows get indexes of their own past the result, where they are dropped.
    index = jnp.where(is_first, tokens, num_tokens + 1 + jnp.arange(num_rows, dtype=jnp.int32))
    return total.at[index].set(added, mode="drop", unique_indices=True)

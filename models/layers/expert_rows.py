"""Rows that tokens have at experts: their order, and blocks of them where a device has few of many.

Of n devices with whole experts each has one in n of all rows on average, and all that could be where every token goes
to it. Memory is for a block a little above the average; a loop goes through as many blocks as there are rows for.
Shape letters as in models.layers.moe. Knows nothing of what an expert is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Results that TPUs, too, bring back to the order of the tokens all at once.
_MOST_TURNED = 2048
# Rows of a block. Fewer than the least are not worth a loop; beyond the most, reading an expert's weights once more
# for the rows of the next block is little beside using them.
_LEAST_ROWS, _MOST_ROWS = 128, 4096


def tokens_per_expert(ids: jax.Array, num_experts: int) -> jax.Array:
    """i32[num_experts]: how often each expert occurs in ids i32[...]; other ids are not counted."""
    return jnp.sum(ids.reshape(-1, 1) == jnp.arange(num_experts, dtype=ids.dtype), axis=0, dtype=jnp.int32)


def by_expert(ids: jax.Array, num_experts: int, step: int = 1) -> tuple[jax.Array, jax.Array]:
    """The order of ids i32[N] by expert, i32[M], and how many rows each expert then has, i32[num_experts].

    Each has a multiple of `step`: its own, in the order of ids, and up to step - 1 to fill up, which are entries from N
    on. Those of no expert come last. M is N + num_experts * (step - 1).
    """
    ids, sizes = ids.ravel(), tokens_per_expert(ids, num_experts)
    if step > 1:
        missing, expert = -sizes % step, jnp.arange(num_experts, dtype=ids.dtype)[:, None]
        filling = jnp.where(jnp.arange(step - 1) < missing[:, None], expert, num_experts)
        ids, sizes = jnp.append(ids, filling), sizes + missing
    return jnp.argsort(ids, stable=True), sizes


def mix(y: jax.Array, weights: jax.Array, order: jax.Array) -> jax.Array:
    """Results y [M, D], row i of token order[i] // k, if it is of one, and weights f32[T, k] to f32[T, D].

    One addition after the other, in the order of k: no token's sum depends on another's.
    """
    places = jnp.argsort(order)[: weights.size].reshape(weights.shape)
    if y.shape[0] <= _MOST_TURNED:
        return _mixed_at_once(y, weights, places)
    return lax.platform_dependent(y, weights, places, tpu=_mixed_one_by_one, default=_mixed_at_once)


def _mixed_at_once(y: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
    rows = y[places]
    mixed = weights[:, :1] * rows[:, 0]
    for k in range(1, weights.shape[1]):
        mixed = mixed + weights[:, k, None] * rows[:, k]
    return mixed


def _mixed_one_by_one(y: jax.Array, weights: jax.Array, places: jax.Array) -> jax.Array:
    """XLA:TPU stores what it brings into another order: one result of each token at a time."""
    mixed = weights[:, :1] * y[places[:, 0]]
    for k in range(1, weights.shape[1]):
        mixed, place = lax.optimization_barrier((mixed, places[:, k]))
        mixed = mixed + weights[:, k, None] * y[place]
    return mixed


def rows_of_block(most: int, average: int) -> int:
    """Rows of a block where a device has `average` rows and at most `most`: with room for routing that is not even."""
    wanted = -(-average * 5 // 4 // _LEAST_ROWS) * _LEAST_ROWS
    return min(most, max(_LEAST_ROWS, min(wanted, _MOST_ROWS)))


def rows_of_own(num_tokens: int, k: int, own: int, average: int, step: int = 1) -> tuple[int, int]:
    """The most rows that a device with `own` whole experts has of tokens with k each, and those of a block.

    average: what it has on average. step: each expert's are filled up to a multiple of it.
    """
    most, more = num_tokens * min(k, own), own * (step - 1)
    return most + more, rows_of_block(most, average) + more


def in_blocks(
    sizes: jax.Array,
    most: int,
    block: int,
    step: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    carry: jax.Array,
) -> jax.Array:
    """What is left of `carry` after step(first row, i32[G] rows of each group, carry) of every block that has rows.

    sizes: i32[G], rows of each group, which follow each other; together at most `most`.
    """
    ends = jnp.cumsum(sizes)

    def of_block(index: jax.Array, carry: jax.Array) -> jax.Array:
        first = index * block
        return step(first, jnp.diff(jnp.clip(ends - first, 0, block), prepend=0), carry)

    if most <= block:
        return of_block(jnp.int32(0), carry)
    return lax.fori_loop(0, -(-ends[-1] // block), of_block, carry)


def add_rows(total: jax.Array, y: jax.Array, tokens: jax.Array, most_of_token: int) -> jax.Array:
    """total f32[T, D] and rows y f32[B, D] of tokens i32[B], of which one has `most_of_token` at most.

    Rows of tokens >= T are nobody's. One addition after the other, in the order of the rows: no token's sum depends on
    another's, nor on where a block ends.
    """
    (num_tokens, _), num_rows = total.shape, tokens.size
    order = jnp.argsort(tokens, stable=True)
    tokens = tokens[order]
    # A token's rows now follow each other, and what is behind the last row is nobody's.
    y = y[jnp.pad(order, (0, most_of_token - 1))]
    behind = jnp.pad(tokens, (0, most_of_token - 1), constant_values=-1)
    added = total.at[tokens].get(mode="clip") + y[:num_rows]
    for k in range(1, most_of_token):
        is_same = (tokens == behind[k : k + num_rows])[:, None]
        added = jnp.where(is_same, added + y[k : k + num_rows], added)
    is_first = jnp.diff(tokens, prepend=-1) > 0
    # Others have places of their own behind the result, where they are dropped.
    place = jnp.where(is_first, tokens, num_tokens + 1 + jnp.arange(num_rows, dtype=jnp.int32))
    return total.at[place].set(added, mode="drop", unique_indices=True)

"""Largest numbers of long rows on GPUs, in plain XLA: a search for the least of them, and one sort of those found.

XLA sorts a whole row for `lax.top_k`, in dozens of passes over memory for a long one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_BLOCK = 8  # numbers of a block: 32 bytes, which a GPU reads at once


def largest(rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return what lax.top_k(rows, count) returns for rows f32 [R, n] with n >= count >= 1: the count largest numbers of
    each row f32 [R, count], the largest first and of equal ones that which comes first, and their places i32.

    Rows that are much longer than `count` are read twice: the numbers lie in those `count` blocks whose largest numbers
    are the largest, of equal blocks in the first ones. So the blocks are searched first, then the numbers in them.
    """
    num_rows, length = rows.shape
    order = _order(rows)
    if length < 2 * _BLOCK * count:
        found = _places(order, count)
    else:
        # Padding has the least number, -nan, and comes last.
        blocks = jnp.pad(order, ((0, 0), (0, -length % _BLOCK))).reshape(num_rows, -1, _BLOCK)
        best = _places(jnp.max(blocks, axis=2), count)
        numbers = jnp.take_along_axis(blocks, best[..., None], axis=1).reshape(num_rows, -1)
        among = _places(numbers, count)
        found = jnp.take_along_axis(best, among // _BLOCK, axis=1) * _BLOCK + among % _BLOCK
    values = jnp.take_along_axis(rows, found, axis=1)
    _, found, values = lax.sort((~_order(values), found, values), num_keys=2)
    return values, found


def _places(order: jax.Array, count: int) -> jax.Array:
    """Return the places i32 [R, count] of the count largest numbers of each row of u32 `order` [R, n], in ascending
    order; of equal numbers those that come first.
    """
    num_rows, length = order.shape
    bits = 4 if length > 1 << 15 else 6  # that one pass over a row settles: each takes 2**bits comparisons of a number
    least = jnp.zeros((num_rows,), jnp.uint32)  # the largest number of which there are `count` in the row, or more
    for shift in range(-(-32 // bits) * bits - bits, -1, -bits):
        tried = least[:, None] + (jnp.arange(1, 1 << min(bits, 32 - shift), dtype=jnp.uint32) << shift)
        reached = jnp.sum(order[:, None] >= tried[..., None], axis=2, dtype=jnp.int32)
        least = least + (jnp.sum(reached >= count, axis=1, dtype=jnp.uint32) << shift)
    above, equal = order > least[:, None], order == least[:, None]
    num_above = jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    chosen = above | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= count - num_above))
    places = jnp.where(chosen, jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1, count)
    numbers = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), order.shape)
    found = jnp.zeros((num_rows, count), jnp.int32)
    return found.at[jnp.arange(num_rows)[:, None], places].set(numbers, mode="drop")


def _order(rows: jax.Array) -> jax.Array:
    """Return unsigned integers u32 in the order of float32 `rows`, -0 before +0."""
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    return lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))), jnp.uint32)

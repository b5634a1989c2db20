"""Largest numbers of long rows on GPUs, in plain XLA: a search for the least of them, and one sort of those found.

XLA sorts a whole row for `lax.top_k`, in dozens of passes over memory for a long one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_BITS = 4  # of a number that one pass over a row settles


def largest(rows: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return what lax.top_k(rows, count) returns for rows f32 [R, n] with n >= count >= 1: the count largest numbers of
    each row f32 [R, count], the largest first and of equal ones that which comes first, and their places i32.
    """
    order = _order(rows)
    least = jnp.zeros((len(rows),), jnp.uint32)  # the largest number of which there are `count` in the row, or more
    for shift in range(32 - _BITS, -1, -_BITS):
        tried = least[:, None] + (jnp.arange(1, 1 << _BITS, dtype=jnp.uint32) << shift)
        reached = jnp.sum(order[:, None] >= tried[..., None], axis=2, dtype=jnp.int32)
        least = least + (jnp.sum(reached >= count, axis=1, dtype=jnp.uint32) << shift)
    above, equal = order > least[:, None], order == least[:, None]
    num_above = jnp.sum(above, axis=1, keepdims=True, dtype=jnp.int32)
    places = jnp.where(above, jnp.cumsum(above, axis=1, dtype=jnp.int32), num_above + jnp.cumsum(equal, axis=1)) - 1
    places = jnp.where(above | equal, places, count).astype(jnp.int32)
    numbers = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32), rows.shape)
    found = jnp.zeros((len(rows), count), jnp.int32)
    found = found.at[jnp.arange(len(rows))[:, None], places].set(numbers, mode="drop")
    values = jnp.take_along_axis(rows, found, axis=1)
    _, found, values = lax.sort((~_order(values), found, values), num_keys=2)
    return values, found


def _order(rows: jax.Array) -> jax.Array:
    """Return unsigned integers u32 in the order of float32 `rows`, -0 before +0."""
    bits = lax.bitcast_convert_type(rows, jnp.int32)
    return lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))), jnp.uint32)

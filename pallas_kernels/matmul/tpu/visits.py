"""Visits of the grouped kernel: (group, tile of rows) for each pair that has rows in common, computed on the device."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class Visits(NamedTuple):
    """Work list of the kernel, in order. Entries from `count` on are never read.

    Attributes:
      group, tile: i32 [V], for each visit. Visits after the first `products` are tiles to clear.
      starts, ends: i32 [G], first row of each group and one past its last.
      products, count: i32 [1], number of visits that multiply, and of all visits.
    """

    group: jax.Array
    tile: jax.Array
    starts: jax.Array
    ends: jax.Array
    products: jax.Array
    count: jax.Array


def visits_of(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Visits:
    """Return the visits of consecutive groups of i32 [G] rows, among num_rows rows in all, for tiles of `tile_rows`
    rows: one for each group and tile with common rows, in the order of the rows, then one for each tile after the last
    row, to be cleared.
    """
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // tile_rows
    each = jnp.where(group_sizes > 0, (ends - 1) // tile_rows - first + 1, 0)
    last = jnp.cumsum(each)
    num_tiles = pl.cdiv(num_rows, tile_rows)
    visit = jnp.arange(num_tiles + group_sizes.size, dtype=jnp.int32)
    # Compared rather than searched: a search is a loop of its own. Visits that clear keep the last one's matrix.
    real = jnp.minimum(visit, jnp.maximum(last[-1] - 1, 0))
    group = jnp.minimum(jnp.sum(real[:, None] >= last, axis=1, dtype=jnp.int32), group_sizes.size - 1)
    used = pl.cdiv(ends[-1], tile_rows)
    tile = jnp.where(visit < last[-1], first[group] + visit - (last - each)[group], used + visit - last[-1])
    tile = jnp.minimum(tile, num_tiles - 1)
    count = last[-1] + num_tiles - used
    return Visits(group, tile, starts, ends, last[-1][None], count[None])

"""Low-rank addition to groups of rows, each group with a pair of matrices of its own, in plain XLA on every platform.

Rows are sorted by pair and cut into tiles of one pair each. An iteration of a loop gathers the rows and the pairs of a
few tiles, multiplies them, and adds the products to those rows. So the work follows the number of rows that have a
pair, and memory is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

_LEAST_TILE, _MOST_TILE = 4, 64  # rows
# Most tiles, rows, and bytes of gathered pairs of an iteration.
_TRIP_TILES, _TRIP_ROWS, _TRIP_BYTES = 128, 2048, 32 << 20


def add_low_rank(
    y: jax.Array, x: jax.Array, group: jax.Array, a: jax.Array, b: Sequence[jax.Array], part: Sequence[int]
) -> jax.Array:
    """Return y [M, out], in its dtype, with x_i A_g B_g, computed in float32, added to each row i of group g.

    Rows of no group are unchanged. x_i A_g is rounded to x's dtype.

    The columns of y are those of several sources, concatenated. The rows of A are cut into equal parts; b[j] is
    multiplied with the part[j]-th of these and gives the columns of source j.

    Args:
      y: [M, out].
      x: [M, in].
      group: i32 [M], 0 to G - 1; G and above for rows of no group.
      a: [G, parts * r, in], A transposed, in x's dtype.
      b: for each source [G, r, its width], in x's dtype; the widths add up to `out`.
      part: for each source, the index of its part of A.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    num_groups, rank = a.shape[0], b[0].shape[1]
    widths = sum(each.shape[2] for each in b)
    if (
        x.ndim != 2
        or y.shape != (x.shape[0], widths)
        or a.shape[2] != x.shape[1]
        or a.shape[1] % rank
        or len(part) != len(b)
        or any(each.shape[:2] != (num_groups, rank) for each in b)
        or any(each.dtype != x.dtype for each in (a, *b))
        or group.shape != x.shape[:1]
    ):
        shapes = [each.shape for each in (y, x, group, a, *b)]
        raise ValueError(f"add_low_rank: y, x, group, a and b must agree, got {shapes}")
    num_rows = x.shape[0]
    tile = tile_rows_of(num_rows, num_groups)
    pair_bytes = (a[0].size + sum(each[0].size for each in b)) * a.dtype.itemsize
    most_tiles = min(num_rows, num_rows // tile + num_groups)
    trip = max(1, min(most_tiles, _TRIP_TILES, _TRIP_ROWS // tile, _TRIP_BYTES // pair_bytes))
    order = jnp.argsort(group, stable=True).astype(jnp.int32)
    numbers = jnp.arange(num_groups, dtype=jnp.int32)
    ends = jnp.searchsorted(group[order], numbers, side="right").astype(jnp.int32)
    sizes = jnp.diff(ends, prepend=0)
    tiles = -(-sizes // tile)
    last_tiles = jnp.cumsum(tiles)

    def add_trip(index: jax.Array, y: jax.Array) -> jax.Array:
        numbers = index * trip + jnp.arange(trip, dtype=jnp.int32)
        # Tiles past the last one are of no group.
        groups = jnp.sum(numbers[:, None] >= last_tiles, axis=1, dtype=jnp.int32)
        own = jnp.minimum(groups, num_groups - 1)
        first = (ends - sizes)[own] + (numbers - (last_tiles - tiles)[own]) * tile
        at = first[:, None] + jnp.arange(tile, dtype=jnp.int32)
        is_own = (at < ends[own][:, None]) & (groups < num_groups)[:, None]
        row = order.at[at].get(mode="clip")
        inner = _products(x[row], a[own], 2).astype(x.dtype).reshape(trip, tile, -1, rank)
        added = [_products(inner[:, :, which], each[own], 1) for which, each in zip(part, b, strict=True)]
        total = y[row].astype(jnp.float32) + jnp.concatenate(added, axis=2)
        # Padding of a tile gets indices of its own past the result, where it is dropped.
        target = jnp.where(is_own, row, num_rows + jnp.arange(trip * tile, dtype=jnp.int32).reshape(trip, tile))
        return y.at[target].set(total.astype(y.dtype), mode="drop", unique_indices=True)

    return lax.fori_loop(0, -(-last_tiles[-1] // trip), add_trip, y)


def tile_rows_of(num_rows: int, num_groups: int) -> int:
    """Return the number of rows of a tile: 8 * num_rows / num_groups, rounded down to a power of two, at least 4 and at
    most 64. That is the size of an average group if an eighth of the groups have rows.
    """
    average = max(8 * num_rows // num_groups, 1)
    return min(max(1 << average.bit_length() - 1, _LEAST_TILE), _MOST_TILE)


def _products(rows: jax.Array, matrices: jax.Array, contract: int) -> jax.Array:
    """Return the products f32 [n, tile, size of the other axis] of rows [n, tile, k] of n tiles with one matrix per
    tile, over axis `contract` (1 or 2, of size k) of matrices [n, ., .].
    """
    dims = ((2,), (contract,)), ((0,), (0,))
    return lax.dot_general(rows, matrices, dims, preferred_element_type=jnp.float32)

"""Grouped products for CUDA cards: plain XLA over tiles of rows, several tiles in one batched product.

The rows of every group are cut into tiles; an iteration of a loop gathers the rows and the matrices of a few tiles and
multiplies them. The trip count follows the tiles of the groups, so that rows of no group cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.zeros import zeros_in_layer

_MIN_TILE, _MAX_TILE = 16, 1024  # rows: least of a tensor core, and enough to amortise reading a matrix
_TRIP_BYTES = 64 << 20  # most bytes of the matrices that an iteration gathers
_TRIP_ROWS = 8192  # most rows of an iteration


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, out_dtype: Any, transposed: bool = False
) -> jax.Array:
    """Multiply rows x [M, in] by the matrix of their group, w [G, in, out], over tiles of rows: return [M, out] in
    out_dtype, 0 for rows of no group. matmul.grouped.grouped_matmul has checked the arguments. group_sizes: i32 [G],
    consecutive rows of each group.

    transposed: whether each column of a matrix is contiguous in memory. If it is and this is False, XLA reorders all
    matrices.
    """
    matrices, axis = (jnp.swapaxes(w, 1, 2), 2) if transposed else (w, 1)

    def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
        rows = x.at[row].get(mode="clip")
        dims = ((2,), (axis,)), ((0,), (0,))
        return lax.dot_general(rows, matrices[group], dims, preferred_element_type=jnp.float32)

    matrix_bytes = w[0].size * w.dtype.itemsize
    return over_tiles((x.shape[0], w.shape[2]), matrix_bytes, group_sizes, multiply, out_dtype)


def over_tiles(
    shape: tuple[int, int],
    matrix_bytes: int,
    group_sizes: jax.Array,
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    out_dtype: Any,
) -> jax.Array:
    """Compute the result [M, out] = `shape` in out_dtype tile by tile, each of rows of one group. Rows of no group are
    0.

    multiply(rows, matrices): takes row numbers i32 [n, tile], of which some may be past the end, and matrix numbers
    i32 [n], and returns products f32 [n, tile, out]. matrix_bytes: memory of one gathered matrix. group_sizes: i32 [G].
    """
    num_rows, num_groups = shape[0], group_sizes.size
    tile, most_tiles = tile_rows_of(num_rows, num_groups), most_tiles_of(num_rows, num_groups)
    trip = max(1, min(most_tiles, _TRIP_BYTES // matrix_bytes, _TRIP_ROWS // tile))
    ends = jnp.cumsum(group_sizes)
    tiles = -(-group_sizes // tile)
    last_tiles = jnp.cumsum(tiles)

    def add_trip(index, out):
        numbers = index * trip + jnp.arange(trip, dtype=jnp.int32)
        # Compared rather than searched: a search is a loop of its own. Tiles past the last one are of no group.
        groups = jnp.sum(numbers[:, None] >= last_tiles, axis=1, dtype=jnp.int32)
        group = jnp.minimum(groups, num_groups - 1)
        first = (ends - group_sizes)[group] + (numbers - (last_tiles - tiles)[group]) * tile
        row = first[:, None] + jnp.arange(tile, dtype=jnp.int32)
        is_own = (row < ends[group][:, None]) & (groups < num_groups)[:, None]
        y = multiply(row, group)
        # A row of a tile that is not its group's gets an index of its own past the result, where it is dropped.
        target = jnp.where(is_own, row, num_rows + jnp.arange(trip * tile, dtype=jnp.int32).reshape(trip, tile))
        return out.at[target].set(y.astype(out_dtype), mode="drop", unique_indices=True)

    out = zeros_in_layer(group_sizes, shape, out_dtype)
    if most_tiles <= trip:
        return add_trip(jnp.int32(0), out)
    return lax.fori_loop(0, -(-last_tiles[-1] // trip), add_trip, out)


def tile_rows_of(num_rows: int, num_groups: int) -> int:
    """Return the number of rows of a tile: num_rows / num_groups, the size of an average group, rounded down to a power
    of two, so that padding at most doubles the rows; at least 16 and at most 1024.
    """
    average = max(num_rows // num_groups, 1)
    return min(max(1 << average.bit_length() - 1, _MIN_TILE), _MAX_TILE)


def most_tiles_of(num_rows: int, num_groups: int) -> int:
    """Return an upper bound of the number of tiles of `tile_rows_of` rows, however num_rows rows are spread over
    num_groups groups.
    """
    return min(num_rows, num_rows // tile_rows_of(num_rows, num_groups) + num_groups)

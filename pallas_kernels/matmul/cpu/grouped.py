"""Grouped products for the CPU: plain XLA whose cost follows the non-empty groups and their rows.

A loop with a dynamic trip count processes one non-empty group at a time and reads its matrix once; an inner loop
multiplies one block of the group's rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.zeros import zeros_in_layer

_MIN_BLOCK, _MAX_BLOCK = 2, 16  # rows; XLA:CPU is slow with a single bfloat16 row


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, out_dtype: Any) -> jax.Array:
    """Multiply rows x [M, in] by the matrix of their group, w [G, in, out], on a CPU: return [M, out] in out_dtype, 0
    for rows of no group. group_sizes: i32 [G], consecutive rows of each group. matmul.grouped.grouped_matmul has
    checked the arguments.
    """

    def matrix_of(group: jax.Array) -> Callable[[jax.Array], jax.Array]:
        # Without the barrier XLA:CPU converts all of a bfloat16 w to float32 before the loop.
        matrices, group = lax.optimization_barrier((w, group))
        matrix = lax.dynamic_index_in_dim(matrices, group, keepdims=False)
        return lambda rows: lax.dot_general(rows, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    return over_groups(x, w.shape[2], group_sizes, matrix_of, out_dtype)


def over_groups(
    x: jax.Array,
    out_size: int,
    group_sizes: jax.Array,
    matrix_of: Callable[[jax.Array], Callable[[jax.Array], jax.Array]],
    out_dtype: Any,
) -> jax.Array:
    """Apply a group's function to the rows x [M, in] of each non-empty group, block by block: return [M, out_size] in
    out_dtype, 0 for rows of no group. group_sizes: i32 [G], consecutive rows of each group.

    matrix_of(group): returns the function for the rows of a group, [n, in] -> f32 [n, out_size]. n is the same in every
    call, so the last rows may be another group's or zeros; their results are dropped.
    """
    num_rows = x.shape[0]
    block = block_rows_of(num_rows, group_sizes.size)
    ends = jnp.cumsum(group_sizes)
    non_empty = jnp.argsort(group_sizes == 0, stable=True)
    padded = jnp.pad(x, ((0, block), (0, 0)))
    row_in_block = jnp.arange(block, dtype=jnp.int32)[:, None]

    def add_group(index, out):
        group = non_empty[index]
        end, start = ends[group], ends[group] - group_sizes[group]
        multiply = matrix_of(group)

        def add_block(index, out):
            row = start + index * block
            y = multiply(lax.dynamic_slice_in_dim(padded, row, block))
            # A group's last block may cover rows of the next group, which are written later: groups are in order.
            y = jnp.where(row + row_in_block < end, y, 0).astype(out_dtype)
            return lax.dynamic_update_slice_in_dim(out, y, row, 0)

        return lax.fori_loop(0, -(-(end - start) // block), add_block, out)

    init = zeros_in_layer(group_sizes, (num_rows + block, out_size), out_dtype)
    return lax.fori_loop(0, jnp.sum(group_sizes > 0), add_group, init)[:num_rows]


def block_rows_of(num_rows: int, num_groups: int) -> int:
    """Return the number of rows of a block: the size of an average group, num_rows / num_groups, rounded up to a power
    of two, at least 2 and at most 16.
    """
    average = -(-num_rows // num_groups)
    return min(max(1 << (average - 1).bit_length(), _MIN_BLOCK), _MAX_BLOCK)

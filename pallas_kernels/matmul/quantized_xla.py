"""Products with quantised matrices as plain XLA, for TPUs and CUDA cards.

With a scale a channel codes go into the product as they are, and no widened matrix exists. Scales that vary along the
inputs are applied to the sums of their groups where rows are few; with many rows some columns at a time are widened,
and rows that have been rounded by groups of inputs are rounded to the model's dtype once more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.nibbles import code_parts, row_parts
from pallas_kernels.matmul.rounding import RoundedRows
from pallas_kernels.zeros import zeros_in_layer

# Up to so many rows sums of groups [n, M, out] cost less than widening does.
MOST_GROUP_ROWS = 64
BLOCK_COLUMNS = 512


def quantized_matmul(
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    dtype: Any,
    out_dtype: Any,
) -> jax.Array:
    """[M, out] in out_dtype; arguments as the public operation has checked them."""
    rows = x.shape[0]
    if rows == 1:
        # XLA:GPU makes of one row times a matrix a float32 array of the matrix's size in memory, and then its sums.
        x = jnp.pad(x, ((0, 1), (0, 0)))
        x_scales = None if x_scales is None else jnp.pad(x_scales, ((0, 1), (0, 0)), constant_values=1)
    coarse = x_scales is None or x_scales.shape[1] <= scales.shape[0]
    if coarse and (scales.shape[0] == 1 or rows <= MOST_GROUP_ROWS):
        y = _group_sums(x, x_scales, codes, scales, zeros, dtype)
    else:
        behind = x_scales if x_scales is not None and x_scales.shape[1] == 1 else None
        wide = x if x_scales is None or behind is not None else RoundedRows(x, x_scales).widened(dtype)
        y = _columns_product(wide.astype(dtype), codes, scales, zeros, dtype)
        y = y if behind is None else y * behind
    return y[:rows].astype(out_dtype)


def multiplied(x: jax.Array, codes: jax.Array, dims: Any, dtype: Any) -> jax.Array:
    """f32 product of rows or their codes with codes: in eight bits where both are, else in `dtype`."""
    if x.dtype == jnp.int8 and codes.dtype == jnp.int8:
        y = lax.dot_general(x, codes, dims, preferred_element_type=jnp.int32)
        return y.astype(jnp.float32)
    if x.dtype == jnp.float8_e4m3fn and codes.dtype != x.dtype:
        x = x.astype(dtype)
    wide = codes if x.dtype == codes.dtype else codes.astype(dtype)
    x = x if x.dtype == codes.dtype else x.astype(dtype)
    return lax.dot_general(x, wide, dims, preferred_element_type=jnp.float32)


def widened_parts(codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: Any) -> list[jax.Array]:
    """codes * scales - zeros of [..., in, out], rounded to `dtype` once, in the parts that codes have."""
    wide = []
    for part in code_parts(codes):
        shape = *part.shape[:-2], scales.shape[-2], part.shape[-2] // scales.shape[-2], part.shape[-1]
        own = part.astype(jnp.float32).reshape(shape) * scales.astype(jnp.float32)[..., None, :]
        own = own if zeros is None else own - zeros.astype(jnp.float32)[..., None, :]
        wide.append(own.reshape(part.shape).astype(dtype))
    return wide


def _group_sums(
    x: jax.Array, x_scales: jax.Array | None, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: Any
) -> jax.Array:
    """The sum over groups of inputs of (x @ codes) * scales, whatever is a scale's group."""
    rows, (count, out_size) = x.shape[0], scales.shape
    y = jnp.zeros(())
    for own, part in zip(row_parts(x, codes.dtype), code_parts(codes), strict=True):
        if count == 1:
            y = y + multiplied(own, part, (((1,), (0,)), ((), ())), dtype)[None]
        else:
            grouped = own.reshape(rows, count, -1), part.reshape(count, -1, out_size)
            y = y + multiplied(*grouped, (((2,), (1,)), ((1,), (0,))), dtype)
    sums = None if zeros is None else jnp.sum(x.astype(jnp.float32).reshape(rows, count, -1), axis=2)
    y = y * scales.astype(jnp.float32)[:, None]
    if x_scales is not None:
        each = jnp.repeat(x_scales, count // x_scales.shape[1], axis=1)
        y = y * each.T[:, :, None]
        sums = None if sums is None else sums * each
    y = jnp.sum(y, axis=0)
    if sums is None or zeros is None:
        return y
    return y - jnp.dot(sums, zeros.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _columns_product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: Any
) -> jax.Array:
    """x [M, in] in `dtype` times columns that are widened some at a time."""
    out_size, rows = codes.shape[1], row_parts(x, codes.dtype)
    width = min(BLOCK_COLUMNS, out_size)

    def multiply(block, out):
        # The last block begins where it must to end with the matrix: slices clamp, and what is made twice is alike.
        matrix, block = lax.optimization_barrier(((codes, scales, zeros), block))
        parts = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, block * width, width, axis=1), matrix)
        wide = widened_parts(parts[0], parts[1], parts[2], dtype)
        y = sum(jnp.dot(own, part, preferred_element_type=jnp.float32) for own, part in zip(rows, wide, strict=True))
        return lax.dynamic_update_slice(out, y, (0, block * width))

    out = zeros_in_layer(scales, (x.shape[0], out_size))
    return lax.fori_loop(0, -(-out_size // width), multiply, out)

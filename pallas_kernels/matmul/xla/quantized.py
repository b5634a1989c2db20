"""Quantised products as plain XLA, for TPUs and CUDA cards.

With one scale per channel the codes are operands of the product, and no widened matrix exists. Scales that vary along
the inputs are applied to the sums of their groups if there are few rows. With many rows, some columns at a time are
widened. Rounded rows are then widened as well, and rounded once more, as the matrix is. bfloat16 has too few bits for
both, so they are multiplied in float16, which is as fast on a card, each row and each column in units of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.nibbles import code_parts, row_parts
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.rounding import MOST_CODE, RoundedRows, units_of
from jaxengine.pallas_kernels.zeros import zeros_in_layer

# Up to this many rows, sums per group [n, M, out] cost less than widening the matrix.
MOST_GROUP_ROWS = 64
BLOCK_COLUMNS = 512  # columns of a matrix that are widened at a time


def quantized_matmul(operands: QuantizedOperands, *, dtype: Any, out_dtype: Any, fine: Any = jnp.float16) -> jax.Array:
    """Multiply rows x [M, in] by codes * scales - zeros (all fields of `operands`) in plain XLA: return [M, out] in
    out_dtype.

    Few rows, and matrices with one scale per channel, are multiplied as codes, whose sums are scaled, unless rows have
    more scales than the matrix. Otherwise the matrix is widened, some columns at a time. dtype: the dtype that codes
    and rows are widened to. fine: see `fine_rows`. The public operation, jaxengine.pallas_kernels.matmul.quantized,
    documents the shapes and has checked them.
    """
    x, x_scales, codes, scales, zeros = operands
    rows = x.shape[0]
    if rows == 1:
        # For one row XLA:GPU writes all products, a float32 array of the matrix's size, to memory before it sums them.
        x = jnp.pad(x, ((0, 1), (0, 0)))
        x_scales = None if x_scales is None else jnp.pad(x_scales, ((0, 1), (0, 0)), constant_values=1)
    coarse = x_scales is None or x_scales.shape[1] <= scales.shape[0]
    if coarse and (scales.shape[0] == 1 or rows <= MOST_GROUP_ROWS):
        y = _group_sums(x, x_scales, codes, scales, zeros, dtype)
    else:
        y = _columns_product(fine_rows(x, x_scales, dtype, fine), codes, scales, zeros)
    return y[:rows].astype(out_dtype)


class FineRows(NamedTuple):
    """Rows [M, in] to multiply with widened matrices, in their dtype.

    Attributes:
      values: [M, in], rounded in their units.
      units: f32 [M, 1] of the values; None for rows that are not rounded.
      precision: precision of the product.
    """

    values: jax.Array
    units: jax.Array | None
    precision: Any

    def at(self, index: jax.Array) -> FineRows:
        """Return the rows with numbers `index`, i32 of any shape: values [*shape, in], units [*shape, 1]. Numbers past
        the end are clipped.
        """
        values, units = (part if part is None else part.at[index].get(mode="clip") for part in self[:2])
        return self._replace(values=values, units=units)


def fine_rows(x: jax.Array, x_scales: jax.Array | None, dtype: Any, fine: Any) -> FineRows:
    """Return rows x [M, in], codes if they have scales x_scales [M, n], as FineRows: rounded ones divided by a unit of
    their row, others in `dtype`.

    dtype: the model's dtype. fine: dtype that rounded rows and their matrix are rounded to if `dtype` is bfloat16:
    float16, or the slower float32 on devices without float16 products.
    """
    if x_scales is None:
        return FineRows(x.astype(dtype), None, None)
    fine = fine if dtype == jnp.bfloat16 else dtype
    return FineRows(*RoundedRows(x, x_scales).in_units(fine), None if fine == dtype else lax.Precision.HIGHEST)


def multiplied(x: jax.Array, codes: jax.Array, dims: Any, dtype: Any) -> jax.Array:
    """Return the f32 product of rows x, or their codes, and codes. Operands are of eight bits if both have the same
    eight-bit dtype (int8 sums are exact), else of `dtype`.

    dims: dimension numbers of `lax.dot_general`.
    """
    if x.dtype == jnp.int8 and codes.dtype == jnp.int8:
        y = lax.dot_general(x, codes, dims, preferred_element_type=jnp.int32)
        return y.astype(jnp.float32)
    if x.dtype == jnp.float8_e4m3fn and codes.dtype != x.dtype:
        x = x.astype(dtype)
    wide = codes if x.dtype == codes.dtype else codes.astype(dtype)
    x = x if x.dtype == codes.dtype else x.astype(dtype)
    return lax.dot_general(x, wide, dims, preferred_element_type=jnp.float32)


def widened_parts(codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: Any) -> list[jax.Array]:
    """Return codes * scales - zeros of [..., in, out], rounded to `dtype` once, as a list with one array for each part
    of `code_parts`.

    scales, zeros: [..., n, out], each for in / n neighbouring inputs; zeros may be None.
    """
    wide = []
    for part in code_parts(codes):
        shape = *part.shape[:-2], scales.shape[-2], part.shape[-2] // scales.shape[-2], part.shape[-1]
        own = part.astype(jnp.float32).reshape(shape) * scales.astype(jnp.float32)[..., None, :]
        own = own if zeros is None else own - zeros.astype(jnp.float32)[..., None, :]
        wide.append(own.reshape(part.shape).astype(dtype))
    return wide


def widened_product(
    rows: FineRows, parts: list[jax.Array], codes: jax.Array, scales: jax.Array, zeros: jax.Array | None
) -> jax.Array:
    """Multiply rows [..., M, in] by widened matrices codes * scales - zeros [..., in, out]: return f32 [..., M, out].

    parts: the rows' values in the `row_parts` that match the codes. scales, zeros: [..., n, out]; zeros may be None.
    """
    units = None
    if rows.units is not None:
        scales = scales.astype(jnp.float32)
        # A zero takes part as a code does.
        units = units_of(scales if zeros is None else jnp.abs(scales) + jnp.abs(zeros) / MOST_CODE, -2)
        scales, zeros = scales / units, None if zeros is None else zeros / units
    wide = widened_parts(codes, scales, zeros, rows.values.dtype)
    batch = tuple(range(codes.ndim - 2))
    dims = ((codes.ndim - 1,), (codes.ndim - 2,)), (batch, batch)
    y = jnp.zeros(())
    for own, part in zip(parts, wide, strict=True):
        y = y + lax.dot_general(own, part, dims, precision=rows.precision, preferred_element_type=jnp.float32)
    # Columns first: rows may be so large that they are not finite in units of columns.
    return y if rows.units is None or units is None else y * units * rows.units


def _group_sums(
    x: jax.Array, x_scales: jax.Array | None, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: Any
) -> jax.Array:
    """Return the sum over groups of inputs of (x @ codes) * scales, minus x @ zeros: f32 [M, out].

    x_scales: [M, m], where m divides the matrix's number of groups; None for rows that are not rounded. dtype: dtype of
    the products that are not of eight-bit operands.
    """
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


def _columns_product(x: FineRows, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """Multiply rows [M, in] by codes * scales - zeros, widening BLOCK_COLUMNS columns at a time: return f32 [M, out].

    codes: [in, out], or pairs [in / 2, out]. scales, zeros: [n, out], each for in / n neighbouring inputs; zeros may be
    None.
    """
    out_size, x_parts = codes.shape[1], row_parts(x.values, codes.dtype)
    width = min(BLOCK_COLUMNS, out_size)

    def multiply(block, out):
        # The last block is moved back to end with the matrix (slices clamp): columns computed twice have equal values.
        matrix, block = lax.optimization_barrier(((codes, scales, zeros), block))
        parts = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, block * width, width, axis=1), matrix)
        y = widened_product(x, x_parts, parts[0], parts[1], parts[2])
        return lax.dynamic_update_slice(out, y, (0, block * width))

    out = zeros_in_layer(scales, (x.values.shape[0], out_size))
    return lax.fori_loop(0, -(-out_size // width), multiply, out)

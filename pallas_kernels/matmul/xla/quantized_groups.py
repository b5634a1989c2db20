"""Quantised grouped products as plain XLA, for TPUs and CUDA cards, over tiles of rows.

As in `matmul.xla.grouped`, an iteration gathers the codes of a few matrices. With one scale per channel the codes are
multiplied directly, otherwise those of the iteration are widened. jax.lax.ragged_dot would widen all matrices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.nibbles import code_parts, per_byte, row_parts
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.xla.grouped import over_tiles
from jaxengine.pallas_kernels.matmul.xla.quantized import fine_rows, multiplied, widened_product


def quantized_grouped_matmul(
    operands: QuantizedOperands,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    out_dtype: Any,
    transposed: bool = False,
    fine: Any = jnp.float16,
) -> jax.Array:
    """Multiply rows x [M, in] of `operands` by the quantised matrix of their group, over tiles of rows: return [M, out]
    in out_dtype, 0 for rows of no group. matmul.quantized.quantized_grouped_matmul has checked the arguments.
    group_sizes: i32 [G], consecutive rows of each group. dtype: the dtype that codes are widened to.

    Codes without zeros and with one scale per channel, and per row of rounded rows, are multiplied as they are and the
    sums scaled; other matrices are widened first.

    transposed: see `matmul.xla.grouped.grouped_matmul`. fine: see `matmul.xla.quantized.fine_rows`.
    """
    x, x_scales, codes, scales, zeros = operands
    out_size = codes.shape[2]
    by_channel = scales.shape[1] == 1 and zeros is None and (x_scales is None or x_scales.shape[1] == 1)
    widened = None if by_channel else fine_rows(x, x_scales, dtype, fine)

    def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
        picked = jnp.swapaxes(jnp.swapaxes(codes, 1, 2)[group], 1, 2) if transposed else codes[group]
        if widened is not None:
            rows, own_zeros = widened.at(row), None if zeros is None else zeros[group]
            return widened_product(rows, row_parts(rows.values, codes.dtype), picked, scales[group], own_zeros)
        batched = (((2,), (1,)), ((0,), (0,)))
        parts = zip(row_parts(x.at[row].get(mode="clip"), codes.dtype), code_parts(picked), strict=True)
        y = sum((multiplied(own, part, batched, dtype) for own, part in parts), jnp.zeros(()))
        y = y * scales[group].astype(jnp.float32)
        return y if x_scales is None else y * x_scales.at[row].get(mode="clip")

    shape = x.shape[0], out_size
    matrix_bytes = codes[0].size * per_byte(codes.dtype) * jnp.dtype(dtype).itemsize
    return over_tiles(shape, matrix_bytes, group_sizes, multiply, out_dtype)

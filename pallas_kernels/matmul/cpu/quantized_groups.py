"""Quantised grouped products for the CPU: one group after the other, with a few columns widened at a time."""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.matmul.cpu.grouped import over_groups
from jaxengine.pallas_kernels.matmul.cpu.quantized import columns_product, widened_rows
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands


def quantized_grouped_matmul(
    operands: QuantizedOperands, group_sizes: jax.Array, *, dtype: Any, out_dtype: Any
) -> jax.Array:
    """Multiply rows x [M, in] of `operands` by the quantised matrix of their group on a CPU: return [M, out] in
    out_dtype, 0 for rows of no group, computed in float32 whatever `dtype` is. group_sizes: i32 [G], consecutive rows
    of each group. matmul.quantized.quantized_grouped_matmul has checked the arguments.
    """
    x, x_scales, codes, scales, zeros = operands
    del dtype
    wide = widened_rows(x, x_scales)

    def matrix_of(group: jax.Array):
        return lambda rows: columns_product(rows, codes, scales, zeros, group)

    return over_groups(wide, codes.shape[2], group_sizes, matrix_of, out_dtype)

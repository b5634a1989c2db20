"""Quantised product for the CPU: few rows by a handler, others as plain XLA."""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.matmul.cpu import quantized as quantized_cpu
from jaxengine.pallas_kernels.matmul.native.product import few_rows_product
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands


def quantized_matmul(operands: QuantizedOperands, *, dtype: Any, out_dtype: Any) -> jax.Array:
    """Multiply x [M, in] by codes * scales - zeros on a CPU: return [M, out] in out_dtype, computed in float32 whatever
    `dtype` is. matmul.quantized.quantized_matmul has checked the arguments. A handler's machine code computes it if one
    supports the operands (`few_rows_product`), else plain XLA.
    """
    x = quantized_cpu.widened_rows(operands.x, operands.x_scales)
    y = few_rows_product(x, operands.codes, operands.scales, operands.zeros)
    if y is not None:
        return y.astype(out_dtype)
    return quantized_cpu.quantized_matmul(operands, dtype=dtype, out_dtype=out_dtype)

"""Product with a quantised token table for the CPU: few rows by a handler, others as plain XLA."""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.matmul.cpu import quantized_table as quantized_table_cpu
from jaxengine.pallas_kernels.matmul.native.product import few_rows_product


def quantized_table_matmul(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, dtype: Any, out_dtype: Any
) -> jax.Array:
    """Multiply x [M, in] by the transpose of a quantised table [V, in], codes * scales - zeros (None: no zeros), on a
    CPU: return [M, V] in out_dtype, computed in float32 whatever `dtype` is.
    matmul.quantized_table.quantized_table_matmul has checked the arguments. A handler's machine code computes it if one
    supports the operands (`few_rows_product`), else plain XLA.
    """
    if (y := few_rows_product(x, codes, scales, zeros, is_table=True)) is not None:
        return y.astype(out_dtype)
    return quantized_table_cpu.quantized_table_matmul(x, codes, scales, zeros, dtype=dtype, out_dtype=out_dtype)

"""Product with a quantised token table as a quantised product with its transpose.

For platforms whose kernels read a matrix with each output's codes contiguous, as they are in the table.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.matmul.quantized import quantized_matmul


def quantized_table_matmul(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, dtype: Any, out_dtype: Any
) -> jax.Array:
    """Multiply x [M, in] by the transpose of a quantised table, codes [V, in] * scales - zeros ([n, V] each; zeros may
    be None), by the public quantized_matmul, in `dtype`: return [M, V] in out_dtype.
    matmul.quantized_table.quantized_table_matmul has checked the arguments.
    """
    return quantized_matmul(x, codes.T, scales, zeros, dtype=dtype, out_dtype=out_dtype)

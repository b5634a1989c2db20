"""The product with a quantised token table as that with the matrix of its head, for platforms whose kernels read such a
matrix with each output's codes side by side: turned around it lies as they want it."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.matmul.quantized import quantized_matmul


def quantized_table_matmul(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, dtype: Any, out_dtype: Any
) -> jax.Array:
    """[M, V] in out_dtype; arguments as the public operation has checked them."""
    return quantized_matmul(x, codes.T, scales, zeros, dtype=dtype, out_dtype=out_dtype)

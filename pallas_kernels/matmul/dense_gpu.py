"""Rows times a matrix for CUDA cards: plain XLA, with a second row beside a single one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import dense_xla


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """float32 [R, out]; arguments as the public operation has checked them."""
    rows = x.shape[0]
    if rows == 1:
        # XLA:GPU makes of one row times a matrix a float32 array of the matrix's size in memory, and then its sums.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return dense_xla.matmul(x, weight, contract=contract)[:rows]

"""Dense product for CUDA cards: plain XLA, with a single row padded to two."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.xla import dense as dense_xla


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """Multiply x [R, n] by weight over its axis `contract` of size n, on a CUDA card: return float32 [R, out]. It is
    the plain XLA product, in which a single row gets a second one of zeros. matmul.dense.matmul has checked the
    arguments.
    """
    rows = x.shape[0]
    if rows == 1:
        # For one row XLA:GPU writes all products, a float32 array of the matrix's size, to memory before it sums them.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return dense_xla.matmul(x, weight, contract=contract)[:rows]

"""Rows times a matrix for the CPU: plain XLA, with the forms in which XLA:CPU is fast with a single row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import dense_xla

_ROW_PARTS = 4


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """float32 [R, out]; arguments as the public operation has checked them."""
    rows = x.shape[0]
    if rows == 1 and x.dtype == jnp.float32 and contract == 0 and weight.shape[0] % _ROW_PARTS == 0:
        # As a batch of partial sums XLA:CPU reads the weights faster: `jaxengine bench peers --workloads W1`.
        x, weight = x.reshape(_ROW_PARTS, 1, -1), weight.reshape(_ROW_PARTS, -1, weight.shape[1])
        return jnp.sum(lax.dot_general(x, weight, (((2,), (1,)), ((0,), (0,)))), axis=0)
    if rows == 1 and x.dtype == jnp.bfloat16:
        # XLA:CPU takes ten times as long for one bfloat16 row as for two.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return dense_xla.matmul(x, weight, contract=contract)[:rows]

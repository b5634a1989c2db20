"""Rows times a matrix for the CPU: plain XLA, with the forms in which XLA:CPU is fast with few rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import dense_xla

_ROW_PARTS = 4
# Up to so many rows a table is the left operand.
_MOST_TURNED_ROWS = 64


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
    if contract == 1 and x.dtype == jnp.float32 and 1 < rows <= _MOST_TURNED_ROWS:
        # As the right operand XLA:CPU brings all of the table into another order in every call. The barriers keep it
        # from turning both operands around again.
        turned = lax.optimization_barrier(x.T)
        return lax.optimization_barrier(dense_xla.matmul(weight, turned, contract=0)).T
    return dense_xla.matmul(x, weight, contract=contract)[:rows]

"""Dense product for the CPU: few rows of bfloat16 by a handler, others as plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.cpu import dense as dense_cpu
from jaxengine.pallas_kernels.matmul.native.product import few_rows_product


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """Multiply x [R, n] by weight over its axis `contract` of size n, on a CPU: return float32 [R, out].

    A few rows of bfloat16 are multiplied by machine code if a handler supports them (`few_rows_product`), others by
    plain XLA. matmul.dense.matmul has checked the arguments.
    """
    if x.dtype == weight.dtype == jnp.bfloat16:
        y = few_rows_product(x, weight, is_table=contract == 1)
        if y is not None:
            return y
    return dense_cpu.matmul(x, weight, contract=contract)

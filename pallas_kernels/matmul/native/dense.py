"""Dense product for the CPU: bfloat16 and float32 by handlers, what they do not support as plain XLA."""

from __future__ import annotations

import jax

from jaxengine.pallas_kernels.matmul.cpu import dense as dense_cpu
from jaxengine.pallas_kernels.matmul.native.product import few_rows_product, many_rows_product


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """Multiply x [R, n] by weight over its axis `contract` of size n, on a CPU: return float32 [R, out].

    Machine code computes it if x and weight have one dtype that a handler for few or many rows supports
    (`few_rows_product`, `many_rows_product`), else plain XLA. matmul.dense.matmul has checked the arguments.
    """
    if x.dtype == weight.dtype:
        for product in (few_rows_product, many_rows_product):
            if (y := product(x, weight, is_table=contract == 1)) is not None:
                return y
    return dense_cpu.matmul(x, weight, contract=contract)

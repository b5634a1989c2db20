"""Dense product as plain XLA, for TPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """Multiply x [R, n] by weight over its axis `contract` of size n, in plain XLA: return float32 [R, out].
    matmul.dense.matmul has checked the arguments.
    """
    return lax.dot_general(x, weight, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)

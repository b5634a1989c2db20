"""Batched product of each head's rows with a matrix of its own, in plain XLA on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def batched_matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """Multiply x [R, N, n] by N matrices, one per head, over their axis `contract`, of size n: return float32 [R, N,
    size of the other axis].

    weight: [N * a, b], the matrices [a, b] stacked along the first axis.
    Raises ValueError if the shapes do not fit together.
    """
    heads = x.shape[1] if x.ndim == 3 else 0
    if not heads or weight.ndim != 2 or contract not in (0, 1) or weight.shape[0] % heads:
        raise ValueError(f"batched_matmul: x [R, N, n] and weight [N * a, b] must agree, got {x.shape}, {weight.shape}")
    matrices = weight.reshape(heads, -1, weight.shape[1])
    if matrices.shape[1 + contract] != x.shape[2]:
        raise ValueError(f"batched_matmul: {matrices.shape} has no {x.shape[2]} along axis {1 + contract}")
    dims = (((2,), (1 + contract,)), ((1,), (0,)))
    return lax.dot_general(x, matrices, dims, preferred_element_type=jnp.float32).swapaxes(0, 1)

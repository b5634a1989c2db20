"""Grouped product by XLA's own operation, which has a gradient and can be split over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, out_dtype: Any) -> jax.Array:
    """Multiply rows x [M, in] by the matrix of their group, w [G, in, out], with jax.lax.ragged_dot: return [M, out] in
    out_dtype, 0 for rows of no group. matmul.grouped.grouped_matmul has checked the arguments.
    """
    y = lax.ragged_dot(x, w, group_sizes, preferred_element_type=jnp.float32)
    in_group = jnp.arange(x.shape[0])[:, None] < jnp.sum(group_sizes)
    return jnp.where(in_group, y, 0).astype(out_dtype)

"""Grouped products with jax.lax.ragged_dot, which XLA:TPU compiles to a kernel whose work follows the rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *, out_dtype: Any
) -> jax.Array:
    """[M, out] in out_dtype; arguments as the public operation has checked them."""
    num_rows, num_groups = x.shape[0], w.shape[0]
    sizes = lax.dynamic_slice_in_dim(group_sizes, group_offset, num_groups)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    if num_groups == group_sizes.size:
        y = lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)
        return jnp.where((row < jnp.sum(sizes))[:, None], y, 0).astype(out_dtype)
    # ragged_dot has no offset where it is compiled to a kernel: the groups here are rotated to the front and back.
    first = jnp.sum(jnp.where(jnp.arange(group_sizes.size) < group_offset, group_sizes, 0))
    y = lax.ragged_dot(x[(row + first) % num_rows], w, sizes, preferred_element_type=jnp.float32)
    place = row - first
    here = (place >= 0) & (place < jnp.sum(sizes))
    return jnp.where(here[:, None], y[place % num_rows], 0).astype(out_dtype)

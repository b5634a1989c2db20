"""Initial zeros of loops within a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def zeros_in_layer(own: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Return zeros of `shape` and `dtype` that are computed from `own`, an array which only this layer has. Its values,
    also NaN and infinity, do not matter.

    XLA would copy constant zeros for all layers at the start of the step.
    """
    first = own[(0,) * max(own.ndim - 2, 0)]
    if own.dtype.itemsize == 1 and own.ndim > 1:
        # A whole tile of a TPU: to read a single element XLA would copy the array, all of it, to smaller tiles.
        first = jnp.max(first[:32, :128].astype(jnp.float32))
    value = first[(0,) * first.ndim].astype(jnp.float32)
    zero = jnp.where(jnp.isfinite(value), 0.0 * jnp.abs(value), 0.0)
    return jnp.broadcast_to(zero.astype(dtype), shape)

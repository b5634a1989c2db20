"""The zeros that a loop of a layer begins with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def zeros_in_layer(own: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Zeros of a shape, made where the layer has `own`, an array of numbers of its own, whatever they are.

    Of constants XLA makes one array for all layers and a copy of it for each, all of them where a step begins.
    """
    value = own[(0,) * own.ndim].astype(jnp.float32)
    zero = jnp.where(jnp.isfinite(value), 0.0 * jnp.abs(value), 0.0)
    return jnp.broadcast_to(zero.astype(dtype), shape)

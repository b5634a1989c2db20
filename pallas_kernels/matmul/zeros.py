"""The zeros that a loop of a grouped product begins with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def zeros_for(group_sizes: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros of a shape, made where the sizes i32[G] >= 0 of a product's groups are known.

    Of constants XLA makes one array for all layers and a copy of it for each, all of them where a step begins.
    """
    return jnp.broadcast_to(jnp.minimum(group_sizes[0], 0).astype(dtype), shape)

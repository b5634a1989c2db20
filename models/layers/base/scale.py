"""Multiplication by a constant of the configuration."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """Return x * multiplier, computed in float32 and returned in x's dtype; x itself if the multiplier is 1."""
    return x if multiplier == 1.0 else (x.astype(jnp.float32) * multiplier).astype(x.dtype)

"""Multiplication by a constant of the configuration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def scaled(x: jax.Array, multiplier: float) -> jax.Array:
    """Return x * multiplier, computed in float32 and returned in x's dtype; x itself if the multiplier is 1."""
    return x if multiplier == 1.0 else (x.astype(jnp.float32) * multiplier).astype(x.dtype)


class Scaled(nnx.Module):
    """Module whose results are those of another one, `inner`, times a constant."""

    def __init__(self, inner: nnx.Module, multiplier: float):
        self.inner, self.multiplier = inner, multiplier

    def __call__(self, *inputs: jax.Array) -> jax.Array:
        return scaled(self.inner(*inputs), self.multiplier)

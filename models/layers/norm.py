"""Norms, computed in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.weights.declare import ParamDecl, Source, declare


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, source: str, axes: tuple[str | None] = (None,), dtype: Any):
        self.weight = declare((size,), dtype, ParamDecl(axes, (Source(f"{source}.weight", size),)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)

"""Norms, computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.build import Build
from models.weights.declare import ParamDecl, Source, declare


def rms_normalized(x: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) over the last axis, in float32."""
    y = x.astype(jnp.float32)
    return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, source: str, build: Build):
        self.weight = declare((size,), build.dtype, ParamDecl((None,), (Source(source, size).tensor("weight"),)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_normalized(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class OffsetRMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight): Gemma's, whose weights are stored as their difference to one."""

    def __init__(self, size: int, eps: float, *, source: str, build: Build):
        decl = ParamDecl((None,), (Source(source, size).tensor("weight"),), init_std=0.0)
        self.weight = declare((size,), build.dtype, decl)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_normalized(x, self.eps) * (1.0 + self.weight[...].astype(jnp.float32))).astype(x.dtype)

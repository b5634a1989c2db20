"""Norms, computed in float32: RMS norms and layer norms, with weights stored directly or as their difference to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.sharding.collectives import num_shards, shard_index, sum_parts

# A class of norms over the last axis: (size, eps, source=, build=), [..., size] in any dtype -> the same.
NormClass = Callable[..., nnx.Module]


def rms_normalized(x: jax.Array, eps: float) -> jax.Array:
    """Return x / rms(x) over the last axis as float32, where rms(x) is sqrt(mean(x^2) + eps)."""
    y = x.astype(jnp.float32)
    return y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)


class Identity(nnx.Module):
    """Module that returns x, in place of a norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class RMSNorm(nnx.Module):
    """RMS norm x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467), computed in float32
    and rounded once to x's dtype.
    """

    def __init__(self, size: int, eps: float, *, source: str, build: Build):
        self.weight = declare((size,), build.dtype, ParamDecl((None,), (Source(source, size).tensor("weight"),)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_normalized(x, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class OffsetRMSNorm(nnx.Module):
    """RMS norm x / rms(x) * (offset + weight): with an offset of one, Gemma's, whose weights are stored as their
    difference from one.
    """

    def __init__(self, size: int, eps: float, *, source: str, build: Build, offset: float = 1.0):
        decl = ParamDecl((None,), (Source(source, size).tensor("weight"),), init_std=0.0)
        self.weight = declare((size,), build.dtype, decl)
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        return (rms_normalized(x, self.eps) * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class InputScaledRMSNorm(OffsetRMSNorm):
    """RMS norm y / rms(y) of y = x * (offset + weight), rounded to x's dtype: Muse Spark's."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32) * (self.offset + self.weight[...].astype(jnp.float32))
        return rms_normalized(y.astype(x.dtype), self.eps).astype(x.dtype)


class GroupedOffsetRMSNorm(OffsetRMSNorm):
    """OffsetRMSNorm in which each `group` neighbouring elements are normed by themselves; `size` is that of all."""

    def __init__(self, size: int, group: int, eps: float, *, source: str, build: Build):
        super().__init__(size, eps, source=source, build=build)
        self.group = group

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = rms_normalized(x.reshape(*x.shape[:-1], -1, self.group), self.eps).reshape(x.shape)
        return (normed * (self.offset + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class FixedRMSNorm(nnx.Module):
    """RMS norm x / rms(x) without weights: nanochat's, whose checkpoints have nothing under `source`."""

    def __init__(self, size: int, eps: float, *, source: str, build: Build):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_normalized(x, self.eps).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (x - mean(x)) / std(x) * weight + bias over the last axis (Ba et al. 2016, arXiv:1607.06450), where
    std(x) is sqrt(variance + eps), computed in float32 and rounded once to x's dtype.
    """

    has_bias = True

    def __init__(self, size: int, eps: float, *, source: str, build: Build):
        module = Source(source, size)
        self.weight = declare((size,), build.dtype, self._weight(module.tensor("weight")))
        bias = ParamDecl((None,), (module.tensor("bias"),), init_std=0.02)
        self.bias = declare((size,), build.dtype, bias) if self.has_bias else None
        self.eps = eps

    def _weight(self, source: Source) -> ParamDecl:
        """Return the declaration of the weight, which the checkpoint has as `source`."""
        return ParamDecl((None,), (source,))

    def scale(self) -> jax.Array:
        """Return the factors f32[size] by which normed elements are multiplied."""
        return self.weight[...].astype(jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = rms_normalized(y - jnp.mean(y, axis=-1, keepdims=True), self.eps) * self.scale()
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


class UnbiasedLayerNorm(LayerNorm):
    """LayerNorm without a bias: Cohere's."""

    has_bias = False


class FixedLayerNorm(nnx.Module):
    """Layer norm (x - mean(x)) / std(x) without weights: OLMo's, whose checkpoints have nothing under `source`."""

    def __init__(self, size: int, eps: float, *, source: str, build: Build):
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return rms_normalized(y - jnp.mean(y, axis=-1, keepdims=True), self.eps).astype(x.dtype)


class OffsetLayerNorm(LayerNorm):
    """LayerNorm with factors 1 + weight: Nemotron's LayerNorm1P, whose weights are stored as their difference from
    one.
    """

    def _weight(self, source: Source) -> ParamDecl:
        return ParamDecl((None,), (source,), init_std=0.0)

    def scale(self) -> jax.Array:
        return 1.0 + super().scale()


def unit(x: jax.Array, axis: str | None = None) -> jax.Array:
    """Return x / sqrt(sum(x^2) + 1e-6), computed in float32, in x's dtype.

    The sum is over the last axis of x [..., D]. With the logical `axis` by which devices split a token's elements, it
    is over all axes of x [T, ...] but the first, and over all of these devices.
    """
    y = x.astype(jnp.float32)
    over = -1 if axis is None else tuple(range(1, x.ndim))
    total = jnp.sum(y * y, axis=over, keepdims=True)
    return (y * lax.rsqrt((total if axis is None else sum_parts(total, axis)) + 1e-6)).astype(x.dtype)


class UnitNorm(nnx.Module):
    """`unit` as a module, without weights: nGPT's norm."""

    def __init__(self, axis: str | None = None):
        self.axis = axis

    def __call__(self, x: jax.Array) -> jax.Array:
        return unit(x, self.axis)


class NormOfFirst(nnx.Module):
    """Norm of the first of `count` hidden states of a token side by side: [T, count * D] -> [T, D]."""

    def __init__(self, norm: Any, count: int):
        self.norm, self.count = norm, count

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(x[:, : x.shape[1] // self.count])


class HeadsRMSNorm(nnx.Module):
    """RMS norm x / rms(x) * weight over all heads at once: OLMo 2's norms of q and k.

    Devices that share the heads add up their sums of squares. copies: how many times each head is stored on a mesh with
    more devices than heads (see layers.attention). axis: the logical axis by which heads are split.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        eps: float,
        *,
        source: str,
        build: Build,
        copies: int = 1,
        axis: str = "heads",
    ):
        rows = Source(source, num_heads * head_dim, repeat=copies, group=head_dim).tensor("weight")
        self.weight = declare((rows.num_contributed,), build.dtype, ParamDecl((axis,), (rows,)))
        self.eps, self.axis = eps, axis

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [T, heads of this device, H] normed over the heads of all devices together, which add up their sums
        of squares, in x's dtype.
        """
        y = x.astype(jnp.float32)
        width = y.shape[1] * y.shape[2] * num_shards(self.axis)
        mean_square = sum_parts(jnp.sum(y * y, axis=(1, 2), keepdims=True), self.axis) / width
        weight = self.weight[...].astype(jnp.float32).reshape(y.shape[1:])
        return (y * lax.rsqrt(mean_square + self.eps) * weight).astype(x.dtype)


class HeadsLayerNorm(HeadsRMSNorm):
    """Layer norm (x - mean(x)) / std(x) * weight + bias over all heads at once: JinaBERT's norms of q and k.

    Devices that share the heads add up their sums.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, source: str, build: Build):
        super().__init__(num_heads, head_dim, eps, source=source, build=build)
        rows = Source(source, num_heads * head_dim, group=head_dim).tensor("bias")
        self.bias = declare((rows.num_contributed,), build.dtype, ParamDecl(("heads",), (rows,), init_std=0.02))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        width = y.shape[1] * y.shape[2] * num_shards("heads")
        y = y - sum_parts(jnp.sum(y, axis=(1, 2), keepdims=True), "heads") / width
        return (super().__call__(y) + self.bias[...].astype(jnp.float32).reshape(y.shape[1:])).astype(x.dtype)


class HeadLayerNorms(nnx.Module):
    """Layer norms without biases, one for each head; the n-th is the module `{source}.norms.{n}`: StableLM's.

    Every device has the weights of all heads. copies: how many times each head is stored on a mesh with more devices
    than heads (see layers.attention).
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, source: str, build: Build, copies: int = 1):
        heads = (Source(f"{source}.norms.{head}", head_dim, repeat=copies, group=head_dim) for head in range(num_heads))
        rows = tuple(head.tensor("weight") for head in heads)
        self.weight = declare((num_heads * copies * head_dim,), build.dtype, ParamDecl((None,), rows))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [T, heads of this device, H] with each head normed by itself and multiplied by its own weights, in
        x's dtype.
        """
        size = x.shape[1] * x.shape[2]
        weight = lax.dynamic_slice_in_dim(self.weight[...], shard_index("heads") * size, size)
        y = x.astype(jnp.float32)
        y = rms_normalized(y - jnp.mean(y, axis=-1, keepdims=True), self.eps)
        return (y * weight.astype(jnp.float32).reshape(x.shape[1:])).astype(x.dtype)

"""Feed-forward part of a layer, and its activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.params.declare import Source
from jaxengine.sharding.collectives import num_shards, shard_index, sum_parts


def gelu(x: jax.Array) -> jax.Array:
    """Return the exact GELU of x, by the error function (Hendrycks & Gimpel 2016, arXiv:1606.08415), in x's dtype:
    `gelu` in configurations.
    """
    # jax.nn.gelu takes the complement of erf, three times as long on a CPU. 1 + erf needs float32, as torch has it.
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """Return the GELU of x in its tanh approximation, x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 *
    x**3), in x's dtype: `gelu_pytorch_tanh` in configurations.
    """
    # (1 + tanh(u)) / 2 is the logistic function of 2 u, which keeps its digits where tanh(u) is near -1.
    scale = 2 * math.sqrt(2 / math.pi)
    return x * jax.nn.sigmoid(x * (scale + 0.044715 * scale * x * x))


def relu_squared(x: jax.Array) -> jax.Array:
    """Return max(x, 0) ** 2 (So et al. 2021, arXiv:2109.08668): `relu2` in configurations."""
    return jnp.square(jax.nn.relu(x))


@dataclass(frozen=True)
class OfScaled:
    """Activation activation(multiplier * x). Objects with equal fields are equal, so that layers share a trace."""

    multiplier: float
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.multiplier * x)


@dataclass(frozen=True)
class OfClamped:
    """Activation activation(min(gate, limit)) * clip(up, -limit, limit). Objects with equal fields are equal, so that
    layers share a trace.
    """

    limit: float
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(jnp.minimum(gate, self.limit)) * jnp.clip(up, -self.limit, self.limit)


@dataclass(frozen=True)
class ThenClamped:
    """Activation min(activation(gate), limit) * clip(up, -limit, limit). Objects with equal fields are equal, so that
    layers share a trace.
    """

    limit: float
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return jnp.minimum(self.activation(gate), self.limit) * jnp.clip(up, -self.limit, self.limit)


@dataclass(frozen=True)
class Situ:
    """Activation silu(gate) * up in which gate and up are bounded smoothly, as in Kimi K3: bounded(gate, bound) *
    sigmoid(gate) * bounded(up, linear_bound), where bounded(x, b) is b * tanh(x / b), and x without a bound. Objects
    with equal bounds are equal, so that layers share a trace.
    """

    bound: float
    linear_bound: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate = self.bound * jnp.tanh(gate / self.bound) * jax.nn.sigmoid(gate)
        return gate * (up if self.linear_bound is None else self.linear_bound * jnp.tanh(up / self.linear_bound))


@dataclass(frozen=True)
class ClampedSwish:
    """Activation (up + 1) * gate * sigmoid(alpha * gate), with gate bounded above by `limit` and up to [-limit, limit].
    Objects with equal numbers are equal, so that layers share a trace.
    """

    alpha: float
    limit: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True)
class SparseGate:
    """Activation activation(max(x - c, 0)), where c is the mean of a token's gates plus `deviations` times their
    standard deviation. Objects with equal fields are equal, so that layers share a trace.
    """

    deviations: float
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return activation(relu(x - (mean + deviations * standard deviation))) of gates x f32[T, F], or of a device's
        part of them; mean and deviation of each token are over all devices' parts.
        """
        count = x.shape[-1] * num_shards("ffn")
        mean = sum_parts(jnp.sum(x, axis=-1, keepdims=True), "ffn") / count
        variance = sum_parts(jnp.sum(jnp.square(x - mean), axis=-1, keepdims=True), "ffn") / count
        return self.activation(jax.nn.relu(x - (mean + jnp.sqrt(variance) * self.deviations)))


class MLP(nnx.Module):
    """Feed-forward network down(activation(up(x))).

    up, down: names of the modules within `source`. activation: computed in float32; a module if it has weights. bias:
    whether both projections have a bias.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        source: str,
        build: Build,
        activation: Callable[[jax.Array], jax.Array],
        bias: bool = False,
        up: str = "up_proj",
        down: str = "down_proj",
    ):
        sources = (Source(f"{source}.{up}", ffn_size),), (Source(f"{source}.{down}", hidden_size),)
        self.up = Linear(hidden_size, sources[0], axes=("embed", "ffn"), bias=bias, build=build)
        self.down = Linear(ffn_size, sources[1], axes=("ffn", "embed"), bias=bias, build=build)
        self.activation = activation

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return down(activation(up(x))) for x [T, D]: [T, D], with the activation in float32. Padding is computed like
        tokens.
        """
        with jax.named_scope("up"):
            inner = self.activation(self.up(x, rows, out_dtype=jnp.float32))
        with jax.named_scope("down"):
            return self.down(inner.astype(x.dtype), rows)


class GatedMLP(nnx.Module):
    """Gated feed-forward network down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202).

    Args:
      gate_up: checkpoint modules of gate and up, by default `gate_proj` and `up_proj` of `source`.
      down: checkpoint module of down, by default `down_proj`.
      bias: whether gate and up have a bias.
      down_bias: whether down has a bias; None for the value of `bias`.
      clamped: function of gate and up, such as OfClamped, that replaces activation(gate) * up; None for none.
      inner_norm: norm of the input of down, [T, F, 1] over all devices' parts of it; None for none.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        source: str,
        build: Build,
        bias: bool = False,
        down_bias: bool | None = None,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        gate_up: Sequence[Source] | None = None,
        down: Source | None = None,
        clamped: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        inner_norm: Callable[[jax.Array], jax.Array] | None = None,
    ):
        gate_up = gate_up or (Source(f"{source}.gate_proj", ffn_size), Source(f"{source}.up_proj", ffn_size))
        self.gate_up = Linear(hidden_size, gate_up, axes=("embed", "ffn"), bias=bias, build=build)
        down = down or Source(f"{source}.down_proj", hidden_size)
        down_bias = bias if down_bias is None else down_bias
        self.down = Linear(ffn_size, (down,), axes=("ffn", "embed"), bias=down_bias, build=build)
        self.activation, self.clamped = activation, clamped
        self.inner_norm = inner_norm

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return down(activation(gate(x)) * up(x)), or with `clamped` and `inner_norm` if given, for x [T, D]: [T, D].
        Padding is computed like tokens.
        """
        with jax.named_scope("gate_up"):
            inner = self._activated(self.gate_up(x, rows, out_dtype=self._out_dtype(x)), x.dtype)
        with jax.named_scope("down"):
            return self.down(inner, rows)

    def partial(self, x: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return this device's partial result f32[T, D] for x[T, D], whose tokens are already gathered.

        The sum over the devices that share the MLP is the result: the first of them adds the bias of down. adapters:
        those of x's rows, or None.
        """
        with jax.named_scope("gate_up"):
            bias, dtype = self.gate_up.bias, self._out_dtype(x)
            gate_up = self.gate_up.partial(x, adapters, out_dtype=dtype if bias is None else jnp.float32)
            inner = self._activated(gate_up if bias is None else (gate_up + bias[...]).astype(dtype), x.dtype)
        with jax.named_scope("down"):
            y, bias = self.down.partial(inner, adapters), self.down.bias
            return y if bias is None else y + jnp.where(shard_index("ffn") == 0, bias[...].astype(jnp.float32), 0.0)

    def _out_dtype(self, x: jax.Array) -> Any:
        """Return the dtype in which gate and up are projected: x's, but float32 if there are pools for adapters.

        With adapters a conditional adds to the product: XLA:TPU would round its result in a separate pass that writes a
        copy, so `_activated` rounds instead.
        """
        return x.dtype if self.gate_up.lora is None else jnp.float32

    def _activated(self, gate_up: jax.Array, dtype: Any) -> jax.Array:
        """Return activation(gate) * up, or clamped(gate, up), computed in float32 and converted to `dtype`, then the
        norm of it if there is one: [T, F].

        gate_up: gate and up side by side, [T, 2 * F].
        """
        # Split before widening: XLA:TPU writes an array that is widened before the split to memory in float32.
        gate, up = (_rounded(part, dtype) for part in jnp.split(gate_up, 2, axis=-1))
        inner = (self.activation(gate) * up if self.clamped is None else self.clamped(gate, up)).astype(dtype)
        return inner if self.inner_norm is None else self.inner_norm(inner[:, :, None])[:, :, 0]


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Return x, which has `dtype` or is float32, as float32 with its values rounded to the precision of `dtype`, except
    that subnormals of float16 are not rounded as such.
    """
    if x.dtype == dtype:
        return x.astype(jnp.float32)
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)

"""Compressed convolutional attention (Figliolia et al. 2025, arXiv:2510.04476): queries and keys pass two short causal
convolutions, and half of the values are those of the token before.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.compressed import QueryKeyConvolutions
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.state.conv import causal_conv
from jaxengine.sharding.collectives import shard_index

States = tuple[jax.Array, jax.Array, jax.Array]


class ConvolvedAttention(Attention):
    """Attention whose queries and keys are convolved, first each element and then each head as a whole. To them is
    added the mean of query and key before that, for keys the mean over their queries. Queries and keys then get a
    length of sqrt(H), and keys a learned factor for each head.

    Values are two projections side by side: the first half of the elements of all heads is of the token itself, the
    second of the token before. They are computed whole on each device.
    """

    def __init__(self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build):
        state, dim, projections = attention.state, attention.head_dim, f"{source}.qkv_proj"
        assert isinstance(state, QueryKeyConvolutions)
        sizes = attention.num_heads * dim, attention.num_kv_heads * dim
        qk = [Source(f"{projections}.{name}_proj", size) for name, size in zip("qk", sizes, strict=True)]
        super().__init__(attention, hidden_size, eps=0.0, source=source, build=build, qkv=qk)
        names = (f"{projections}.v_proj_{part}" for part in ("current", "delayed"))
        halves = [Source(name, sizes[1] // 2) for name in names]
        self.both = Linear(hidden_size, halves, axes=("embed", "latent"), build=build)
        biases = ParamDecl((None,), tuple(half.tensor("bias") for half in halves), init_std=0.02)
        self.value_bias = declare((sizes[1],), build.dtype, biases) if attention.bias else None

        def channels(name: str, *inner: int, std: float) -> Any:
            parts = tuple(part._replace(group=dim) for part in parts_of(f"{projections}.{name}", *sizes))
            decl = ParamDecl(("heads", *(None for _ in inner)), parts, init_std=std)
            return declare((sum(sizes), *inner), build.dtype, decl)

        first, second = state.kernels
        self.taps, self.bias = (
            channels("conv_qk_depthwise.weight", first, std=0.3),
            channels("conv_qk_depthwise.bias", std=0.02),
        )
        self.mixing, self.mixing_bias = (
            channels("conv_qk_grouped.weight", dim * second, std=0.05),
            channels("conv_qk_grouped.bias", std=0.02),
        )
        factors = ParamDecl(("heads",), (Source(f"{source}.qk_norm.temp", attention.num_kv_heads),))
        self.factors = declare((attention.num_kv_heads,), build.dtype, factors)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: jax.Array, kv: tuple[KVPages, States], pages: tuple[LayerPages, StateRows], step: StepInputs
    ) -> tuple[jax.Array, tuple[KVPages, States]]:
        """Map x[T, D] to ([T, D], the pool with this step's keys and values, and QueryKeyConvolutions.arrays after this
        step's tokens). Queries and keys are convolved and normed; half of a value is that of the token before; a bias,
        if there is one, is added after.
        """
        (pool, (raw, convolved, delayed)), (own_pages, rows) = kv, pages
        with jax.named_scope("qkv"):
            joined = self.qkv(x, step.rows)
            own, earlier = jnp.split(self.both(x, step.rows), 2, axis=1)
        with jax.named_scope("causal_conv"):
            (q, k), raw, convolved = self._convolved(joined, raw, convolved, rows)
            earlier, delayed = _lagged(earlier, 1, 2, delayed, rows)
        values = jnp.concatenate([own, earlier], axis=1).astype(jnp.float32)
        if self.value_bias is not None:
            values = values + self.value_bias[...].astype(jnp.float32)
        count = self.spec.num_kv_heads
        values = values.astype(x.dtype).reshape(len(x), -1, self.spec.head_dim)
        values = lax.dynamic_slice_in_dim(values, shard_index("heads") * count, count, axis=1)
        with jax.named_scope("qk_norm"):
            q, k = (self._normed(each, x.dtype) for each in (q, k))
            k = k * self.factors[...].astype(jnp.float32)[:, None]
        q, k = self.rotate(q.astype(x.dtype), k.astype(x.dtype), step)
        o, pool = self.attend(q, (k, values), pool, own_pages, step)
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(len(x), -1), step.rows), (pool, (raw, convolved, delayed))

    def _convolved(
        self, joined: jax.Array, raw: jax.Array, windows: jax.Array, rows: StateRows
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
        """Return queries f32[T, N, H] and keys f32[T, K, H] before their norm, and the windows of both convolutions
        after this step's tokens, for projections `joined` [T, (N + K) * H]. To their convolutions, by channel and then
        within heads, are added the means of each query and its key, for a key the mean of these.
        """
        heads, dim = self.spec.num_q_heads, self.spec.head_dim
        first, raw = causal_conv(joined, self.taps[...], raw, rows)
        first, count = first.astype(joined.dtype), self.mixing.shape[1] // dim
        lagged = [_lagged(first, lag, count, windows, rows) for lag in range(1, count)]
        taken = jnp.stack([first, *(each for each, _ in lagged)][::-1])  # [k, T, C]
        taken = taken.astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        taken = taken.astype(joined.dtype).reshape(count, len(joined), -1, dim)
        mixing = self.mixing[...].reshape(-1, dim, dim, count)
        mixed = jnp.einsum("ktni,noik->tno", taken, mixing, preferred_element_type=jnp.float32)
        mixed = mixed + self.mixing_bias[...].astype(jnp.float32).reshape(-1, dim)
        q, k = jnp.split(joined.astype(jnp.float32).reshape(len(joined), -1, dim), [heads], axis=1)
        mean = 0.5 * (q.reshape(len(q), k.shape[1], -1, dim) + k[:, :, None])
        mixed = mixed[:, :heads] + mean.reshape(q.shape), mixed[:, heads:] + jnp.mean(mean, axis=2)
        return mixed, raw, lagged[0][1] if lagged else windows

    def _normed(self, x: jax.Array, dtype: Any) -> jax.Array:
        """Return x f32[T, N, H] at a length of sqrt(H); vectors shorter than the epsilon of `dtype` become shorter."""
        length = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
        return x * (x.shape[-1] ** 0.5 / jnp.maximum(length, jnp.finfo(dtype).eps))


def _lagged(x: jax.Array, lag: int, kernel: int, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Return x [T, C] of the token `lag` before each, zeros where its sequence has none, and the windows [R, kernel -
    1, C] after this step's tokens.
    """
    taps = np.zeros((x.shape[1], kernel), np.float32)
    taps[:, kernel - 1 - lag] = 1
    found, windows = causal_conv(x, jnp.asarray(taps), windows, rows)
    return found.astype(x.dtype), windows

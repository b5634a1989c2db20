"""The layers every family is made of: embedding, linear, RMS norm, gated MLP. No attention, no cache.

Shape letters, here and in all model files: T tokens of the step, S sequences, R rows, N query heads, K key/value heads,
H head dimension, D hidden size, F feed-forward size, V vocabulary, L layers.

The residual stream is kept in the model's dtype. Every product accumulates in float32; norms and activations are
computed in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.declare import ParamDecl, declare

_ROW_PARTS = 4


def matmul(x: jax.Array, weight: jax.Array, *, contract: int = 0) -> jax.Array:
    """x [R, in] times weight, over the weight's axis `contract`: float32 [R, out]."""
    rows = x.shape[0]
    if rows == 1 and x.dtype == jnp.float32 and contract == 0 and weight.shape[0] % _ROW_PARTS == 0:
        # As a batch of partial sums XLA:CPU reads the weights faster: `jaxengine bench peers --workloads W1`.
        x, weight = x.reshape(_ROW_PARTS, 1, -1), weight.reshape(_ROW_PARTS, -1, weight.shape[1])
        return jnp.sum(lax.dot_general(x, weight, (((2,), (1,)), ((0,), (0,)))), axis=0)
    if rows == 1 and x.dtype == jnp.bfloat16:
        # XLA:CPU takes ten times as long for one bfloat16 row as for two; elsewhere rows are padded anyway.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return lax.dot_general(x, weight, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)[:rows]


class Embedding(nnx.Module):
    """Token table [V, D]: rows in, and logits out where the checkpoint ties both."""

    def __init__(self, vocab_size: int, hidden_size: int, *, source: str, dtype: Any):
        decl = ParamDecl(("vocab", "embed"), ((f"{source}.weight", vocab_size),), init_std=hidden_size**-0.5)
        self.weight = declare((vocab_size, hidden_size), dtype, decl)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """i32[T] -> [T, D]"""
        return self.weight[...][token_ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V]"""
        return matmul(hidden, self.weight[...], contract=1)


class Linear(nnx.Module):
    """y = x @ weight + bias, weight [in, out].

    `sources` maps the checkpoint modules that make up the output, in order, to their widths: q, k and v (or gate and
    up) are one product here. `axes` are the logical axes of (in, out).
    """

    def __init__(
        self,
        in_size: int,
        sources: Mapping[str, int],
        *,
        axes: tuple[str | None, str | None],
        bias: bool = False,
        dtype: Any,
    ):
        out_size = sum(sources.values())
        weights = tuple((f"{name}.weight", rows) for name, rows in sources.items())
        self.weight = declare(
            (in_size, out_size), dtype, ParamDecl(axes, weights, transposed=True, init_std=in_size**-0.5)
        )
        biases = tuple((f"{name}.bias", rows) for name, rows in sources.items())
        self.bias = declare((out_size,), dtype, ParamDecl((axes[1],), biases, init_std=0.02)) if bias else None

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[R, in] -> [R, out] in `out_dtype` (default: x's)."""
        y = matmul(x, self.weight[...])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(out_dtype or x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, source: str, axes: tuple[str | None] = (None,), dtype: Any):
        self.weight = declare((size,), dtype, ParamDecl(axes, ((f"{source}.weight", size),)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, ffn_size: int, *, source: str, bias: bool, dtype: Any):
        self.gate_up = Linear(
            hidden_size,
            {f"{source}.gate_proj": ffn_size, f"{source}.up_proj": ffn_size},
            axes=("embed", "ffn"),
            bias=bias,
            dtype=dtype,
        )
        self.down = Linear(
            ffn_size, {f"{source}.down_proj": hidden_size}, axes=("ffn", "embed"), bias=bias, dtype=dtype
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, D] -> [T, D]"""
        with jax.named_scope("gate_up"):
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
            inner = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        with jax.named_scope("down"):
            return self.down(inner.astype(x.dtype))

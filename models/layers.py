"""The layers every family is made of: embedding, linear, RMS norm, gated MLP. No attention, no cache.

Shape letters, here and in all model files: T tokens of the step, S sequences, R rows, N query heads, K key/value heads,
H head dimension, D hidden size, F feed-forward size, V vocabulary, L layers.

The residual stream is kept in the model's dtype. Every product accumulates in float32; norms and activations are
computed in float32.

A layer may be split over devices (sharding.collectives): its weights are then parts of what is declared. A product
gathers the tokens that its output's devices do not share and adds what its input's devices have summed in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.declare import ParamDecl, Source, declare
from sharding.collectives import exchange_tokens, gather_tokens, num_shards, reduce_tokens, shard_index
from sharding.layout import ONE_DEVICE, MeshLayout

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

    def __init__(self, vocab_size: int, hidden_size: int, *, source: str, dtype: Any, mesh: MeshLayout = ONE_DEVICE):
        rows = vocab_source(f"{source}.weight", vocab_size, mesh)
        decl = ParamDecl(("vocab", "embed"), (rows,), init_std=hidden_size**-0.5, row_major=True)
        self.weight = declare((rows.num_contributed, hidden_size), dtype, decl)

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """i32[T] -> [T, D]"""
        table = self.weight[...]
        if num_shards("vocab") == 1:
            return table[token_ids]
        rows = gather_tokens(token_ids, "vocab") - shard_index("vocab") * table.shape[0]
        # Adding zeros to the one device's row that holds the token is exact.
        return reduce_tokens(table.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False), "vocab")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V], see `own_logits`"""
        return matmul(gather_tokens(hidden, "vocab"), self.weight[...], contract=1)


def vocab_source(name: str, vocab_size: int, mesh: MeshLayout) -> Source:
    """The checkpoint's token table or head, with the rows that no token has."""
    return Source(name, vocab_size, padding=mesh.padded_vocab_size(vocab_size) - vocab_size)


def own_logits(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits as the vocabulary's devices computed them to those of the device's own rows, f32[R, V / n] where n devices
    share the rows; -inf where there is no token."""
    shards = num_shards("vocab")
    if shards == 1:
        return logits
    logits = exchange_tokens(logits, "vocab")
    token = shard_index("sampled_vocab") * logits.shape[1] + jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.where(token < vocab_size, logits, -jnp.inf)


class Linear(nnx.Module):
    """y = x @ weight + bias, weight [in, out].

    `sources` are the checkpoint modules that make up the output, in order, with their widths: q, k and v (or gate and
    up) are one product here. `axes` are the logical axes of (in, out).
    """

    def __init__(
        self,
        in_size: int,
        sources: Sequence[Source],
        *,
        axes: tuple[str, str],
        bias: bool = False,
        dtype: Any,
    ):
        out_size = sum(source.num_contributed for source in sources)
        weights = tuple(source._replace(name=f"{source.name}.weight") for source in sources)
        self.axes = axes
        self.weight = declare(
            (in_size, out_size), dtype, ParamDecl(axes, weights, transposed=True, init_std=in_size**-0.5)
        )
        biases = tuple(source._replace(name=f"{source.name}.bias") for source in sources)
        self.bias = declare((out_size,), dtype, ParamDecl((axes[1],), biases, init_std=0.02)) if bias else None

    def __call__(self, x: jax.Array, *, out_dtype: Any = None) -> jax.Array:
        """[R, in] -> [R, out] in `out_dtype` (default: x's)."""
        y = matmul(gather_tokens(x, self.axes[1]), self.weight[...])
        if num_shards(self.axes[0]) > 1:
            y = reduce_tokens(y.astype(x.dtype), self.axes[0])
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(out_dtype or x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, source: str, axes: tuple[str | None] = (None,), dtype: Any):
        self.weight = declare((size,), dtype, ParamDecl(axes, (Source(f"{source}.weight", size),)))
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
            (Source(f"{source}.gate_proj", ffn_size), Source(f"{source}.up_proj", ffn_size)),
            axes=("embed", "ffn"),
            bias=bias,
            dtype=dtype,
        )
        down = (Source(f"{source}.down_proj", hidden_size),)
        self.down = Linear(ffn_size, down, axes=("ffn", "embed"), bias=bias, dtype=dtype)

    def __call__(self, x: jax.Array, is_token: jax.Array | None = None) -> jax.Array:
        """[T, D] -> [T, D]; padding (is_token False) costs and gets what tokens do."""
        with jax.named_scope("gate_up"):
            gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
            inner = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
        with jax.named_scope("down"):
            return self.down(inner.astype(x.dtype))

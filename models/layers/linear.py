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

from models.weights.declare import ParamDecl, Source, declare
from sharding.collectives import gather_tokens, num_shards, reduce_tokens

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

"""Head of a masked language model, and the sparse vectors that SPLADE pooling makes of it.

Logits of a whole step, [T, V], may be gigabytes: they are computed a block of tokens at a time, and a prompt's vector
takes in each block's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import ParamDecl, Source, declare

# Tokens whose logits are computed at a time.
_BLOCK = 64


class MaskedScores(nnx.Module):
    """Logits of a masked language model: norm(activation(dense(x))) @ table.T + bias, [T, D] -> f32[T, V].

    size: elements of the projection, as many as the table's rows have. sources: checkpoint module of the projection,
    and the tensor of the logits' bias, "" for none. norm: applied after the activation. dense_bias: whether the
    projection has a bias.
    """

    def __init__(
        self,
        config: ModelConfig,
        sources: tuple[str, str],
        *,
        size: int,
        norm: nnx.Module,
        activation: Callable[[jax.Array], jax.Array],
        build: Build,
        dense_bias: bool = True,
    ):
        assert config.pooler is not None and config.pooler.splade is not None
        own = replace(build, dtype=jnp.float32)
        self.num_tokens = config.pooler.splade.num_tokens
        axes, dense = ("embed", "labels"), (Source(sources[0], size),)
        self.dense = Linear(config.hidden_size, dense, axes=axes, bias=dense_bias, build=own)
        name, _, tensor = sources[1].rpartition(".")
        bias = ParamDecl((None,), (Source(name, self.num_tokens).tensor(tensor),), init_std=0.02)
        self.bias = declare((self.num_tokens,), jnp.float32, bias) if name else None
        self.norm, self.activation, self.dtype = norm, activation, build.dtype

    def __call__(self, hidden: jax.Array, table: Any) -> jax.Array:
        inner = self.norm(self.activation(self.dense(hidden, out_dtype=jnp.float32))).astype(self.dtype)
        logits = table.logits(inner)[:, : self.num_tokens].astype(jnp.float32)
        return logits if self.bias is None else logits + self.bias[...]


def sparse_vectors(model: Any, hidden: jax.Array, row: jax.Array, num_rows: int) -> jax.Array:
    """Return the SPLADE vectors f32[num_rows, V] of prompts that are whole in a step: the maximum or, with the strategy
    "sum", the sum over a prompt's tokens of log(1 + max(logit, 0)). The logarithm is applied `num_logs` times.

    model: a jaxengine.models.layers.encoder.Encoder whose pooler has `splade`. hidden: [T, D]. row: i32[T], the prompt
    of each token; tokens with a row of at least `num_rows` are padding.
    """
    splade = model.config.pooler.splade
    sums = splade.strategy == "sum"

    def logs(scores: jax.Array) -> jax.Array:
        scores = jax.nn.relu(scores)
        for _ in range(splade.num_logs):
            scores = jnp.log1p(scores)
        return scores

    def add(vectors: jax.Array, block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        with jax.named_scope("logits"):
            scores = model.masked(block[0], model.table)
        at = vectors.at[block[1]]
        return (at.add(logs(scores), mode="drop") if sums else at.max(scores, mode="drop")), None

    size = min(_BLOCK, len(row))
    padded = -len(row) % size
    # Hidden states of padding are arbitrary, and are added to no row.
    states = jnp.pad(hidden, ((0, padded), (0, 0))).reshape(-1, size, hidden.shape[1])
    rows = jnp.pad(row, (0, padded), constant_values=num_rows).reshape(-1, size)
    vectors, _ = lax.scan(add, jnp.zeros((num_rows, splade.num_tokens), jnp.float32), (states, rows))
    return vectors if sums else logs(vectors)  # both are 0 below 0, and grow with a score

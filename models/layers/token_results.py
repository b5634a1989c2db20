"""Rows that a pooling model gives for each token of a prompt: embeddings (ColBERT), labels, rewards, sparse weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.pooler import TokenHead
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import Identity
from jaxengine.models.layers.classify import pooled_result
from jaxengine.models.params.declare import Source
from jaxengine.models.quantization.registry import PLAIN


class ReluLinear(nnx.Module):
    """Projection and its ReLU, in float32: [T, D] -> f32[T, width]. source: checkpoint module. bias: whether it has a
    bias.
    """

    def __init__(self, size: int, width: int, source: str, bias: bool, build: Build):
        self.product = Linear(size, (Source(source, width),), axes=("embed", "labels"), bias=bias, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(self.product(x, out_dtype=jnp.float32))


class TokenHeads(nnx.Module):
    """Projections of hidden states, in float32: [T, D] -> f32[T, N], with the outputs of all heads side by side.

    usual: checkpoint module of a head that names none.
    """

    def __init__(self, size: int, heads: Sequence[TokenHead], usual: str, build: Build):
        # In float32 whatever the model's dtype, like the scores of prompts.
        build = replace(build, dtype=jnp.float32, scheme=PLAIN)
        self.inner = nnx.List(
            Identity()
            if each.inner is None
            else ReluLinear(size, each.inner_width or size, each.inner, each.bias, build)
            for each in heads
        )
        self.products = nnx.List(
            Linear(
                each.inner_width or size,
                (Source(each.source or usual, each.width),),
                axes=("embed", "labels"),
                bias=each.bias,
                build=build,
            )
            for each in heads
        )

    def __call__(self, hidden: jax.Array) -> jax.Array:
        both = zip(self.inner, self.products, strict=True)
        parts = [product(inner(hidden), out_dtype=jnp.float32) for inner, product in both]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def token_results(model: Any, hidden: jax.Array) -> jax.Array:
    """Return the rows f32[T, N] of tokens of a pooling model for hidden states [T, D]: the output of the checkpoint's
    heads for tokens if it has any, otherwise `pooled_result` of each token's hidden state.

    model: a jaxengine.models.layers.decoder.Decoder whose config has a pooler. Nothing is normalised here.
    """
    hidden = hidden.astype(jnp.float32)
    return model.token_heads(hidden) if model.config.pooler.token_heads else pooled_result(model, hidden)

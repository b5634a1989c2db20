"""Queries that read windows of hidden states (Q-Former, Li et al. 2023, arXiv:2301.12597).

Shape letters: U windows of W states, Q queries, N heads, H elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.layers import TowerMLP, tower_axis
from jaxengine.models.vision.base.vit import linear


@dataclass(frozen=True)
class QueryConfig:
    """Sizes of the Q-Former: elements, layers, heads, inner elements of MLPs, and the name of their activation.

    Attributes:
      cross_every: the first of each group of this many layers attends to a window.
      window: W.
      num_queries: Q.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    norm_eps: float
    cross_every: int
    window: int
    num_queries: int


def read_query_config(
    own: ConfigFields, hidden_size: int, num_heads: int, window: int, num_queries: int
) -> QueryConfig:
    """Return the QueryConfig of a Q-Former from its own configuration, `own`, with transformers' names:
    `num_hidden_layers`, `intermediate_size`, `cross_attention_frequency`, `layer_norm_eps` and `hidden_act`. The other
    arguments are fields of QueryConfig, which families check or read elsewhere. Raises ModelConfigError for wrong
    fields.
    """
    return QueryConfig(
        hidden_size=hidden_size,
        num_layers=own.integer("num_hidden_layers"),
        num_heads=num_heads,
        intermediate_size=own.integer("intermediate_size"),
        activation=read_activation(own, "hidden_act"),
        norm_eps=own.number("layer_norm_eps"),
        cross_every=own.integer("cross_attention_frequency"),
        window=window,
        num_queries=num_queries,
    )


class QueryAttention(nnx.Module):
    """Attention norm(x + out(softmax(q k^T / sqrt(H)) v)) of queries to each other or to a window.

    source: prefix of its modules. other_size: elements of the states that are attended to.
    """

    def __init__(self, config: QueryConfig, other_size: int, source: str, build: Build):
        size = config.hidden_size
        self.head_dim, heads = size // config.num_heads, tower_axis("heads", build)

        def project(in_size: int, *names: str) -> Linear:
            parts = tuple(Source(f"{source}.attention.{name}", size, group=self.head_dim) for name in names)
            return Linear(in_size, parts, axes=("embed", heads), bias=True, build=build)

        self.q, self.kv = project(size, "query"), project(other_size, "key", "value")
        self.out = linear(size, f"{source}.output.dense", size, ("heads", "embed"), build)
        self.norm = LayerNorm(size, config.norm_eps, source=f"{source}.output.LayerNorm", build=build)

    def __call__(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """Return norm(x + out(softmax(q k^T / sqrt(H)) v)) for x [U, Q, D], in its shape; keys and values are computed
        from other [U, W, E], the states that each of the U attends to.
        """
        q = self.q(x.reshape(-1, x.shape[2])).reshape(*x.shape[:2], -1, self.head_dim)
        joined = self.kv(other.reshape(-1, other.shape[2])).reshape(*other.shape[:2], -1, self.head_dim)
        k, v = jnp.split(joined, 2, axis=2)
        scores = jnp.einsum("uqnh,uwnh->unqw", q, k, preferred_element_type=jnp.float32) * self.head_dim**-0.5
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        o = jnp.einsum("unqw,uwnh->uqnh", weights, v, preferred_element_type=jnp.float32).astype(x.dtype)
        return self.norm(x + self.out(o.reshape(x.shape[0] * x.shape[1], -1)).reshape(x.shape))


class QueryLayer(nnx.Module):
    """Layer of queries: attention to each other, attention to the window in every `cross_every`-th layer from the first
    on, then norm(x + mlp(x)). source: prefix of the Q-Former's modules.
    """

    def __init__(self, config: QueryConfig, number: int, other_size: int, source: str, build: Build):
        size, source = config.hidden_size, f"{source}.encoder.layer.{number}"
        self.attention = QueryAttention(config, size, f"{source}.attention", build)
        crosses = number % config.cross_every == 0
        self.cross = QueryAttention(config, other_size, f"{source}.crossattention", build) if crosses else None
        names = {"up": (f"{source}.intermediate_query.dense",), "down": f"{source}.output_query.dense"}
        activation = ACTIVATIONS[config.activation]
        self.mlp = TowerMLP(size, config.intermediate_size, **names, activation=activation, build=build)
        self.norm = LayerNorm(size, config.norm_eps, source=f"{source}.output_query.LayerNorm", build=build)

    def __call__(self, x: jax.Array, window: jax.Array) -> jax.Array:
        """Return queries x [U, Q, D] after attention to each other, then, in a layer with cross-attention, to their
        window [U, W, E], and after norm(x + mlp(x)), in their shape.
        """
        x = self.attention(x, x)
        if self.cross is not None:
            x = self.cross(x, window)
        return self.norm(x + self.mlp(x.reshape(-1, x.shape[2])).reshape(x.shape))


class QueryFormer(nnx.Module):
    """Q-Former: a norm of the queries, and QueryLayers. other_size: elements of the states that are read. source:
    prefix of its modules.
    """

    def __init__(self, config: QueryConfig, other_size: int, source: str, build: Build):
        self.norm = LayerNorm(config.hidden_size, config.norm_eps, source=f"{source}.layernorm", build=build)
        self.layers = nnx.List(
            [QueryLayer(config, number, other_size, source, build) for number in range(config.num_layers)]
        )

    def __call__(self, queries: jax.Array, windows: jax.Array) -> jax.Array:
        """Return the queries [U, Q, D], normed, after all layers have let them attend to their windows [U, W, E], in
        their shape.
        """
        x = self.norm(queries)
        for layer in self.layers:
            x = layer(x, windows)
        return x

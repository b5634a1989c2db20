"""Disentangled attention (He et al. 2020, arXiv:2006.03654): logits add products of queries with keys of distances, and
of keys with queries of distances.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.encoder import C2P, P2C, Disentangled
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.attention.distance_bias import DistanceAttention
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import Identity, LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare


def log_buckets(num_buckets: int, farthest: int, reach: int) -> np.ndarray:
    """Return the bucket i32[2 * reach + 1] of each distance from -reach to reach: the position of a query minus that of
    its key.

    With num_buckets of 0, each distance has a bucket, from 0 to 2 * farthest - 1; those beyond share the outermost.
    Otherwise buckets are 0 to 2 * num_buckets - 1. Near distances, of magnitude up to num_buckets // 2, have a bucket
    each; farther ones share buckets of increasingly wide ranges. Distances of magnitude `farthest` and more have the
    last bucket of their sign.
    """
    distance, half = np.arange(-reach, reach + 1), num_buckets // 2
    if not num_buckets:
        return np.clip(distance + farthest, 0, 2 * farthest - 1).astype(np.int32)
    far = np.maximum(np.abs(distance), half).astype(np.float32) / np.float32(half)
    widest = np.log(np.float32((farthest - 1) / half))
    ranges = np.ceil(np.log(far) / widest * np.float32(half - 1)) + half
    own = np.where(np.abs(distance) <= half, distance, ranges * np.sign(distance)).astype(np.int64)
    return np.clip(own + num_buckets, 0, 2 * num_buckets - 1).astype(np.int32)


class DistanceEmbeddings(nnx.Module):
    """Embeddings of ranges of distances, a table [2 * N, D] followed by a layer norm, unless `normed` is False. All
    layers share it. N is `buckets` or, if that is 0, `farthest`.
    """

    def __init__(self, ranges: Disentangled, size: int, eps: float, *, source: str, build: Build):
        count = 2 * (ranges.buckets or ranges.farthest)
        rows = Source(f"{source}.rel_embeddings", count).tensor("weight")
        self.table = declare((count, size), build.dtype, ParamDecl((None, None), (rows,)))
        norm = LayerNorm(size, eps, source=f"{source}.LayerNorm", build=build) if ranges.normed else Identity()
        self.norm = norm

    def __call__(self, first: int, end: int) -> jax.Array:
        """Return the embeddings of the ranges `first` to end - 1, [end - first, D]."""
        return self.norm(self.table[...][first:end])


class DisentangledAttention(DistanceAttention):
    """Attention of whole prompts in which logits have parts by distance.

    distances: the embeddings that all layers share. ranges: which distances have an embedding of their own, and which
    parts there are. longest: the most tokens of a prompt. own: checkpoint modules of the projections of keys and of
    queries of distances, and whether each has a bias; not used if `ranges` shares those of tokens.
    """

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        distances: DistanceEmbeddings,
        ranges: Disentangled,
        longest: int,
        own: tuple[tuple[str, bool], tuple[str, bool]],
        build: Build,
        **names: Any,
    ):
        # An adapter would change the projections of distances, which all requests of a step share.
        build = replace(build, lora=None)
        super().__init__(attention, hidden_size, build=build, **names)
        self.distances, self.ranges, self.longest = distances, ranges, longest
        width = attention.num_heads * attention.head_dim

        def project(kind: str, source: str, bias: bool) -> Linear | None:
            if ranges.shared or kind not in ranges.kinds:
                return None
            return Linear(hidden_size, (Source(source, width),), axes=("embed", "heads"), bias=bias, build=build)

        self.far_keys, self.far_queries = (project(kind, *each) for kind, each in zip((C2P, P2C), own, strict=True))

    def added(self, num_tokens: int) -> dict[str, Any]:
        """Return {"relative": (keys, queries)} of the distances in a step of `num_tokens` tokens, an argument of
        whole_prompt_attention.

        Both are [2 * n - 1, N, H], for the position of a key minus that of its query in ascending order; n is
        num_tokens, or `longest` if that is less. Those of a part that there is not are 0.
        """
        settings, reach = self.ranges, min(num_tokens, self.longest) - 1
        ranges = log_buckets(settings.buckets, settings.farthest, reach)[::-1]
        first, end = int(ranges.min()), int(ranges.max()) + 1
        x = self.distances(first, end)
        if settings.shared:
            queries, keys, *_ = self._heads(_projected(self.qkv, x))
        else:
            queries, keys = (self._own(each, x) for each in (self.far_queries, self.far_keys))
        keys = keys if C2P in settings.kinds else jnp.zeros_like(keys)
        queries = queries if P2C in settings.kinds else jnp.zeros_like(queries)
        return {"relative": (keys[ranges - first], queries[ranges - first])}

    def _own(self, product: Linear | None, x: jax.Array) -> jax.Array:
        """Return the heads [W, N, H] that `product` makes of embeddings x [W, D]; zeros if it is None."""
        shape = len(x), self.spec.num_q_heads, self.spec.head_dim
        return jnp.zeros(shape, x.dtype) if product is None else _projected(product, x).reshape(shape)


class HeadwiseAttention(Attention):
    """Attention of DeBERTa v1, whose projection of tokens has biases of queries and of values in tensors of their own,
    `q_bias` and `v_bias` of the module `biases`, and none of keys.
    """

    def __init__(self, attention: LayerAttention, hidden_size: int, *, biases: str, **names: Any):
        super().__init__(attention, hidden_size, **names)
        width = attention.num_heads * attention.head_dim

        def bias(name: str) -> nnx.Param:
            return declare((width,), jnp.float32, ParamDecl(("heads",), (Source(biases, width).tensor(name),)))

        self.q_bias, self.v_bias = bias("q_bias"), bias("v_bias")

    def _heads(self, joined: jax.Array) -> list[jax.Array]:
        q, k, v, gate = super()._heads(joined)
        q, v = (_with_bias(x, bias[...]) for x, bias in ((q, self.q_bias), (v, self.v_bias)))
        return [q, k, v, gate]


class HeadwiseDisentangledAttention(HeadwiseAttention, DisentangledAttention):
    """DisentangledAttention with the projection and the biases of HeadwiseAttention."""


def _with_bias(heads: jax.Array, bias: jax.Array) -> jax.Array:
    """Return heads [T, N, H] plus bias f32[N * H], in the heads' dtype."""
    return (heads.astype(jnp.float32) + bias.reshape(heads.shape[1:])).astype(heads.dtype)


def _projected(product: Linear, x: jax.Array) -> jax.Array:
    """Return the product of x [W, D], whose rows are the same on every device, so that none are gathered; [W, E] in
    x's dtype, the device's part of E.
    """
    y = product.partial(x, None)
    return (y if product.bias is None else y + product.bias[...].astype(jnp.float32)).astype(x.dtype)

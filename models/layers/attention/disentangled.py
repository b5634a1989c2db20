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
from jaxengine.models.layers.attention.distance_bias import DistanceAttention
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare


def log_buckets(num_buckets: int, farthest: int, reach: int) -> np.ndarray:
    """Return the bucket i32[2 * reach + 1], from 0 to 2 * num_buckets - 1, of each distance from -reach to reach: the
    position of a query minus that of its key.

    Near distances, of magnitude up to num_buckets // 2, have a bucket each; farther ones share buckets of increasingly
    wide ranges. Distances of magnitude `farthest` and more have the last bucket of their sign.
    """
    distance, half = np.arange(-reach, reach + 1), num_buckets // 2
    far = np.maximum(np.abs(distance), half).astype(np.float32) / np.float32(half)
    widest = np.log(np.float32((farthest - 1) / half))
    ranges = np.ceil(np.log(far) / widest * np.float32(half - 1)) + half
    own = np.where(np.abs(distance) <= half, distance, ranges * np.sign(distance)).astype(np.int64)
    return np.clip(own + num_buckets, 0, 2 * num_buckets - 1).astype(np.int32)


class DistanceEmbeddings(nnx.Module):
    """Embeddings of ranges of distances, a table [2 * num_buckets, D] followed by a layer norm. All layers share it."""

    def __init__(self, num_buckets: int, size: int, eps: float, *, source: str, build: Build):
        rows = Source(f"{source}.rel_embeddings", 2 * num_buckets).tensor("weight")
        self.table = declare((2 * num_buckets, size), build.dtype, ParamDecl((None, None), (rows,)))
        self.norm = LayerNorm(size, eps, source=f"{source}.LayerNorm", build=build)

    def __call__(self, first: int, end: int) -> jax.Array:
        """Return the normed embeddings of the ranges `first` to end - 1, [end - first, D]."""
        return self.norm(self.table[...][first:end])


class DisentangledAttention(DistanceAttention):
    """Attention of whole prompts in which keys and queries of distances are computed with the projections of tokens.

    distances: the embeddings that all layers share. buckets, farthest: arguments of log_buckets. longest: the most
    tokens of a prompt.
    """

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        distances: DistanceEmbeddings,
        buckets: int,
        farthest: int,
        longest: int,
        build: Build,
        **names: Any,
    ):
        # An adapter would change the projections of distances, which all requests of a step share.
        super().__init__(attention, hidden_size, build=replace(build, lora=None), **names)
        self.distances, self.buckets, self.farthest, self.longest = distances, buckets, farthest, longest

    def added(self, num_tokens: int) -> dict[str, Any]:
        """Return {"relative": (keys, queries)} of the distances in a step of `num_tokens` tokens, an argument of
        whole_prompt_attention.

        Both are [2 * n - 1, N, H], for the position of a key minus that of its query in ascending order; n is
        num_tokens, or `longest` if that is less.
        """
        ranges = log_buckets(self.buckets, self.farthest, min(num_tokens, self.longest) - 1)[::-1]
        first, end = int(ranges.min()), int(ranges.max()) + 1
        x = self.distances(first, end)
        assert self.qkv.bias is not None
        # These rows are the same on every device, so that none are gathered.
        joined = self.qkv.partial(x, None) + self.qkv.bias[...].astype(jnp.float32)
        queries, keys, *_ = self._heads(joined.astype(x.dtype))
        return {"relative": (keys[ranges - first], queries[ranges - first])}

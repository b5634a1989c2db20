"""Attention of encoders whose logits depend on the distance of key and query, as by a learned bias (T5, MPNet) or by a
slope (ALiBi)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs, own_slopes
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.pallas_kernels.attention.whole_prompts import (
    has_whole_prompts,
    whole_prompt_attention,
    whole_prompt_schedule,
)
from jaxengine.pallas_kernels.kv.pages import KVPages

# The kernel with parts by distance: plain XLA, which any device runs.
_KERNEL = "cpu"


def distance_buckets(num_buckets: int, farthest: int) -> np.ndarray:
    """Return the bucket i32[2 * farthest + 1], from 0 to num_buckets - 1, of each distance from -farthest to farthest:
    the position of a key minus that of its query.

    Keys after the query have the second half of the buckets, all others the first half. Within a half each distance
    below num_buckets // 4 has its own bucket, and farther ones share buckets of increasingly wide ranges (Raffel et al.
    2020, arXiv:1910.10683). num_buckets: at least 4. farthest: more than num_buckets // 4.
    """
    distance = np.arange(-farthest, farthest + 1)
    half, near = num_buckets // 2, num_buckets // 4
    far = np.maximum(np.abs(distance), 1).astype(np.float32) / np.float32(near)
    ranges = np.log(far) / np.float32(math.log(farthest / near)) * np.float32(half - near)
    own = np.where(np.abs(distance) < near, np.abs(distance), np.minimum(near + ranges.astype(np.int64), half - 1))
    return (own + half * (distance > 0)).astype(np.int32)


def distance_table(source: str, num_buckets: int, num_heads: int) -> nnx.Param:
    """Return a new parameter f32[num_buckets, N] for the biases that the checkpoint has as `weight` of module
    `source`.
    """
    table = Source(source, num_buckets).tensor("weight")
    return declare((num_buckets, num_heads), jnp.float32, ParamDecl((None, "heads"), (table,)))


class DistanceAttention(Attention):
    """Attention of whole prompts whose logits have terms that depend on distances. It writes no keys or values to the
    pool.
    """

    def added(self, num_tokens: int) -> dict[str, Any]:
        """Return the keyword argument of whole_prompt_attention, `biases` or `relative`, for a step of `num_tokens`
        tokens. Subclasses must override it: here it raises NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no parts by distance")

    def attend(
        self,
        q: jax.Array,
        own: tuple[jax.Array, jax.Array] | None,
        kv: KVPages,
        pages: LayerPages,
        step: StepInputs,
    ) -> tuple[jax.Array, KVPages]:
        """Return ([T, N, Hv], `kv` unchanged) for queries q [T, N, H] of whole prompts and their keys and values `own`,
        which must be given, with the terms of `added` in the logits. Nothing is read from pages.
        """
        assert own is not None
        schedule, cu_q_lens, num_seqs = step.schedule, pages.ragged.cu_q_lens, pages.ragged.num_seqs
        if not has_whole_prompts(self.spec, kv.platform):
            schedule = whole_prompt_schedule(cu_q_lens, num_seqs, num_tokens=len(q), platform=_KERNEL)
        with jax.named_scope("distances"):
            options: dict[str, Any] = {"spec": self.spec, "platform": _KERNEL, **self.added(len(q))}
        with jax.named_scope("whole_prompt_attention"):
            return whole_prompt_attention(q, *own, schedule, **options), kv


class SlopedAttention(DistanceAttention):
    """Attention of whole prompts in which a logit is reduced by the head's slope times the distance of key and query
    (ALiBi).
    """

    def added(self, num_tokens: int) -> dict[str, Any]:
        """Return {"biases": f32[N, 2 * num_tokens - 1]}: minus the head's slope times the magnitude of each distance
        from 1 - num_tokens to num_tokens - 1.
        """
        assert self.slopes is not None
        distance = jnp.abs(jnp.arange(-num_tokens + 1, num_tokens, dtype=jnp.float32))
        return {"biases": -own_slopes(self.slopes, self.spec.num_q_heads)[:, None] * distance}


class BiasedAttention(DistanceAttention):
    """Attention of whole prompts with learned biases by distance.

    table: result of `distance_table`, which layers may share. farthest: distances of at least this many tokens have the
    last bucket.
    """

    def __init__(
        self, attention: LayerAttention, hidden_size: int, *, table: nnx.Param, farthest: int = 128, **names: Any
    ):
        super().__init__(attention, hidden_size, **names)
        self.table, self.farthest = table, farthest

    def added(self, num_tokens: int) -> dict[str, Any]:
        """Return {"biases": f32[N, 2 * farthest + 1]}: the table's bias of each distance from -farthest to farthest."""
        table = self.table[...]
        return {"biases": table[distance_buckets(table.shape[0], self.farthest)].T}

"""What a step makes of its hidden states for each prompt, where a prompt may take several steps.

Traced: part of the forward pass of a pooling model. What is told of a prompt is made of its pooled state by the head
POOL (jaxengine.runner.heads). Knows arrays and nothing of requests.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.config.pooler import CLS, LAST, MEAN
from models.forward_batch import ForwardBatch


def pool_rows(
    pooling_type: str, kept: jax.Array | None, hidden: jax.Array, batch: ForwardBatch, slot: jax.Array, start: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """The pooled state of each row's prompt as far as it is computed: (what is kept of it, f32[S, D]).

    Args:
      pooling_type: LAST, MEAN or CLS.
      kept: f32[R, D] of the slots, None with LAST: sums of the prompts' states so far, or the first ones.
      hidden: [T, D] after the final norm.
      slot, start: i32[S], the rows' slots, R in padding, and how many of their tokens were computed before. With MEAN
        and CLS a prompt begins at 0, never behind a cached prefix.
    """
    if pooling_type == LAST:
        return None, hidden[batch.logits_indices].astype(jnp.float32)
    assert kept is not None
    cu_q_lens, kv_lens = batch.ragged[0].cu_q_lens, batch.ragged[0].kv_lens
    num_seqs, begins = slot.shape[0], start[:, None] == 0
    before = kept[jnp.minimum(slot, kept.shape[0] - 1)]
    if pooling_type == CLS:
        first = hidden[jnp.minimum(cu_q_lens[:-1], hidden.shape[0] - 1)].astype(jnp.float32)
        pooled = now = jnp.where(begins, first, before)
    else:
        assert pooling_type == MEAN
        token = jnp.arange(hidden.shape[0], dtype=jnp.int32)
        # Padding, which nobody has computed, goes to a row of its own that is left out: it may be anything.
        row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.where(token < cu_q_lens[-1], row, num_seqs)
        sums = jax.ops.segment_sum(hidden.astype(jnp.float32), row, num_seqs + 1, indices_are_sorted=True)[:num_seqs]
        now = jnp.where(begins, sums, before + sums)
        pooled = now / jnp.maximum(kv_lens, 1)[:, None].astype(jnp.float32)
    return kept.at[slot].set(now, mode="drop"), pooled

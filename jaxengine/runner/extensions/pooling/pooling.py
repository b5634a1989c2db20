"""Pooling: reduces the hidden states of each prompt, possibly over several steps, to one state and a vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.config.pooler import CLS, LAST, MAX, MEAN, MEAN_SQRT_LEN, POOLED, WEIGHTED_MEAN
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.classify import pooled_result
from jaxengine.runner.base.extension import DeviceExtension, Epilogue, EpilogueSpec, HostExtension, Kept
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.runner.programs.step import pad_rows
from jaxengine.sharding.collectives import stack_ranks

NAME, POOL = "pooling", "pool"


class PoolOutput(NamedTuple):
    """Output of the pooling epilogue; only rows whose prompt ends in the step are meaningful.

    Attributes:
      token_ids: i32[replicas, S], POOLED, or -1 for a row with numbers that are not finite.
      vectors: f32[replicas, S, N], the embedding or label scores.
    """

    token_ids: jax.Array
    vectors: jax.Array


class PoolingExtension(DeviceExtension):
    """Device extension of pooling in the last stage of a pooling model.

    Its section of SlotState is f32[R, D], a sum, maximum or first state of each slot's prompt that stays between steps
    if pooling needs every token (all types but LAST). Forward passes leave the rows' pooled states, f32[S, D].
    """

    name = NAME

    def slots(self) -> Any:
        """Return f32[R, D] as a Kept if pooling needs every token and this is the last stage; else None."""
        pooler, is_last = self.shape.model.config.pooler, self.shape.model.stage.is_last
        if not (is_last and pooler is not None and pooler.reads_all):
            return None
        return Kept((self.shape.num_slots, self.shape.model.config.hidden_size), jnp.float32)

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """The pooling epilogue, under POOL, which ends each step in place of a sampler."""
        own = Epilogue(
            make_pool,
            arguments=("params", NAME),
            changes=(),
            output=PoolOutput,
            size_of=lambda buckets, bucket: buckets.sample_size(bucket),
            ends=True,
        )
        return {POOL: own}

    def left(self, num_tokens: int, num_rows: int) -> Any:
        return self.shape.rows(num_rows, np.float32, self.shape.model.config.hidden_size)

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the pooled states f32[S, D] left under NAME, and with the section updated; unchanged in
        a stage that is not the last.
        """
        pooler, model = self.shape.model.config.pooler, self.shape.model
        if not model.stage.is_last:
            return step
        assert pooler is not None and step.hidden is not None
        kept, rows = step.slots.sections.get(NAME), step.rows
        with jax.named_scope("pool"):
            kept, pooled = pool_rows(pooler.pooling_type, kept, step.hidden, step.batch, rows.slot, rows.start)
        step = step if kept is None else step.with_state(NAME, kept)
        return step.leaving(NAME, pad_rows(step, pooled))

    def on_host(self, runner: Any) -> HostExtension:
        return Pooler(runner)


class Pooler(HostExtension):
    """Host extension that runs the pooling epilogue and reads its vectors."""

    def vectors(self, pending: PendingStep) -> np.ndarray:
        """Return the vectors f32[replicas, rows, N] of the prompts that end in a step; waits for the step."""
        vectors = pending.result("vectors")
        assert vectors is not None
        return vectors

    def pool(self, pending: PendingStep) -> None:
        """Dispatch the pooling epilogue of a step, in place of a sampler; the step then has `sampled` and no
        `forwarded`.
        """
        self.runner.sample(pending)


def make_pool(spec: EpilogueSpec) -> Callable:
    """Return the epilogue function (params: list of arrays, pooled states f32[S, D]) -> (PoolOutput,), which computes
    vectors of all replicas. A row gets token POOLED, or -1 if one of its numbers is not finite.
    """

    def pool_prompts(params: list[jax.Array], hidden: jax.Array):
        model = nnx.merge(spec.graph, jax.tree.unflatten(spec.params_tree, params))
        with jax.named_scope("pool"):
            vectors = pooled_result(model, hidden)
        with jax.named_scope("results"):
            token_ids = jnp.where(jnp.all(jnp.isfinite(vectors), axis=1), jnp.int32(POOLED), jnp.int32(-1))
            return (PoolOutput(stack_ranks(token_ids), stack_ranks(vectors)),)

    return pool_prompts


def pool_rows(
    pooling_type: str, kept: jax.Array | None, hidden: jax.Array, batch: ForwardBatch, slot: jax.Array, start: jax.Array
) -> tuple[jax.Array | None, jax.Array]:
    """Pool each row's prompt as far as it has been computed; return (`kept` with the rows' new sums, maxima or first
    states, the pooled states f32[S, D]).

    Args:
      batch: batch of the step, whose cu_q_lens delimit each row's tokens.
      pooling_type: one of POOLING_TYPES, as Pooler defines them.
      kept: f32[R, D] per slot, of the prompt's states so far: the first (CLS), the maximum (MAX), or the sum, which is
        weighted with WEIGHTED_MEAN; None with LAST.
      hidden: [T, D] after the final norm.
      slot, start: i32[S], the rows' slots (R in padding), and how many of their tokens were computed before. Except
        with LAST, a prompt is computed from position 0, never after a cached prefix.
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
        return kept.at[slot].set(now, mode="drop"), pooled
    states, token = hidden.astype(jnp.float32), jnp.arange(hidden.shape[0], dtype=jnp.int32)
    # Padding, which may hold NaN, goes to a row of its own that is left out.
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.where(token < cu_q_lens[-1], row, num_seqs)
    if pooling_type == MAX:
        maxima = jax.ops.segment_max(states, row, num_seqs + 1, indices_are_sorted=True)[:num_seqs]
        pooled = now = jnp.where(begins, maxima, jnp.maximum(before, maxima))
        return kept.at[slot].set(now, mode="drop"), pooled
    if pooling_type == WEIGHTED_MEAN:
        first_token = jnp.append(cu_q_lens[:-1] - start, 0)[row]
        states = states * (token - first_token + 1)[:, None].astype(jnp.float32)
    sums = jax.ops.segment_sum(states, row, num_seqs + 1, indices_are_sorted=True)[:num_seqs]
    now = jnp.where(begins, sums, before + sums)
    length = jnp.maximum(kv_lens, 1)[:, None].astype(jnp.float32)
    divisor = {MEAN: length, WEIGHTED_MEAN: length * (length + 1) / 2, MEAN_SQRT_LEN: jnp.sqrt(length)}[pooling_type]
    return kept.at[slot].set(now, mode="drop"), now / divisor

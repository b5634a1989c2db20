"""Computation of a draft model in a step, as pure functions: write its keys and values, and propose the next tokens.

A draft model sees the same tokens as its target. Its keys and values lie in a pool of its own under the target's page
ids, those of a cache group that keeps all keys. So prefix caching, preemption and restarts treat both alike. Every
token whose keys a step writes for the target is also written for the draft model: by `extend` in steps without drafts,
by `draft` in those with some.

Drafts are sampled like tokens, with the request's parameters and its noise (jaxengine.sampling.verification): a draft
model that is sure of the same tokens proposes them at any temperature. Requests do not occur in this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.drafts.proposer import Drafts
from jaxengine.models.cache import KVPages
from jaxengine.models.forward_batch import HEADER, ForwardBatch, StepLayout
from jaxengine.models.layers.attention.attention import RaggedBatch
from jaxengine.runner.base.device_state import DeviceState, SlotState
from jaxengine.runner.base.forward_pass import ForwardPass, StepSpec
from jaxengine.runner.programs.step import unpack, unpack_rows, with_last_tokens
from jaxengine.sampling.sampler import SamplerFlags, flags_of, sample
from jaxengine.scheduler.batches.buckets import Bucket


@dataclass(frozen=True)
class DraftSpec:
    """Static inputs of one of a draft model's programs.

    Attributes:
      graph, params_tree: static parts of the draft model.
      bucket: of the step; layout: of its message; page_size: tokens of a page.
      group: index of the target's cache group with pages that keeps all keys.
    """

    graph: nnx.GraphDef
    params_tree: Any
    bucket: Bucket
    layout: StepLayout
    page_size: int
    group: int

    @property
    def width(self) -> int:
        """Number of tokens of a row in the step."""
        return self.bucket.width

    def unpack(self, slots: SlotState, last_token: jax.Array | None, message: jax.Array) -> ForwardPass:
        """Return a step's message, i32[1, size] or i32[size], as a ForwardPass whose batch has the page table of
        `group` alone. slots, last_token: state before the step.
        """
        spec = StepSpec(self.bucket, self.layout, self.page_size, (self.group,), self.layout.num_seqs, samples=False)
        return unpack(spec, slots, last_token, message.reshape(-1), {})

    def model(self, params: list[jax.Array]) -> Any:
        """Return the draft model as a module with the leaves `params`."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.params_tree, params))


class Rows(NamedTuple):
    """Rows of a step with drafts, i32[S] each unless noted.

    Attributes:
      slot: the row's slot; count: its tokens in this step, the last known one and drafts.
      start: position of the last known token.
      last_token: that token.
      page_table: i32[S, P], of the target's cache group that keeps all keys.
      num_rows: i32[], number of rows without padding.
      forced: i32[S, W - 1], drafts that the message has, -1 for drafts that the draft model proposes.
      flags: sampler features that some row of the step needs.
    """

    slot: jax.Array
    count: jax.Array
    start: jax.Array
    last_token: jax.Array
    page_table: jax.Array
    num_rows: jax.Array
    forced: jax.Array
    flags: SamplerFlags


def make_extend(spec: DraftSpec) -> Callable:
    """Return the function that writes the draft model's keys and values for the tokens of a step without drafts.

    It is (params: list of arrays, pool, DeviceState before the step, message) -> pool.
    """

    def extend(params: list[jax.Array], kv: KVPages, state: DeviceState, message: jax.Array) -> KVPages:
        assert state.tokens is not None
        with jax.named_scope("unpack"):
            step = with_last_tokens(spec.unpack(state.slots, state.tokens.last_token, message))
        return spec.model(params)(step.batch, kv)[1]

    return extend


def make_draft(spec: DraftSpec) -> Callable:
    """Return the function that proposes drafts after each row's last token.

    It is (params: list of arrays, pool, DeviceState before the step, message) -> (pool, Drafts of S rows, spec.width -
    1 of each). Each pass takes one token of every row and samples the next. The last draft's keys and values are
    written, too, because all drafts may be accepted.
    """

    def draft(params: list[jax.Array], kv: KVPages, state: DeviceState, message: jax.Array) -> tuple[KVPages, Drafts]:
        """Run the draft model over one token of every row, spec.width times, and sample a draft after each pass but the
        last.
        """
        rows = unpack_drafting(spec, state, message.reshape(-1))
        num_drafts = spec.width - 1

        def one_pass(step: jax.Array, carried: tuple[KVPages, jax.Array, jax.Array]):
            kv, token, drafts = carried
            model = spec.model(params)
            hidden, kv = model(one_token_each(spec, rows, step, token), kv)

            def choose() -> tuple[jax.Array, jax.Array]:
                suppressed = model.config.suppressed_tokens
                return draw_drafts(model.logits(hidden), rows, state, step, drafts, suppressed)

            return kv, *lax.cond(step < num_drafts, choose, lambda: (token, drafts))

        none = jnp.full((spec.layout.num_seqs, num_drafts), -1, jnp.int32)
        kv, _, drafts = lax.fori_loop(0, spec.width, one_pass, (kv, rows.last_token, none))
        return kv, Drafts(drafts, jnp.full(spec.layout.num_seqs, num_drafts, jnp.int32))

    return draft


def draw_drafts(
    logits: jax.Array, rows: Rows, state: DeviceState, step: Any, drafts: jax.Array, suppressed_tokens: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Sample draft number `step` (from 0) of each row from logits f32[S, V / n], with the row's parameters and noise as
    in the sampler; drafts that the message has (`rows.forced`) replace sampled ones.

    drafts: i32[S, k], earlier drafts, -1 for the others. state: DeviceState before the step. suppressed_tokens: tokens
    that are never sampled. Returns the tokens i32[S], and `drafts` with them in column `step`. A row with logits that
    are not finite gets token 0.
    """
    assert state.tokens is not None and state.sampling is not None
    with jax.named_scope("sample"):
        chosen = sample(
            logits,
            state.sampling,
            state.tokens.token_counts,
            rows.slot,
            rows.start + 1 + step,
            rows.flags,
            max_logprobs=1,
            logprobs_mode="raw_logprobs",
            suppressed_tokens=suppressed_tokens,
            assumed=drafts,
        ).token_ids
    chosen = jnp.maximum(chosen, 0)  # a row that is not finite: its request ends anyway
    forced = lax.dynamic_index_in_dim(rows.forced, step, axis=1, keepdims=False)
    chosen = jnp.where(forced >= 0, forced, chosen)
    return chosen, lax.dynamic_update_slice(drafts, chosen[:, None], (0, step))


def unpack_drafting(spec: DraftSpec, state: DeviceState, buffer: jax.Array) -> Rows:
    """Return the rows of a step with drafts from a replica's message, buffer i32[size]. state: DeviceState before the
    step.

    Its sampler flags are without logprobs and masks, as drafts are sampled without them.
    """
    layout, tokens = spec.layout, state.tokens
    assert tokens is not None
    header: dict[str, jax.Array] = dict(zip(HEADER, layout.view(buffer, "header"), strict=True))
    slots, step_rows = unpack_rows(state.slots, buffer, layout)
    slot, index, count, start, *_ = step_rows
    table = slots.page_table[index + spec.group * slots.num_computed.shape[0]]
    tokens_of_rows = (jnp.cumsum(count) - count)[:, None] + jnp.arange(1, spec.width, dtype=jnp.int32)
    given = layout.view(buffer, "token_ids")[jnp.minimum(tokens_of_rows, layout.num_tokens - 1)]
    forced = jnp.where(jnp.arange(1, spec.width) < count[:, None], given, -1)
    # Logprobs are those of the tokens that the model itself draws; masks are not known yet.
    nothing = jnp.zeros((), jnp.bool_)
    flags = flags_of(header["features"])._replace(any_logprobs=nothing, any_mask=nothing)
    return Rows(slot, count, start, tokens.last_token[index], table, header["num_seqs"], forced, flags)


def one_token_each(spec: DraftSpec, rows: Rows, step: jax.Array, token: jax.Array, *, back: int = 0) -> ForwardBatch:
    """Return the batch of pass `step` (from 0): one token i32[S] of each row, at position rows.start + step - back.

    back: 1 for a draft head, whose keys lie one position before their tokens. A row with at most `step` tokens in the
    step writes no keys and values in this pass.
    """
    num_seqs = spec.layout.num_seqs
    live = step < rows.count
    positions = jnp.maximum(rows.start + jnp.where(live, step, 0) - back, 0)
    column = jnp.minimum(positions // spec.page_size, rows.page_table.shape[1] - 1)
    page = jnp.take_along_axis(rows.page_table, column[:, None], axis=1)[:, 0]
    ragged = RaggedBatch(
        cu_q_lens=jnp.minimum(jnp.arange(num_seqs + 1, dtype=jnp.int32), rows.num_rows),
        kv_lens=jnp.where(rows.count > 0, positions + 1, 0),
        page_table=rows.page_table,
        slot_mapping=jnp.where(live, page * spec.page_size + positions % spec.page_size, -1),
        num_seqs=rows.num_rows,
        num_decode=rows.num_rows,
    )
    return ForwardBatch(token, positions, jnp.arange(num_seqs, dtype=jnp.int32), (ragged,))

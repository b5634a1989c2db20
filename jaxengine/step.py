"""One step as a pure function: unpack the message, run the model, sample, remember. This is what gets compiled.

The device keeps a row of state for every slot, so the host sends only what changed. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine import sampler
from jaxengine.logprobs import TokenLogprobs, prompt_logprobs
from models.attention import RaggedBatch
from models.forward_batch import HEADER, ForwardBatch, StepLayout


class SlotState(NamedTuple):
    """What the device remembers of the R = max_num_seqs slots.

    Attributes:
      page_table: i32[R, W].
      last_token: i32[R], the token sampled last.
      num_computed: i32[R], tokens whose KV is written.
      sampling: sampling parameters and penalty counts.
    """

    page_table: jax.Array
    last_token: jax.Array
    num_computed: jax.Array
    sampling: sampler.SamplingState


class StepOutput(NamedTuple):
    """Results. Rows of `sample` that do not sample mean nothing; `prompt` scores, at each of the step's T tokens, the
    prompt token that follows it."""

    sample: sampler.SampleOutput
    prompt: TokenLogprobs


class Rows(NamedTuple):
    """The message's rows, i32[S] each; padding rows have slot R, no tokens and sample nothing."""

    slot: jax.Array
    num_scheduled: jax.Array
    start: jax.Array
    sample: jax.Array
    next_token: jax.Array


@dataclass(frozen=True)
class StepSpec:
    """Everything static about a step but its bucket."""

    page_size: int
    max_logprobs: int
    logprobs_mode: str


def init_state(max_num_seqs: int, max_pages: int, vocab_size: int) -> SlotState:
    """State of slots that nobody has used yet."""
    return SlotState(
        page_table=jnp.zeros((max_num_seqs, max_pages), jnp.int32),
        last_token=jnp.zeros(max_num_seqs, jnp.int32),
        num_computed=jnp.zeros(max_num_seqs, jnp.int32),
        sampling=sampler.init_state(max_num_seqs, vocab_size),
    )


def write_page_deltas(state: SlotState, deltas: jax.Array) -> SlotState:
    """Writes page-table entries i32[3, n] (slot, column, page); a slot of R or more is dropped."""
    slots, columns, pages = deltas
    return state._replace(page_table=state.page_table.at[slots, columns].set(pages, mode="drop"))


def unpack(state: SlotState, buffer: jax.Array, layout: StepLayout, page_size: int):
    """Expands a message: (state with the new page-table entries and counts, ForwardBatch, Rows, header dict)."""
    header: dict[str, jax.Array] = dict(zip(HEADER, layout.view(buffer, "header"), strict=True))
    state = write_page_deltas(state, layout.view(buffer, "deltas"))
    slot, count, start, sample, next_token = layout.view(buffer, "rows")
    num_slots = state.last_token.shape[0]
    index = jnp.minimum(slot, num_slots - 1)
    start = jnp.where(start >= 0, start, state.num_computed[index])
    kv_lens = jnp.where(slot < num_slots, start + count, 0)
    state = state._replace(num_computed=sampler.write_slots(state.num_computed, slot, kv_lens))

    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count, dtype=jnp.int32)])
    token = jnp.arange(layout.num_tokens, dtype=jnp.int32)
    if layout.num_tokens == layout.num_seqs:
        row = token  # decode-only: one token a row
    else:
        row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, layout.num_seqs - 1)
    valid = token < cu_q_lens[-1]
    positions = jnp.where(valid, start[row] + token - cu_q_lens[row], 0)
    page_table = state.page_table[index]
    page = page_table[row, positions // page_size]
    slot_mapping = jnp.where(valid, page * page_size + positions % page_size, -1)
    token_ids = layout.view(buffer, "token_ids")
    token_ids = jnp.where(token_ids >= 0, token_ids, state.last_token[index][row])

    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        logits_indices=jnp.maximum(cu_q_lens[1:] - 1, 0),
        ragged=RaggedBatch(
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            page_table=page_table,
            slot_mapping=slot_mapping,
            num_seqs=header["num_seqs"],
            num_decode=header["num_decode"],
        ),
    )
    return state, batch, Rows(slot, count, start, sample, next_token), header


def make_step(graph: nnx.GraphDef, params_tree: Any, layout: StepLayout, spec: StepSpec) -> Callable:
    """The step of one bucket: (params: list of arrays, kv, state, message) -> (kv, state, StepOutput)."""

    def step(params, kv, state: SlotState, buffer: jax.Array):
        model = nnx.merge(graph, jax.tree.unflatten(params_tree, params))
        with jax.named_scope("unpack"):
            state, batch, rows, header = unpack(state, buffer, layout, spec.page_size)
        hidden, kv = model(batch, kv)
        with jax.named_scope("logits"):
            logits = model.logits(hidden[batch.logits_indices])
        flags = sampler.SamplerFlags(*(header[name] > 0 for name in sampler.SamplerFlags._fields))
        with jax.named_scope("sample"):
            sampled = sampler.sample(
                logits,
                state.sampling,
                rows.slot,
                batch.ragged.kv_lens,
                flags,
                max_logprobs=spec.max_logprobs,
                logprobs_mode=spec.logprobs_mode,
            )
        with jax.named_scope("prompt_logprobs"):
            prompt = _prompt_logprobs(model, hidden, batch, rows, header["any_prompt_logprobs"] > 0, spec)
        state = _remember(state, rows, sampled.token_ids, flags.any_penalties)
        return kv, state, StepOutput(sampled, prompt)

    return step


def _prompt_logprobs(model, hidden, batch: ForwardBatch, rows: Rows, wanted, spec: StepSpec) -> TokenLogprobs:
    if hidden.shape[0] == rows.slot.shape[0]:  # one token a row
        targets = rows.next_token
    else:
        targets = jnp.roll(batch.token_ids, -1).at[_last_tokens(batch, rows)].set(rows.next_token, mode="drop")
    return prompt_logprobs(
        hidden,
        jnp.where(wanted, targets, -1),
        model.logits,
        max_logprobs=spec.max_logprobs,
        logprobs_mode=spec.logprobs_mode,
    )


def _last_tokens(batch: ForwardBatch, rows: Rows) -> jax.Array:
    """Each row's last token, T for rows without tokens."""
    return jnp.where(rows.num_scheduled > 0, batch.logits_indices, batch.token_ids.shape[0])


def _remember(state: SlotState, rows: Rows, token_ids: jax.Array, any_penalties: jax.Array) -> SlotState:
    """Keeps each sampling row's token for the next step and counts it where penalties need it."""
    sampled = rows.sample > 0
    num_slots = state.last_token.shape[0]
    target = jnp.where(sampled, rows.slot, num_slots)
    # A poisoned row's -1 would index the embedding; its request ends anyway.
    last_token = sampler.write_slots(state.last_token, target, jnp.maximum(token_ids, 0))
    # Not a conditional around it: its result would be a copy of the counts.
    counted = sampler.count_tokens(state.sampling, rows.slot, token_ids, sampled & any_penalties)
    return state._replace(last_token=last_token, sampling=counted)

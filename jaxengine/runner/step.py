"""One step as a pure function: unpack the message, run the model, sample, remember. This is what gets compiled.

The device keeps a row of state for every slot, so the host sends only what changed. Knows nothing of requests.

On a mesh this is what every device runs on its own parts (sharding.collectives): a rank's rows, slots and pages are its
own, and its devices all unpack the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.sampling import sampler
from jaxengine.sampling.logprobs import TokenLogprobs, prompt_logprobs
from models.forward_batch import HEADER, ForwardBatch, StepLayout
from models.layers.attention import RaggedBatch
from models.layers.moe import ExpertLoad
from sharding.collectives import num_shards, shard_index, stack_ranks


class SlotState(NamedTuple):
    """What the device remembers of the R = max_num_seqs slots and steps change.

    Attributes:
      page_table: i32[G * R, W], of the cache groups one after the other.
      last_token: i32[R], the token sampled last.
      num_computed: i32[R], tokens whose KV is written.
      token_counts: i32[R, V], what penalties count (jaxengine.sampling.sampler); only where tokens are sampled.
      expert_load: u32[1, layers, E], tokens that experts were picked for so far, from 0 again after 2**32 - 1; only for
        models with experts.
    """

    page_table: jax.Array
    last_token: jax.Array
    num_computed: jax.Array
    token_counts: jax.Array | None
    expert_load: jax.Array | None


class DeviceState(NamedTuple):
    """All that is kept between steps beside the KV pool.

    Attributes:
      slots: donated to each step, which returns it changed.
      sampling: sampling parameters, which change between steps only; None where no tokens are sampled.
    """

    slots: SlotState
    sampling: sampler.SamplingState | None


class StepOutput(NamedTuple):
    """Results of all ranks, [ranks, ...]. Rows of `sample` that do not sample mean nothing; `prompt` scores, at each of
    the step's T tokens, the prompt token that follows it."""

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


def init_state(
    max_num_seqs: int,
    max_pages: int,
    vocab_size: int | None,
    experts: tuple[int, int] | None = None,
    num_groups: int = 1,
) -> DeviceState:
    """State of slots that nobody has used yet.

    vocab_size: None where no tokens are sampled; experts: layers with experts and experts of a layer.
    """
    slots = SlotState(
        page_table=jnp.zeros((num_groups * max_num_seqs, max_pages), jnp.int32),
        last_token=jnp.zeros(max_num_seqs, jnp.int32),
        num_computed=jnp.zeros(max_num_seqs, jnp.int32),
        token_counts=None if vocab_size is None else jnp.zeros((max_num_seqs, vocab_size), jnp.int32),
        expert_load=None if experts is None else jnp.zeros((1, *experts), jnp.uint32),
    )
    return DeviceState(slots, None if vocab_size is None else sampler.init_state(max_num_seqs, vocab_size))


def own_slots(slots: jax.Array, num_slots: int) -> jax.Array:
    """Slots numbered over all ranks as this rank numbers its own; `num_slots` for those of others."""
    if num_shards("batch") == 1:
        return slots
    slots = slots - shard_index("batch") * num_slots
    return jnp.where((slots >= 0) & (slots < num_slots), slots, num_slots)


def write_page_deltas(state: SlotState, deltas: jax.Array) -> SlotState:
    """Writes page-table entries i32[3, n] (row, column, page); a row of G * R or more is dropped."""
    rows, columns, pages = deltas
    return state._replace(page_table=state.page_table.at[rows, columns].set(pages, mode="drop"))


def unpack(state: SlotState, buffer: jax.Array, layout: StepLayout, page_size: int):
    """Expands a rank's message: (state with the new page-table entries and counts, ForwardBatch, Rows, header dict)."""
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
    ragged = []
    for group in range(state.page_table.shape[0] // num_slots):
        page_table = state.page_table[index + group * num_slots]
        page = page_table[row, positions // page_size]
        ragged.append(
            RaggedBatch(
                cu_q_lens=cu_q_lens,
                kv_lens=kv_lens,
                page_table=page_table,
                slot_mapping=jnp.where(valid, page * page_size + positions % page_size, -1),
                num_seqs=header["num_seqs"],
                num_decode=header["num_decode"],
            )
        )
    token_ids = layout.view(buffer, "token_ids")
    token_ids = jnp.where(token_ids >= 0, token_ids, state.last_token[index][row])

    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        logits_indices=jnp.maximum(cu_q_lens[1:] - 1, 0),
        ragged=tuple(ragged),
    )
    return state, batch, Rows(slot, count, start, sample, next_token), header


def make_step(graph: nnx.GraphDef, params_tree: Any, layout: StepLayout, spec: StepSpec) -> Callable:
    """The step of one bucket: (params: list of arrays, kv, SlotState, SamplingState, message) -> (kv, SlotState,
    StepOutput).

    The step of a stage that is not the first takes hidden states as a sixth argument, that of one that is not the last
    gives hidden states instead of the StepOutput.
    """

    def step(
        params, kv, state: SlotState, sampling: sampler.SamplingState | None, message: jax.Array, *hidden: jax.Array
    ):
        model = nnx.merge(graph, jax.tree.unflatten(params_tree, params))
        with jax.named_scope("unpack"):
            state, batch, rows, header = unpack(state, message.reshape(-1), layout, spec.page_size)
        hidden, kv = model(batch, kv, *hidden)
        if state.expert_load is not None:
            load = jax.tree.leaves(nnx.pop(model, ExpertLoad))[0]
            state = state._replace(expert_load=state.expert_load + load.astype(jnp.uint32))
        if not model.stage.is_last:
            return kv, state, hidden
        assert sampling is not None and state.token_counts is not None
        with jax.named_scope("logits"):
            logits = model.logits(hidden[batch.logits_indices])
        flags = sampler.SamplerFlags(*(header[name] > 0 for name in sampler.SamplerFlags._fields))
        with jax.named_scope("sample"):
            own = sampler.sample(
                logits,
                sampling,
                state.token_counts,
                rows.slot,
                batch.ragged[0].kv_lens,
                flags,
                max_logprobs=spec.max_logprobs,
                logprobs_mode=spec.logprobs_mode,
            )
        with jax.named_scope("prompt_logprobs"):
            scoring = header["any_prompt_logprobs"] > 0
            prompt = _prompt_logprobs(model, hidden, batch, rows, scoring, spec)
        state = _remember(state, rows, own.token_ids, flags.any_penalties)
        with jax.named_scope("results"):
            scores = _stack_scores(TokenLogprobs(*own[1:]), flags.any_logprobs)
            sampled = sampler.SampleOutput(stack_ranks(own.token_ids), *scores)
            prompt = _stack_scores(prompt, scoring)
        return kv, state, StepOutput(sampled, prompt)

    return step


def _stack_scores(scores: TokenLogprobs, wanted: jax.Array) -> TokenLogprobs:
    """`stack_ranks`, without an exchange where nobody asked."""
    ranks = num_shards("batch")
    if ranks == 1:
        return jax.tree.map(stack_ranks, scores)
    nothing = [jnp.zeros((ranks, *leaf.shape), leaf.dtype) for leaf in scores]
    return lax.cond(wanted, lambda: TokenLogprobs(*map(stack_ranks, scores)), lambda: TokenLogprobs(*nothing))


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
    assert state.token_counts is not None
    sampled = rows.sample > 0
    num_slots = state.last_token.shape[0]
    target = jnp.where(sampled, rows.slot, num_slots)
    # A poisoned row's -1 would index the embedding; its request ends anyway.
    last_token = sampler.write_slots(state.last_token, target, jnp.maximum(token_ids, 0))
    # Not a conditional around it: its result would be a copy of the counts.
    counted = sampler.count_tokens(state.token_counts, rows.slot, token_ids, sampled & any_penalties)
    return state._replace(last_token=last_token, token_counts=counted)

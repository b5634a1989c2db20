"""The forward pass of one step as a pure function: unpack the message, run the model, leave what the heads need.

The device keeps a row of state for every slot, so the host sends only what changed. What is done with the logits and
the hidden states is jaxengine.runner.heads'. Knows nothing of requests.

On a mesh this is what every device runs on its own parts (sharding.collectives): a rank's rows, slots and pages are its
own, and its devices all unpack the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.drafts.proposer import Drafts, Proposer
from jaxengine.runner.device_state import SlotState, write_page_deltas
from jaxengine.runner.pooling import pool_rows
from jaxengine.sampling.state import write_slots
from models.cache import Cache, StateRows
from models.forward_batch import HEADER, Adapters, ForwardBatch, MediaRows, StepLayout
from models.layers.attention import RaggedBatch
from models.layers.decoder import Streams
from models.layers.lora import FLAT, GROUPED
from models.layers.moe import ExpertLoad
from scheduler.pages.snapshots import LOAD, POSITION, SAVE
from scheduler.token_params import ADAPTER, FEW_ADAPTERS


class SampledRows(NamedTuple):
    """What the sampler must know of the rows of logits that it gets, S of them.

    Attributes:
      slot: i32[S], R in padding.
      position: i32[S], of the token to be chosen.
      is_sampled: bool[S], rows that end at their last known token; what is chosen for the others means nothing.
      features: i32[1], what some row needs, bits of scheduler.token_params.
      drafts: i32[S, W - 1], behind which further tokens are to be chosen, of each row so many as num_drafts, i32[S],
        says; None in steps without. Logits are then of S * W places.
      is_forced: bool[S], rows each of whose drafts is the only token allowed in its place; None in steps without.
      is_guided: bool[S], rows each of whose places has a mask of its own; likewise.
    """

    slot: jax.Array
    position: jax.Array
    is_sampled: jax.Array
    features: jax.Array
    drafts: jax.Array | None = None
    num_drafts: jax.Array | None = None
    is_forced: jax.Array | None = None
    is_guided: jax.Array | None = None


class Forwarded(NamedTuple):
    """What a forward pass through the last stage leaves to the heads.

    Attributes:
      rows, logits: of the rows that may sample, f32[S, V / n], or f32[S * W, V / n]; the latter None where the model
        pools.
      hidden: [T, D] after the final norm, and targets: i32[T], the prompt token after each, -1 where there is none;
        None in shapes that score no prompts. Where the model pools, the rows' pooled states, f32[S, D], alone.
      read: [T, F], what a head that drafts reads of each token; None without one.
    """

    rows: SampledRows
    logits: jax.Array | None
    hidden: jax.Array | None
    targets: jax.Array | None
    read: jax.Array | None = None


class Rows(NamedTuple):
    """The message's rows, i32[S] each (StepLayout); padding rows have slot R, no tokens and sample nothing."""

    slot: jax.Array
    num_scheduled: jax.Array
    start: jax.Array
    sample: jax.Array
    next_token: jax.Array


@dataclass(frozen=True)
class StepSpec:
    """Everything static about a forward pass but the model.

    Attributes:
      num_logits: rows of logits that it gives, at least the layout's S.
      scores: it gives hidden states and targets too.
      width: tokens of a row at most where rows have drafts, else 1.
      proposer: of these drafts; None where the message has them.
      takes_drafts: a draft model or a head has made them.
      is_read: a head that drafts reads what the pass gives: hidden states after the final norm, or those behind the
        numbers of layers that `streams` has.
    """

    layout: StepLayout
    page_size: int
    num_logits: int
    scores: bool
    width: int = 1
    proposer: Proposer | None = None
    takes_drafts: bool = False
    is_read: bool = False
    streams: tuple[int, ...] = ()


def unpack(
    state: SlotState,
    last_token: jax.Array | None,
    buffer: jax.Array,
    layout: StepLayout,
    page_size: int,
    draft: Callable[[jax.Array, jax.Array], Drafts] | None = None,
    media_rows: jax.Array | None = None,
):
    """Expands a rank's message: (state with the new page-table entries and counts, ForwardBatch, Rows, header dict,
    Drafts).

    last_token: None where the message has every token. draft: (slots, known tokens of each) -> the tokens that stand
    behind the last one, where the message has none; None, and so are the Drafts, where the message has all of them or
    rows have none. media_rows: the encoder's pool, in a stage that has one.
    """
    header: dict[str, jax.Array] = dict(zip(HEADER, layout.view(buffer, "header"), strict=True))
    state = write_page_deltas(state, layout.view(buffer, "deltas"))
    slot, count, start, sample, next_token = layout.view(buffer, "rows")
    num_slots = state.num_computed.shape[0]
    index = jnp.minimum(slot, num_slots - 1)
    is_new, start = start > 0, jnp.where(start >= 0, start, state.num_computed[index])
    kv_lens = jnp.where(slot < num_slots, start + count, 0)
    state = state._replace(num_computed=write_slots(state.num_computed, slot, kv_lens))

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
    for group in range(state.page_table.shape[0] // num_slots - _keeps_snapshots(state)):
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
    drafts = None
    if draft is not None:
        assert last_token is not None
        drafts = draft(index, start + 1)
        known = jnp.concatenate([last_token[index][:, None], drafts.token_ids], axis=1)
        column = jnp.clip(token - cu_q_lens[row], 0, known.shape[1] - 1)
        token_ids = jnp.where(valid, jnp.where(token_ids >= 0, token_ids, known[row, column]), 0)
    elif last_token is not None:
        token_ids = jnp.where(token_ids >= 0, token_ids, last_token[index][row])

    pictures = layout.view(buffer, "pictures") if layout.sections else None
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        logits_indices=jnp.maximum(cu_q_lens[1:] - 1, 0),
        ragged=tuple(ragged),
        state_rows=_state_rows(state, slot, count, start, is_new, ragged[0]),
        adapters=_adapters(state, jnp.where(valid, index[row], num_slots), header["features"]),
        media=None if pictures is None else MediaRows(media_rows, pictures[0]),
        rope_positions=_rope_positions(state, positions, index[row], pictures),
    )
    return state, batch, Rows(slot, count, start, sample, next_token), header, drafts


def _rope_positions(
    state: SlotState, positions: jax.Array, slot: jax.Array, pictures: jax.Array | None
) -> jax.Array | None:
    """Of ForwardBatch; positions, slot: i32[T], pictures: the message's section."""
    if state.rope_delta is None:
        return None
    own = positions + state.rope_delta[slot]
    return own if pictures is None else jnp.where(pictures[1:] >= 0, pictures[1:], own)


def _adapters(state: SlotState, slot: jax.Array, features: jax.Array) -> Adapters | None:
    """The adapters of tokens i32[T] of these slots, R in padding."""
    if state.adapter is None:
        return None
    slots = state.adapter.at[slot].get(mode="fill", fill_value=-1)
    form = jnp.where(features & FEW_ADAPTERS > 0, GROUPED, FLAT)
    return Adapters(slots, jnp.where(features & ADAPTER > 0, form, 0))


def _keeps_snapshots(state: SlotState) -> bool:
    """Whether there are more rows of states than slots."""
    return bool(state.states) and state.states[0][0].shape[0] > state.num_computed.shape[0]


def _state_rows(
    state: SlotState, slot: jax.Array, count: jax.Array, start: jax.Array, is_new: jax.Array, ragged: RaggedBatch
) -> StateRows | None:
    """Where the states of a message's rows are: each in its slot's row, which a row's first token begins anew.

    is_new: bool[S], rows of sequences that have just got their slots and begin behind a known prefix, from a snapshot.
    """
    if not state.states:
        return None
    assert ragged.num_decode is not None
    num_slots, num_rows = state.num_computed.shape[0], state.states[0][0].shape[0]
    live = (slot < num_slots) & (count > 0)
    reads, saves = jnp.where(live & (start > 0), slot, -1), jnp.full_like(slot, num_rows)
    if _keeps_snapshots(state):
        table = state.page_table[-num_slots:][jnp.minimum(slot, num_slots - 1)]
        reads = jnp.where(live & is_new, num_slots + table[:, LOAD], reads)
        saves = jnp.where(live & (table[:, POSITION] == start + count), num_slots + table[:, SAVE], saves)
    return StateRows(
        cu_q_lens=ragged.cu_q_lens,
        reads=reads,
        writes=jnp.where(live, slot, num_rows),
        saves=saves,
        num_seqs=ragged.num_seqs,
        num_decode=ragged.num_decode,
    )


def make_forward(graph: nnx.GraphDef, params_tree: Any, spec: StepSpec) -> Callable:
    """The forward pass of one shape: (params: list of arrays, kv, SlotState, last_token, message) -> (kv, SlotState,
    Forwarded).

    A stage that is not the first takes hidden states as a sixth argument, and the first one in a step with pictures the
    encoder's pool; one that is not the last gives hidden states instead of Forwarded. last_token: of TokenState, None
    in a stage without one; with a proposer (last_token, history), with a draft model (last_token, Drafts).
    """

    def forward(params, kv, state: SlotState, last_token: Any, message: jax.Array, *hidden: jax.Array):
        model = nnx.merge(graph, jax.tree.unflatten(params_tree, params))
        media_rows, hidden = (hidden[0], ()) if hidden and model.stage.is_first else (None, hidden)
        draft = None
        if spec.proposer is not None:
            last_token, history = last_token
            draft = partial(_propose, spec.proposer, history, spec.width - 1)
        elif spec.takes_drafts:
            last_token, drafts = last_token
            draft = partial(_made_before, drafts)
        with jax.named_scope("unpack"):
            state, batch, rows, header, drafts = unpack(
                state, last_token, message.reshape(-1), spec.layout, spec.page_size, draft, media_rows
            )
            if spec.width > 1:
                batch = batch._replace(logits_indices=_places(batch, rows, spec.width))
        reads = {"streams": spec.streams} if spec.streams else {}
        states, cache = model(batch, Cache(kv, state.states) if state.states else kv, *hidden, **reads)
        kv, kept = cache if isinstance(cache, Cache) else (cache, ())
        state = state._replace(states=kept)
        if state.expert_load is not None:
            load = jax.tree.leaves(nnx.pop(model, ExpertLoad))[0]
            state = state._replace(expert_load=state.expert_load + load.astype(jnp.uint32))
        if not model.stage.is_last:
            return kv, state, states
        read = states if spec.is_read else None
        if spec.streams:
            (read,) = jax.tree.leaves(nnx.pop(model, Streams))
        if spec.width > 1:
            with jax.named_scope("logits"):
                logits = model.logits(states[batch.logits_indices])
            sampled = _rows_with_drafts(batch, rows, header["features"][None], drafts, spec.width)
            return kv, state, Forwarded(sampled, logits, None, None, read)
        more, pooler = spec.num_logits - spec.layout.num_seqs, model.config.pooler
        sampled = SampledRows(
            slot=jnp.pad(rows.slot, (0, more), constant_values=state.num_computed.shape[0]),
            position=jnp.pad(batch.ragged[0].kv_lens, (0, more)),
            is_sampled=jnp.pad(rows.sample > 0, (0, more)),
            features=header["features"][None],
        )
        if pooler is not None:
            with jax.named_scope("pool"):
                kept, pooled = pool_rows(pooler.pooling_type, state.pooled, states, batch, rows.slot, rows.start)
            pooled = jnp.pad(pooled, ((0, more), (0, 0)))
            return kv, state._replace(pooled=kept), Forwarded(sampled, None, pooled, None)
        with jax.named_scope("logits"):
            logits = model.logits(states[jnp.pad(batch.logits_indices, (0, more))])
        if not spec.scores:
            return kv, state, Forwarded(sampled, logits, None, None, read)
        return kv, state, Forwarded(sampled, logits, states, _targets(batch, rows), read)

    return forward


def _propose(proposer: Proposer, history: jax.Array, count: int, slots: jax.Array, num_known: jax.Array) -> Drafts:
    with jax.named_scope("draft"):
        return proposer.propose(history[slots], num_known, count)


def _made_before(drafts: Drafts, slots: jax.Array, num_known: jax.Array) -> Drafts:
    return drafts


def _places(batch: ForwardBatch, rows: Rows, width: int) -> jax.Array:
    """i32[S * W]: the tokens behind which each row's are chosen; what a row has less of repeats its last."""
    column = jnp.minimum(jnp.arange(width, dtype=jnp.int32), jnp.maximum(rows.num_scheduled - 1, 0)[:, None])
    places = batch.ragged[0].cu_q_lens[:-1, None] + column
    return jnp.minimum(places, batch.token_ids.shape[0] - 1).reshape(-1)


def _rows_with_drafts(
    batch: ForwardBatch, rows: Rows, features: jax.Array, drafts: Drafts | None, width: int
) -> SampledRows:
    """What `verify` must know; drafts: None where every token behind a row's first one is one."""
    num_drafts, is_forced = jnp.maximum(rows.num_scheduled - 1, 0), rows.sample == 2
    if drafts is not None:
        num_drafts = jnp.where(is_forced, num_drafts, jnp.minimum(num_drafts, drafts.counts))
    return SampledRows(
        slot=rows.slot,
        position=batch.ragged[0].kv_lens - rows.num_scheduled + 1,
        is_sampled=rows.sample > 0,
        features=features,
        drafts=batch.token_ids[batch.logits_indices].reshape(-1, width)[:, 1:],
        num_drafts=num_drafts,
        is_forced=is_forced,
        is_guided=rows.sample == 3,
    )


def _targets(batch: ForwardBatch, rows: Rows) -> jax.Array:
    """i32[T]: the prompt token after each token."""
    if batch.token_ids.shape == rows.slot.shape:  # one token a row
        return rows.next_token
    num_tokens = batch.token_ids.shape[0]
    last = jnp.where(rows.num_scheduled > 0, batch.logits_indices, num_tokens)
    return jnp.roll(batch.token_ids, -1).at[last].set(rows.next_token, mode="drop")

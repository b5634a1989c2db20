"""Computation of a draft head (EAGLE, MTP) in a step, as pure functions.

A head takes the target model's hidden state at a position and the token that came next, and predicts the token after
it; from its own hidden state and that token it continues. So it runs once a step's tokens have been sampled, over all
positions of the step (`follow`), and keeps its hidden state at the last position of each slot, from which the drafts of
the slot's next step are made (`draft`). Its keys and values lie where a draft model's do
(jaxengine.runner.extensions.drafts.step).

The key of a page's last position depends on the token after the page. If a cached prefix is continued with a different
token, that one key belongs to another text, which can only make a draft wrong.
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
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.runner.base.device_state import DeviceState
from jaxengine.runner.base.forward_pass import SampledRows
from jaxengine.runner.extensions.drafts.section import NAME
from jaxengine.runner.extensions.drafts.step import DraftSpec, draw_drafts, one_token_each, unpack_drafting
from jaxengine.sampling.state import write_slots


class HeadWeights(NamedTuple):
    """Weights that a draft head's programs take.

    Attributes:
      own: leaves of the draft head.
      model: leaves of the target model, whose embeddings and LM head it uses.
    """

    own: list[jax.Array]
    model: list[jax.Array]


class HeadState(NamedTuple):
    """State of a draft head between steps.

    Attributes:
      kv: its KV pool.
      hidden: [R, D], its hidden state at the last position of each slot.
    """

    kv: KVPages
    hidden: jax.Array


@dataclass(frozen=True)
class DraftHeadSpec(DraftSpec):
    """DraftSpec of a draft head, which also uses weights of the model.

    Attributes:
      model_graph, model_tree: static parts of the model, as `nnx.split` and `jax.tree.structure` give them.
    """

    model_graph: nnx.GraphDef
    model_tree: Any

    def both(self, weights: HeadWeights) -> tuple[Any, Any]:
        """Return the modules (draft head, target model) with these weights."""
        lender = nnx.merge(self.model_graph, jax.tree.unflatten(self.model_tree, weights.model))
        return self.model(weights.own), lender


def step_before(
    spec: DraftSpec, state: DeviceState, sampled: SampledRows, buffer: jax.Array
) -> tuple[ForwardBatch, jax.Array]:
    """Return (the batch of a step whose tokens have been sampled, positions i32[S] at which its rows began).

    state: DeviceState after the sampler. buffer: i32[size], the step's message. Token ids that the message leaves to
    the device are arbitrary.
    """
    layout, tokens = spec.layout, state.tokens
    assert tokens is not None
    slot, count, *_ = layout.view(buffer, "rows")
    start = sampled.position[: layout.num_seqs] - (count if spec.width == 1 else 1)
    with jax.named_scope("unpack"):
        before = state.slots._replace(num_computed=write_slots(state.slots.num_computed, slot, start))
        return spec.unpack(before, tokens.last_token, buffer).batch, start


def make_follow(spec: DraftHeadSpec) -> Callable:
    """Return the function that runs the head over a step whose tokens have been sampled, each token's hidden state with
    the next token's embedding.

    It is (HeadWeights, HeadState, DeviceState after the sampler, SampledRows, hidden states [T, F], message) ->
    HeadState, with the head's keys and values of the step's tokens, and its hidden state at each row's last position
    that counts as computed.
    """

    def follow(
        weights: HeadWeights,
        kept: HeadState,
        state: DeviceState,
        sampled: SampledRows,
        hidden: jax.Array,
        message: jax.Array,
    ) -> HeadState:
        """Run the head over the step's tokens, each with the next token's embedding; return the new HeadState."""
        buffer, layout, tokens = message.reshape(-1), spec.layout, state.tokens
        assert tokens is not None
        history = tokens.sections[NAME]
        slot, count, *_ = layout.view(buffer, "rows")
        num_slots = state.slots.num_computed.shape[0]
        batch, start = step_before(spec, state, sampled, buffer)
        with jax.named_scope("unpack"):
            (ragged,) = batch.ragged
            ends, token = ragged.cu_q_lens[1:], jnp.arange(layout.num_tokens, dtype=jnp.int32)
            row = jnp.searchsorted(ends, token, side="right", method="compare_all")
            owner = jnp.minimum(slot, num_slots - 1)[jnp.minimum(row, layout.num_seqs - 1)]
            column = jnp.minimum(batch.positions + 1, history.shape[1] - 1)
            own = batch._replace(token_ids=history[owner, column])
        head, model = spec.both(weights)
        out, kv = head(own, kept.kv, head.read(hidden), head.embeddings(own.token_ids, model))
        # In a step with drafts, positions after the last accepted one do not count.
        num_kept = state.slots.num_computed[jnp.minimum(slot, num_slots - 1)] - start
        last = jnp.clip(ragged.cu_q_lens[:-1] + num_kept - 1, 0, layout.num_tokens - 1)
        where = jnp.where(count > 0, slot, num_slots)
        return HeadState(kv, kept.hidden.at[where].set(out[last].astype(kept.hidden.dtype), mode="drop"))

    return follow


def make_head_draft(spec: DraftHeadSpec) -> Callable:
    """Return the function that proposes drafts after each row's last token with the head.

    It is (HeadWeights, HeadState, DeviceState before the step, message) -> (HeadState, Drafts of S rows, spec.width - 1
    of each). The drafts' keys and values come from the head's own hidden states; `follow` writes them again.
    """

    def draft(
        weights: HeadWeights, kept: HeadState, state: DeviceState, message: jax.Array
    ) -> tuple[HeadState, Drafts]:
        """Propose drafts for each row: the first from the slot's stored hidden state, each later one after a pass of
        the head over the draft before it.
        """
        rows = unpack_drafting(spec, state, message.reshape(-1))
        first = kept.hidden[jnp.minimum(rows.slot, kept.hidden.shape[0] - 1)]
        num_drafts = spec.width - 1

        def choose(step: Any, hidden: jax.Array, drafts: jax.Array) -> tuple[jax.Array, jax.Array]:
            head, model = spec.both(weights)
            suppressed = model.config.suppressed_tokens
            return draw_drafts(head.draft_logits(hidden, model), rows, state, step, drafts, suppressed)

        def one_pass(step: jax.Array, carried: tuple[KVPages, jax.Array, jax.Array, jax.Array]):
            kv, hidden, token, drafts = carried
            head, model = spec.both(weights)
            # The head's keys are one position before their tokens.
            batch = one_token_each(spec, rows, step, token, back=1)
            hidden, kv = head(batch, kv, hidden, head.embeddings(token, model))
            return kv, hidden, *choose(step, hidden, drafts)

        none = jnp.full((spec.layout.num_seqs, num_drafts), -1, jnp.int32)
        token, drafts = choose(0, first, none)
        kv, _, _, drafts = lax.fori_loop(1, num_drafts, one_pass, (kept.kv, first, token, drafts))
        return kept._replace(kv=kv), Drafts(drafts, jnp.full(spec.layout.num_seqs, num_drafts, jnp.int32))

    return draft

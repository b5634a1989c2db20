"""Computation of a draft head that drafts a block of tokens in one pass (DFlash, DSpark), as pure functions.

The head's keys and values of a token follow from the target model's hidden states there, and from nothing else. So
`fill` writes those of a step's tokens once the step has run, and a later `draft` only runs the tokens after them: the
last known one, and a mask for each draft. What it writes for these tokens is overwritten by the step that verifies
them. Keys and values lie where a draft model's do (jaxengine.runner.extensions.drafts.step).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.drafts.proposer import Drafts
from jaxengine.models.cache import KVPages
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.runner.base.device_state import DeviceState
from jaxengine.runner.base.forward_pass import SampledRows
from jaxengine.runner.extensions.drafts.head_step import DraftHeadSpec, HeadWeights, step_before
from jaxengine.runner.extensions.drafts.step import draw_drafts, unpack_drafting


def make_fill(spec: DraftHeadSpec) -> Callable:
    """Return the function that writes the head's keys and values of a step whose tokens have been sampled.

    It is (HeadWeights, pool, DeviceState after the sampler, SampledRows, hidden states [T, F], message) -> pool.
    """

    def fill(
        weights: HeadWeights,
        kv: KVPages,
        state: DeviceState,
        sampled: SampledRows,
        hidden: jax.Array,
        message: jax.Array,
    ) -> KVPages:
        """Write the keys and values of the step's tokens, rejected drafts among them, and return the pool."""
        batch, _ = step_before(spec, state, sampled, message.reshape(-1))
        return spec.both(weights)[0].write(batch, kv, hidden)

    return fill


def make_block_draft(spec: DraftHeadSpec) -> Callable:
    """Return the function that proposes drafts after each row's last token, all in one pass of the head.

    It is (HeadWeights, pool, DeviceState before the step, message) -> (pool, Drafts of S rows, spec.width - 1 of each).
    """

    def draft(weights: HeadWeights, kv: KVPages, state: DeviceState, message: jax.Array) -> tuple[KVPages, Drafts]:
        """Run the head over each row's block and its LM head at the positions of all drafts, each once, and draw the
        drafts one after the other from these logits.
        """
        buffer, num_drafts = message.reshape(-1), spec.width - 1
        rows = unpack_drafting(spec, state, buffer)
        head, model = spec.both(weights)
        assert state.tokens is not None
        sizes, batch = head.sizes, spec.unpack(state.slots, state.tokens.last_token, buffer).batch
        batch, first = blocks_of(batch, rows.last_token, sizes.mask_token, from_anchor=sizes.from_anchor)
        hidden, kv = head(batch, kv, head.embeddings(batch.token_ids, model))
        places = first[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)
        products = head.products(hidden[jnp.minimum(places, len(hidden) - 1).reshape(-1)], model)
        products = products.reshape(-1, num_drafts, products.shape[1])

        def choose(step: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            before, drafts = carried
            own = lax.dynamic_index_in_dim(products, step, axis=1, keepdims=False)
            head, model = spec.both(weights)
            suppressed = model.config.suppressed_tokens
            return draw_drafts(head.draft_logits(own, before, model), rows, state, step, drafts, suppressed)

        none = jnp.full((spec.layout.num_seqs, num_drafts), -1, jnp.int32)
        _, drafts = lax.fori_loop(0, num_drafts, choose, (rows.last_token, none))
        return kv, Drafts(drafts, jnp.full(spec.layout.num_seqs, num_drafts, jnp.int32))

    return draft


def blocks_of(
    batch: ForwardBatch, last_token: jax.Array, mask_token: int, *, from_anchor: bool
) -> tuple[ForwardBatch, jax.Array]:
    """Return the batch of each row's block, the last known token and then masks, and the index of the token that
    predicts the first draft of each row, i32[S]; those of the others follow.

    batch: of the tokens that a step verifies, a row's last known one and its drafts.
    last_token: i32[S].
    from_anchor: whether the last known token stands in place of the first draft, so that a block is one token shorter.
    """
    (ragged,), token = batch.ragged, jnp.arange(len(batch.token_ids), dtype=jnp.int32)
    positions, starts, q_lens = batch.positions, ragged.cu_q_lens, jnp.diff(ragged.cu_q_lens)
    if from_anchor:
        starts = jnp.concatenate([starts[:1], jnp.cumsum(jnp.maximum(q_lens - 1, 0), dtype=jnp.int32)])
        row = jnp.searchsorted(starts[1:], token, side="right", method="compare_all")
        row = jnp.minimum(row, len(q_lens) - 1)
        source = jnp.minimum(ragged.cu_q_lens[row] + token - starts[row], len(token) - 1)
        slots = jnp.where(token < starts[-1], ragged.slot_mapping[source], -1)
        kv_lens = jnp.maximum(ragged.kv_lens - 1, 0)
        # Rows of a single token have none, and others may have one.
        shorter = {"cu_q_lens": starts, "kv_lens": kv_lens, "slot_mapping": slots, "num_decode": jnp.int32(0)}
        positions, ragged = positions[source], ragged._replace(**shorter)
    is_first = (token[:, None] == starts[:-1]) & (starts[1:] > starts[:-1])
    last = jnp.sum(jnp.where(is_first, last_token, 0), axis=1, dtype=jnp.int32)
    token_ids = jnp.where(jnp.any(is_first, axis=1), last, mask_token)
    first = ragged.cu_q_lens[:-1] + (0 if from_anchor else 1)
    return batch._replace(token_ids=token_ids, positions=positions, ragged=(ragged,)), first

"""Computation of a draft head that drafts a block of tokens in one pass (DFlash), as pure functions.

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
from jaxengine.runner.extensions.drafts.step import Rows, draw_drafts, unpack_drafting


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
        """Run the head over each row's block, and draw the drafts one after the other from its logits."""
        buffer, num_drafts = message.reshape(-1), spec.width - 1
        rows = unpack_drafting(spec, state, buffer)
        head, model = spec.both(weights)
        assert state.tokens is not None
        batch = _blocks(spec.unpack(state.slots, state.tokens.last_token, buffer).batch, rows, head.sizes.mask_token)
        hidden, kv = head(batch, kv, head.embeddings(batch.token_ids, model))
        first = batch.ragged[0].cu_q_lens[:-1] + (0 if head.sizes.from_anchor else 1)

        def choose(step: jax.Array, drafts: jax.Array) -> jax.Array:
            own = hidden[jnp.minimum(first + step, len(hidden) - 1)]
            head, model = spec.both(weights)
            suppressed = model.config.suppressed_tokens
            return draw_drafts(head.draft_logits(own, model), rows, state, step, drafts, suppressed)[1]

        none = jnp.full((spec.layout.num_seqs, num_drafts), -1, jnp.int32)
        drafts = lax.fori_loop(0, num_drafts, choose, none)
        return kv, Drafts(drafts, jnp.full(spec.layout.num_seqs, num_drafts, jnp.int32))

    return draft


def _blocks(batch: ForwardBatch, rows: Rows, mask_token: int) -> ForwardBatch:
    """Return the batch of a step with each row's last known token at its start and masks in place of its drafts."""
    token = jnp.arange(len(batch.token_ids), dtype=jnp.int32)
    starts = batch.ragged[0].cu_q_lens[:-1]
    is_first = (token[:, None] == starts) & (rows.count > 0)
    last = jnp.sum(jnp.where(is_first, rows.last_token, 0), axis=1, dtype=jnp.int32)
    return batch._replace(token_ids=jnp.where(jnp.any(is_first, axis=1), last, mask_token))

"""What a draft model does beside a step, as pure functions: keep its keys and values, and guess the next tokens.

A draft model sees the tokens that the model sees. Its keys and values lie in a pool of its own under the model's page
numbers, those of a cache group that keeps all keys. So a token's page holds both, and whatever happens to pages, to
prefixes that are found again, to requests that are stopped and begin anew, happens to both. What a step writes of the
one is written of the other: `extend` does that for steps without drafts, `draft` for those with some.

Drafts are drawn as the sampler draws, with the request's parameters and its noise (jaxengine.sampling.verification): a
draft model that is sure of the same tokens guesses them at any temperature. Knows nothing of requests.
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
from jaxengine.runner.device_state import SlotState, TokenState, write_page_deltas
from jaxengine.runner.step import unpack
from jaxengine.sampling.sampler import flags_of, sample
from jaxengine.sampling.state import SamplingState
from models.cache import KVPages
from models.forward_batch import HEADER, ForwardBatch, StepLayout
from models.layers.attention import RaggedBatch


@dataclass(frozen=True)
class DraftSpec:
    """Everything static about one of a draft model's programs.

    Attributes:
      graph, params_tree: of the draft model.
      layout: of the step's message.
      group: which of the model's cache groups with pages keeps all keys.
      width: tokens of a row in the step.
    """

    graph: nnx.GraphDef
    params_tree: Any
    layout: StepLayout
    page_size: int
    group: int
    width: int = 1

    def model(self, params: list[jax.Array]) -> Any:
        """The draft model with these leaves."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.params_tree, params))


def make_extend(spec: DraftSpec) -> Callable:
    """Writes the draft model's keys and values of a step's tokens: (params: list of arrays, its pool, SlotState as it
    is before the step, last_token i32[R], message) -> its pool."""

    def extend(params, kv: KVPages, state: SlotState, last_token: jax.Array, message: jax.Array) -> KVPages:
        with jax.named_scope("unpack"):
            _, batch, *_ = unpack(state, last_token, message.reshape(-1), spec.layout, spec.page_size)
            own = ForwardBatch(batch.token_ids, batch.positions, batch.logits_indices, (batch.ragged[spec.group],))
        return spec.model(params)(own, kv)[1]

    return extend


class _Rows(NamedTuple):
    """The rows of a step with drafts: i32[S] each, and their pages i32[S, W]."""

    slot: jax.Array
    count: jax.Array
    start: jax.Array
    last_token: jax.Array
    page_table: jax.Array
    num_rows: jax.Array


def make_draft(spec: DraftSpec) -> Callable:
    """Guesses the tokens behind each row's last one: (params: list of arrays, its pool, SlotState as it is before the
    step, TokenState, SamplingState, message) -> (its pool, Drafts of S rows, spec.width - 1 of each).

    Each pass takes one token of every row and draws the next. The last draft's keys and values are written too, for
    all may turn out to be right.
    """

    def draft(
        params: list[jax.Array],
        kv: KVPages,
        state: SlotState,
        tokens: TokenState,
        sampling: SamplingState,
        message: jax.Array,
    ) -> tuple[KVPages, Drafts]:
        header, rows = _unpack_rows(spec, state, tokens.last_token, message.reshape(-1))
        # What a step tells of logprobs it tells of the tokens that the model itself draws.
        flags = flags_of(header["features"])._replace(any_logprobs=jnp.zeros((), jnp.bool_))
        num_drafts = spec.width - 1

        def one_pass(step: jax.Array, carried: tuple[KVPages, jax.Array, jax.Array]):
            kv, token, drafts = carried
            model = spec.model(params)
            hidden, kv = model(_one_token_each(spec, rows, step, token), kv)

            def choose() -> jax.Array:
                with jax.named_scope("sample"):
                    return sample(
                        model.logits(hidden),
                        sampling,
                        tokens.token_counts,
                        rows.slot,
                        rows.start + step + 1,
                        flags,
                        max_logprobs=1,
                        logprobs_mode="raw_logprobs",
                        assumed=drafts,
                    ).token_ids

            chosen = lax.cond(step < num_drafts, choose, lambda: token)
            chosen = jnp.maximum(chosen, 0)  # a row that is not finite: its request ends anyway
            return kv, chosen, lax.dynamic_update_slice(drafts, chosen[:, None], (0, jnp.minimum(step, num_drafts - 1)))

        none = jnp.full((spec.layout.num_seqs, num_drafts), -1, jnp.int32)
        kv, _, drafts = lax.fori_loop(0, spec.width, one_pass, (kv, rows.last_token, none))
        return kv, Drafts(drafts, jnp.full(spec.layout.num_seqs, num_drafts, jnp.int32))

    return draft


def _unpack_rows(
    spec: DraftSpec, state: SlotState, last_token: jax.Array, buffer: jax.Array
) -> tuple[dict[str, jax.Array], _Rows]:
    layout = spec.layout
    header: dict[str, jax.Array] = dict(zip(HEADER, layout.view(buffer, "header"), strict=True))
    state = write_page_deltas(state, layout.view(buffer, "deltas"))
    slot, count, start, *_ = layout.view(buffer, "rows")
    num_slots = state.num_computed.shape[0]
    index = jnp.minimum(slot, num_slots - 1)
    start = jnp.where(start >= 0, start, state.num_computed[index])
    table = state.page_table[index + spec.group * num_slots]
    return header, _Rows(slot, count, start, last_token[index], table, header["num_seqs"])


def _one_token_each(spec: DraftSpec, rows: _Rows, step: jax.Array, token: jax.Array) -> ForwardBatch:
    """The batch of pass `step`; a row that has fewer tokens in the step than that writes nothing."""
    num_seqs = spec.layout.num_seqs
    live = step < rows.count
    positions = rows.start + jnp.where(live, step, 0)
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

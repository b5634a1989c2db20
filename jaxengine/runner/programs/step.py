"""Forward pass of one step as a pure function: unpack the message, run the model, and return what epilogues need.

The device keeps a row of state for every slot, so the host sends only what has changed. The epilogues
(jaxengine.runner.programs.epilogues) use the logits and hidden states. Each replica has its own rows, slots and pages,
and all devices of a replica unpack the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.forward_batch import HEADER, ForwardBatch, StepLayout
from jaxengine.models.layers.attention.attention import RaggedBatch
from jaxengine.runner.base.device_state import SlotState, write_page_deltas
from jaxengine.runner.base.forward_pass import ForwardPass, Rows, SampledRows, StepSpec
from jaxengine.sampling.state import write_slots


class StageOutput(NamedTuple):
    """Result of a forward pass through a stage that is not the last.

    Attributes:
      hidden: [T, D], input of the next stage.
      sections: arrays of extensions, by name.
    """

    hidden: jax.Array
    sections: dict[str, Any]


class Forwarded(NamedTuple):
    """Result of a forward pass through the last stage, which epilogues use.

    Attributes:
      rows: description of the rows of logits.
      logits: f32[S, V / n], one row for each row of the step, or f32[S * W, V / n] in steps whose rows have W tokens;
        None if tokens are not sampled.
      sections: arrays of extensions, by name.
      earlier: sections of the earlier stages, in order.
    """

    rows: SampledRows
    logits: jax.Array | None
    sections: dict[str, Any]
    earlier: tuple[dict[str, Any], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return rows, logits and sections under the names that Epilogue.arguments uses."""
        return {"rows": self.rows, "logits": self.logits, **self.sections}


def unpack(
    spec: StepSpec, slots: SlotState, last_token: jax.Array | None, buffer: jax.Array, given: dict[str, Any]
) -> ForwardPass:
    """Expand a replica's message, buffer i32[size], into a ForwardPass. In its slot state the message's page-table
    entries are written, and the step's tokens already count as computed. Token ids that only the device has are still
    -1.

    last_token: TokenState.last_token, i32[R]; None if the message has every token. given: arrays that extensions
    provide. Both are stored in the result unchanged.
    """
    layout = spec.layout
    header: dict[str, jax.Array] = dict(zip(HEADER, layout.view(buffer, "header"), strict=True))
    slots, rows = unpack_rows(slots, buffer, layout)
    num_slots = slots.num_computed.shape[0]
    kv_lens = jnp.where(rows.slot < num_slots, rows.start + rows.num_scheduled, 0)
    slots = slots._replace(num_computed=write_slots(slots.num_computed, rows.slot, kv_lens))
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows.num_scheduled, dtype=jnp.int32)])
    token = jnp.arange(layout.num_tokens, dtype=jnp.int32)
    if layout.num_tokens == layout.num_seqs:
        row = token  # decode-only: one token per row
    else:
        row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, layout.num_seqs - 1)
    valid = token < cu_q_lens[-1]
    column = token - cu_q_lens[row]
    positions = jnp.where(valid, rows.start[row] + column, 0)
    ragged = []
    for group in spec.groups:
        page_table = slots.page_table[rows.index + group * num_slots]
        page = page_table[row, positions // spec.page_size]
        ragged.append(
            RaggedBatch(
                cu_q_lens=cu_q_lens,
                kv_lens=kv_lens,
                page_table=page_table,
                slot_mapping=jnp.where(valid, page * spec.page_size + positions % spec.page_size, -1),
                num_seqs=header["num_seqs"],
                num_decode=header["num_decode"],
            )
        )
    batch = ForwardBatch(
        token_ids=layout.view(buffer, "token_ids"),
        positions=positions,
        logits_indices=jnp.maximum(cu_q_lens[1:] - 1, 0),
        ragged=tuple(ragged),
    )
    view = partial(layout.view, buffer)
    return ForwardPass(spec, view, header["features"], rows, row, column, valid, given, slots, last_token, batch)


def unpack_rows(slots: SlotState, buffer: jax.Array, layout: StepLayout) -> tuple[SlotState, Rows]:
    """Return (slot state, rows) of a replica's message, buffer i32[size]. The slot state is `slots` with the message's
    page-table entries written; the rows' numbers of computed tokens are not written.
    """
    slots = write_page_deltas(slots, layout.view(buffer, "deltas"))
    slot, count, start, sample, next_token = layout.view(buffer, "rows")
    num_slots = slots.num_computed.shape[0]
    index = jnp.minimum(slot, num_slots - 1)
    first = jnp.where(start >= 0, start, slots.num_computed[index])
    return slots, Rows(slot, index, count, first, sample, next_token, start)


def with_last_tokens(step: ForwardPass) -> ForwardPass:
    """Return the pass with token ids of -1 replaced by their slots' last tokens; unchanged if it has no last tokens."""
    if step.last_token is None:
        return step
    last, sent = step.last_token[step.rows.index][step.token_row], step.batch.token_ids
    return step._replace(batch=step.batch._replace(token_ids=jnp.where(sent >= 0, sent, last)))


def make_forward(graph: nnx.GraphDef, params_tree: Any, spec: StepSpec) -> Callable:
    """Return the forward pass of one shape: (params: list of arrays, kv, SlotState, last_token, message, given) -> (kv,
    SlotState, Forwarded).

    A stage that is not the first takes hidden states as a further argument. A stage that is not the last returns
    StageOutput instead of Forwarded. last_token: TokenState.last_token, None in a stage without TokenState. given:
    arrays that extensions provide.
    """

    def forward(
        params: Any,
        kv: Any,
        slots: SlotState,
        last_token: jax.Array | None,
        message: jax.Array,
        given: dict[str, Any],
        *hidden: jax.Array,
    ):
        """Run one device's part of the forward pass: unpack the message, call the extensions before and after the
        model, and compute logits in a stage that samples.
        """
        model = nnx.merge(graph, jax.tree.unflatten(params_tree, params))
        with jax.named_scope("unpack"):
            step = unpack(spec, slots, last_token, message.reshape(-1), given)._replace(cache=kv)
            filled = (each.fill_tokens(step) for each in spec.extensions)
            step = next((each for each in filled if each is not None), None) or with_last_tokens(step)
            if spec.bucket.width > 1:
                step = step._replace(batch=step.batch._replace(logits_indices=_last_of_rows(step)))
            if model.stage.is_last:
                step = step._replace(sampled=_sampled(step))
            for each in spec.extensions:
                step = each.before_model(step)
        out, cache = model(step.batch, step.cache, *hidden)
        step = step._replace(hidden=out, cache=cache)
        for each in spec.extensions:
            step = each.after_model(step)
        if not model.stage.is_last:
            return step.cache, step.slots, StageOutput(out, step.left)
        assert step.sampled is not None
        logits = None
        if spec.samples:
            with jax.named_scope("logits"):
                logits = model.logits(out[pad_rows(step, step.batch.logits_indices)])
        return step.cache, step.slots, Forwarded(step.sampled, logits, step.left)

    return forward


def _last_of_rows(step: ForwardPass) -> jax.Array:
    """Return i32[S * W]: the indices of the W tokens of each row of a wide step, after each of which a token is
    sampled. A row with fewer tokens repeats its last one.
    """
    rows, width = step.rows, step.spec.bucket.width
    column = jnp.minimum(jnp.arange(width, dtype=jnp.int32), jnp.maximum(rows.num_scheduled - 1, 0)[:, None])
    tokens = step.batch.ragged[0].cu_q_lens[:-1, None] + column
    return jnp.minimum(tokens, step.batch.token_ids.shape[0] - 1).reshape(-1)


def _sampled(step: ForwardPass) -> SampledRows:
    """Return the SampledRows of the pass, padded to the number of rows of logits. A wide step has S rows, whose
    `position` is that after the row's first token.
    """
    rows, kv_lens, features = step.rows, step.batch.ragged[0].kv_lens, step.features[None]
    if step.spec.bucket.width > 1:
        return SampledRows(rows.slot, kv_lens - rows.num_scheduled + 1, rows.sample > 0, features)
    return SampledRows(
        slot=pad_rows(step, rows.slot, step.slots.num_computed.shape[0]),
        position=pad_rows(step, kv_lens),
        is_sampled=pad_rows(step, rows.sample > 0),
        features=features,
    )


def pad_rows(step: ForwardPass, x: jax.Array, fill: Any = 0) -> jax.Array:
    """Return a step's rows x [S, ...], padded with `fill` to the number of rows of logits. In wide steps, where x
    already has all positions, it is returned unchanged.
    """
    more = 0 if step.spec.bucket.width > 1 else step.spec.num_logits - step.spec.layout.num_seqs
    return jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)), constant_values=fill) if more else x

"""States after accepted tokens, in steps with drafts.

The forward pass of such a step reads states and writes none. It leaves the inputs of states
(jaxengine.models.layers.states.inputs), from which a program computes those after the accepted tokens once the drafts
have been verified. What does not lead to a state, as the layers' large products, is removed when it is lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.cache import Cache, StateRows, abstract_kv, device_kv, paged_groups
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import RaggedBatch
from jaxengine.models.layers.decoder_step import DecoderStep
from jaxengine.models.layers.states.inputs import SECTION, StateInputs
from jaxengine.runner.base.extension import StageExtension, StageShape
from jaxengine.runner.base.program import Program, abstract_params, program_on
from jaxengine.scheduler.batches.buckets import Bucket

NAME = "states"


class Recorded(NamedTuple):
    """Results of a forward pass with drafts for the states.

    Attributes:
      cu_q_lens: i32[S + 1], first token of each row.
      layers: for each layer with states, in order, the inputs [T, ...] of its state.
    """

    cu_q_lens: jax.Array
    layers: tuple[tuple[jax.Array, ...], ...]


class AcceptedStates(StageExtension):
    """Stage extension that runs these programs."""

    name = NAME

    def __init__(self, stage: Any):
        """Store the StageRunner, whose slot state it changes."""
        self._stage = stage

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: Any, message: Any) -> None:
        """Store the bucket of the step for `after_sample`."""
        self._bucket = bucket

    def after_sample(self, params: Sequence[Any], state: Any, forwarded: Any) -> None:
        """Dispatch the program that writes the states after the accepted tokens; nothing in a step without drafts.

        state: DeviceState after the sampler, with the numbers of tokens that now count as computed.
        """
        if self._bucket.width == 1:
            return
        slots, rows = state.slots, forwarded.rows
        accept = self._stage.program(NAME, name_of(self._bucket))
        states = slots.sections[NAME]
        states = accept(params, states, slots.num_computed, rows.slot, rows.position, forwarded.sections[NAME])
        self._stage.slots = slots._replace(sections={**slots.sections, NAME: states})


def name_of(bucket: Bucket) -> str:
    """Return the name of a bucket's program of `accept_program`."""
    return f"states of {bucket}"


def accept_program(
    shape: StageShape, bucket: Bucket, params: Sequence[Any], states: Any, recorded: Recorded
) -> Program:
    """Return the program (params, states, num_computed, slot, position, Recorded) -> states of a wide bucket, with
    `states` donated.

    num_computed: i32[R], tokens of each slot that count as computed. slot, position: those of SampledRows, i32[S].
    params: the model's leaves, arrays or shapes. states, recorded: shapes.
    """
    graph, leaves = nnx.split(shape.model)
    tree = jax.tree.structure(leaves)
    pool = abstract_kv(shape.groups, 1, platform=shape.platform.name, mesh=shape.mesh)

    def accept(
        params: list[jax.Array],
        states: Any,
        num_computed: jax.Array,
        slot: jax.Array,
        position: jax.Array,
        recorded: Recorded,
    ) -> Any:
        """Run the layers that keep states over each row's accepted tokens, and return the new states."""
        model: Any = nnx.merge(graph, jax.tree.unflatten(tree, params))
        num_slots = num_computed.shape[0]
        start = position - 1  # `position` is that of the token after the row's first
        counts = jnp.where(slot < num_slots, num_computed[jnp.minimum(slot, num_slots - 1)] - start, 0)
        with jax.named_scope("accepted"):
            batch, inputs = _accepted(recorded, start, counts, shape)
        nowhere = jnp.full_like(slot, jnp.iinfo(jnp.int32).max)
        ragged, written = batch.ragged[0], jnp.where(counts > 0, slot, nowhere)
        assert ragged.num_decode is not None
        numbers = ragged.num_seqs, ragged.num_decode, bucket.width
        rows = StateRows(ragged.cu_q_lens, jnp.where(counts > 0, slot, -1), written, nowhere, *numbers)
        batch = batch._replace(sections={NAME: rows, SECTION: StateInputs(inputs)})
        step = DecoderStep(model.config, model.build, shape.groups, batch, Cache(device_kv(pool), states))
        # Recorded inputs take the place of all that layers would compute from it.
        unused = jnp.full((bucket.num_tokens, model.config.stream_size), jnp.nan, model.build.dtype)
        for index, layer in enumerate(model.layers):
            if model.config.attention[model.stage.layers[index]].state is not None:
                step.run(index, layer, unused)
        return step.cache.states

    slots, rows = shape.rows(shape.num_slots, jnp.int32), shape.rows(bucket.num_seqs, jnp.int32)
    arguments = abstract_params(params), states, slots, rows, rows, recorded
    return program_on(shape.mesh, name_of(bucket), accept, arguments, states, (1,))


def _accepted(
    recorded: Recorded, start: jax.Array, counts: jax.Array, shape: StageShape
) -> tuple[ForwardBatch, list[tuple[jax.Array, ...]]]:
    """Return (a batch of the accepted tokens alone, without ids and pages; the recorded inputs of its tokens).

    start: i32[S], tokens of each row before the step. counts: i32[S], accepted tokens of each row.
    """
    num_seqs, num_tokens = counts.shape[0], recorded.layers[0][0].shape[0]
    cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_seqs - 1)
    column = token - cu_q_lens[row]
    source = jnp.clip(recorded.cu_q_lens[row] + column, 0, num_tokens - 1)
    zeros, none = jnp.zeros(num_seqs, jnp.int32), jnp.full(num_tokens, -1, jnp.int32)
    table = jnp.zeros((num_seqs, max(1, 128 // shape.config.block_size)), jnp.int32)
    ragged = RaggedBatch(cu_q_lens, start + counts, table, none, jnp.int32(num_seqs), jnp.int32(0))
    positions = jnp.where(token < cu_q_lens[-1], start[row] + column, 0)
    groups = (ragged,) * len(paged_groups(shape.groups))
    batch = ForwardBatch(jnp.zeros_like(token), positions, zeros, groups)
    return batch, [tuple(part[source] for part in layer) for layer in recorded.layers]

"""States: recurrent state of layers that keep one instead of KV pages, a row for each slot, then for each snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxengine.models.cache import Cache, KVPages, StateRows, state_arrays
from jaxengine.models.config.state import StateArray
from jaxengine.models.layers.states.inputs import SECTION, StateInputs
from jaxengine.runner.base.extension import DeviceExtension, Kept, StageExtension, StageShape
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.base.program import Program
from jaxengine.runner.extensions.states.accepted import NAME, AcceptedStates, Recorded, accept_program
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.pages.snapshots import LOAD, POSITION, SAVE
from jaxengine.sharding.rules import logical_to_spec, part_bytes


class StatesExtension(DeviceExtension):
    """Device extension of recurrent state. Its section of SlotState has the states of jaxengine.models.cache.Cache: for
    each layer with state its arrays [rows, ...]; none in a stage without such layers. Snapshots have a page table of
    their own (jaxengine.scheduler.pages.snapshots).

    Attributes:
      num_snapshots: snapshots of a replica; 0 for none.
    """

    name = NAME
    counts_slots = True
    is_pool = True

    def __init__(self, shape: StageShape):
        """Determine the stage's arrays of states, and the page table that snapshots need, if there are any."""
        super().__init__(shape)
        self.num_snapshots = shape.config.num_state_snapshots
        self.num_tables = int(self.num_snapshots > 0)
        self.least_columns = 3 * self.num_tables  # for a snapshot to load, one to save, and the position of the latter
        self._arrays = state_arrays(shape.groups)
        self._has_drafts = shape.config.speculative_config is not None

    def slots(self) -> Any:
        """Return, for each layer with state, its arrays as Kepts [slots + snapshots, ...]; None in a stage without such
        layers.
        """
        num_rows = self.shape.num_slots + self.num_snapshots
        own = tuple(
            tuple(Kept((num_rows, *array.shape), array.dtype, _spec(array)) for array in arrays)
            for arrays in self._arrays
        )
        return own or None

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, by purpose, of all rows of states and, with drafts, of the inputs that the
        largest wide step leaves, which may be there while the next forward pass runs.
        """
        of_row = sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for own in self._arrays for each in own)
        left = [self.left(bucket.num_tokens, bucket.num_seqs) for bucket in self.shape.buckets.wide]
        inputs = max((sum(map(part_bytes, jax.tree.leaves(each))) for each in left), default=0)
        more = {"inputs of states": inputs} if inputs else {}
        return {NAME: (self.shape.num_slots + self.num_snapshots) * of_row} | more

    def leaves(self, bucket: Bucket) -> bool:
        """Whether the bucket's rows may have drafts, so that its states are written once these are verified."""
        return bucket.width > 1

    def left(self, num_tokens: int, num_rows: int) -> Recorded | None:
        """Return the abstract Recorded of a step with drafts; None without drafts or states."""
        if not self._has_drafts or not self._arrays:
            return None
        layers = tuple(
            tuple(self.shape.whole((num_tokens, *each.shape), each.dtype, _spec(each)) for each in inputs)
            for inputs in self._inputs()
        )
        return Recorded(self.shape.rows(num_rows + 1, np.int32), layers)

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        if not self._has_drafts or not self._arrays:
            return ()
        states = jax.tree.map(lambda kept: self.shape.whole(kept.shape, kept.dtype, kept.spec), self.slots())
        return [
            accept_program(self.shape, bucket, params, states, recorded)
            for bucket in self.shape.buckets.wide
            if (recorded := self.left(bucket.num_tokens, bucket.num_seqs)) is not None
        ]

    def at_stage(self, stage: Any) -> StageExtension | None:
        """Return the extension that writes states after verification; None without drafts or states."""
        return AcceptedStates(stage) if self._has_drafts and self._arrays else None

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with a section of the rows at which states are read and written, in a wide step one that
        records the inputs of states, and with the states added to its cache; unchanged in a stage without states.
        """
        if not self._arrays:
            return step
        states, pool = step.slots.sections[NAME], step.cache
        assert isinstance(pool, KVPages)
        rows = self._rows(step)
        if (width := step.spec.bucket.width) > 1:
            nowhere = jnp.full_like(rows.writes, self.shape.num_slots + self.num_snapshots)
            rows = replace(rows, writes=nowhere, saves=nowhere, width=width)
            step = step.with_section(SECTION, StateInputs([()] * len(self._arrays)))
        return step.with_section(NAME, rows)._replace(cache=Cache(pool, states))

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the new states in the slots' state, in a wide step with the inputs of states left under
        NAME, and the KV pool alone as its cache; unchanged in a stage without states.
        """
        if not self._arrays:
            return step
        cache = step.cache
        assert isinstance(cache, Cache)
        if step.spec.bucket.width > 1:
            inputs = tuple(step.batch.sections[SECTION].layers)
            step = step.leaving(NAME, Recorded(step.batch.ragged[0].cu_q_lens, inputs))
        return step._replace(cache=cache.kv).with_state(NAME, cache.states)

    def _rows(self, step: ForwardPass) -> StateRows:
        """Return the row numbers at which the states of a message's rows are read, written and saved, i32[S] each, with
        the batch's lengths.

        A row's state is in its slot's row. A row at position 0, or without a request, reads none (-1); one that just
        got its slot after a cached prefix reads a snapshot. If nothing is to be written or saved, the number is the
        total number of rows.
        """
        rows, ragged, num_slots = step.rows, step.batch.ragged[0], self.shape.num_slots
        assert ragged.num_decode is not None
        num_rows = num_slots + self.num_snapshots
        live = (rows.slot < num_slots) & (rows.num_scheduled > 0)
        reads, saves = jnp.where(live & (rows.start > 0), rows.slot, -1), jnp.full_like(rows.slot, num_rows)
        if self.num_snapshots:
            table = step.slots.page_table[-num_slots:][rows.index]
            reads = jnp.where(live & (rows.told_start > 0), num_slots + table[:, LOAD], reads)
            is_saved = table[:, POSITION] == rows.start + rows.num_scheduled
            saves = jnp.where(live & is_saved, num_slots + table[:, SAVE], saves)
        return StateRows(
            cu_q_lens=ragged.cu_q_lens,
            reads=reads,
            writes=jnp.where(live, rows.slot, num_rows),
            saves=saves,
            num_seqs=ragged.num_seqs,
            num_decode=ragged.num_decode,
        )

    def _inputs(self) -> list[tuple[StateArray, ...]]:
        """Return the inputs of each of this stage's states, in order, with one device's shapes and their dtypes."""
        model, config = self.shape.model, self.shape.config
        states = [model.config.attention[layer].state for layer in model.stage.layers]
        return [
            tuple(
                each._replace(shape=each.of_device(model.mesh.num_shards), dtype=each.dtype or config.dtype)
                for each in state.token_inputs or ()
            )
            for state in states
            if state is not None
        ]


def _spec(array: StateArray) -> PartitionSpec:
    """Return the PartitionSpec of arrays with one row of `array` for each slot or token."""
    return logical_to_spec(("batch", *array.axes))

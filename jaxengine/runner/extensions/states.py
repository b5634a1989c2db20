"""States: recurrent state of layers that keep one instead of KV pages, a row for each slot, then for each snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxengine.models.cache import Cache, KVPages, StateRows, state_arrays
from jaxengine.runner.base.extension import DeviceExtension, Kept, StageShape
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.scheduler.pages.snapshots import LOAD, POSITION, SAVE
from jaxengine.sharding.rules import logical_to_spec

NAME = "states"


class StatesExtension(DeviceExtension):
    """Device extension of recurrent state. Its section of SlotState has the states of jaxengine.models.cache.Cache: for
    each layer with state its arrays [rows, ...]; none in a stage without such layers. Snapshots have a page table of
    their own (jaxengine.scheduler.pages.snapshots).
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

    def slots(self) -> Any:
        """Return, for each layer with state, its arrays as Kepts [slots + snapshots, ...]; None in a stage without such
        layers.
        """
        num_rows = self.shape.num_slots + self.num_snapshots
        own = tuple(
            tuple(
                Kept((num_rows, *array.shape), array.dtype, logical_to_spec(("batch", *array.axes))) for array in arrays
            )
            for arrays in self._arrays
        )
        return own or None

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, by purpose, of all rows of states."""
        of_row = sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for own in self._arrays for each in own)
        return {NAME: (self.shape.num_slots + self.num_snapshots) * of_row}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with a section of the rows at which states are read and written, and with the states added to
        its cache; unchanged in a stage without states.
        """
        if not self._arrays:
            return step
        states, pool = step.slots.sections[NAME], step.cache
        assert isinstance(pool, KVPages)
        return step.with_section(NAME, self._rows(step))._replace(cache=Cache(pool, states))

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the new states in the slots' state, and the KV pool alone as its cache; unchanged in a
        stage without states.
        """
        if not self._arrays:
            return step
        assert isinstance(step.cache, Cache)
        return step._replace(cache=step.cache.kv).with_state(NAME, step.cache.states)

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

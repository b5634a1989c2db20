"""What the host changes on the devices between steps: a row of `STATE_CHANGES` for each program that does it.

All name slots as numbered over all ranks: rank * max_num_seqs + the rank's own number, and rows of the page tables and
masks likewise; entries of slots that no rank has change nothing. A row says which stages have it and what it takes.
Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxengine.runner.device_state import DeviceState, own_slots, write_page_deltas
from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.state import NEUTRAL
from sharding.rules import logical_to_spec

# Entries of one message that brings page-table entries outside a step, requests whose parameters one brings, and
# requests whose masks one brings.
NUM_DELTAS = 1024
NUM_PARAM_ROWS = 8
NUM_MASK_ROWS = 16
# Slots of which one brings a number: that of the adapter, say.
NUM_COLUMN_ROWS = 64

PAGE_DELTAS, PARAMETERS, BIAS_ROW, MASK_ROWS, COUNTS_ROW, HISTORY_ROW, ADAPTERS, ROPE_DELTAS = (
    "page deltas",
    "parameters",
    "bias row",
    "mask rows",
    "counts row",
    "history row",
    "adapters",
    "rope deltas",
)

Shape = tuple[tuple[int, ...], Any, PartitionSpec]

_EVERYWHERE = PartitionSpec()
_VOCAB = logical_to_spec(("sampled_vocab",))
_ROWS_VOCAB = logical_to_spec((None, "sampled_vocab"))


class StateSizes(NamedTuple):
    """What the arguments of state changes are made for.

    Attributes:
      vocab_size: tokens that the sampler knows, over all devices.
      stored_mask_words: of a slot's mask, likewise.
      samples: whether the stage is the last one, of a model that generates.
      history: positions whose tokens are kept of a slot, 0 where none are.
      adapters: whether slots may have any.
      places: whether layers turn queries and keys by places.
    """

    vocab_size: int
    stored_mask_words: int
    samples: bool
    history: int = 0
    adapters: bool = False
    places: bool = False


class StateChange(NamedTuple):
    """One program that changes the state.

    Attributes:
      function: (DeviceState, arguments) -> DeviceState, the first donated.
      arguments: their shapes, dtypes and PartitionSpecs.
      everywhere: every stage has it; else the last one alone, which samples.
      of_history: only a stage that keeps one has it.
      of_adapters: only engines with room for adapters have it.
      of_places: only models whose layers turn queries and keys by places have it.
    """

    function: Callable[..., DeviceState]
    arguments: Callable[[StateSizes], list[Shape]]
    everywhere: bool = False
    of_history: bool = False
    of_adapters: bool = False
    of_places: bool = False

    def is_of(self, sizes: StateSizes) -> bool:
        """Whether a stage of these sizes has it."""
        has = (sizes.history > 0 or not self.of_history) and (sizes.adapters or not self.of_adapters)
        has = has and (sizes.places or not self.of_places)
        return has and (self.everywhere or sizes.samples)


def _write_deltas(state: DeviceState, deltas: jax.Array) -> DeviceState:
    deltas = deltas.at[0].set(own_slots(deltas[0], state.slots.page_table.shape[0]))
    return state._replace(slots=write_page_deltas(state.slots, deltas))


def _set_counts(state: DeviceState, slot: jax.Array, row: jax.Array) -> DeviceState:
    assert state.tokens is not None
    counts = sampling_state.set_row(state.tokens.token_counts, _own(state, slot), row)
    return state._replace(tokens=state.tokens._replace(token_counts=counts))


def _set_history(state: DeviceState, slot: jax.Array, row: jax.Array) -> DeviceState:
    assert state.tokens is not None and state.tokens.history is not None
    history = sampling_state.set_row(state.tokens.history, _own(state, slot), row)
    return state._replace(tokens=state.tokens._replace(history=history))


def _set_adapters(state: DeviceState, slots: jax.Array, adapters: jax.Array) -> DeviceState:
    assert state.slots.adapter is not None
    written = sampling_state.write_slots(state.slots.adapter, _own(state, slots), adapters)
    return state._replace(slots=state.slots._replace(adapter=written))


def _set_rope_deltas(state: DeviceState, slots: jax.Array, deltas: jax.Array) -> DeviceState:
    assert state.slots.rope_delta is not None
    written = sampling_state.write_slots(state.slots.rope_delta, _own(state, slots), deltas)
    return state._replace(slots=state.slots._replace(rope_delta=written))


def _set_masks(state: DeviceState, numbers: jax.Array, rows: jax.Array) -> DeviceState:
    assert state.sampling is not None
    own = own_slots(numbers, state.sampling.token_mask.shape[0])
    return state._replace(sampling=sampling_state.set_mask_rows(state.sampling, own, rows))


def _on_sampling(function: Callable) -> Callable[..., DeviceState]:
    """A change of the sampling parameters of some slots as a change of all that is kept."""

    def change(state: DeviceState, slots: jax.Array, *arguments: jax.Array) -> DeviceState:
        return state._replace(sampling=function(state.sampling, _own(state, slots), *arguments))

    return change


def _own(state: DeviceState, slots: jax.Array) -> jax.Array:
    return own_slots(slots, state.slots.num_computed.shape[0])


def _row_of_vocab(dtype: Any) -> Callable[[StateSizes], list[Shape]]:
    return lambda sizes: [((), np.int32, _EVERYWHERE), ((sizes.vocab_size,), dtype, _VOCAB)]


STATE_CHANGES = {
    PAGE_DELTAS: StateChange(_write_deltas, lambda sizes: [((3, NUM_DELTAS), np.int32, _EVERYWHERE)], everywhere=True),
    PARAMETERS: StateChange(
        _on_sampling(sampling_state.write_params),
        lambda sizes: [
            ((NUM_PARAM_ROWS,), np.int32, _EVERYWHERE),
            ((NUM_PARAM_ROWS, len(NEUTRAL)), np.int32, _EVERYWHERE),
        ],
    ),
    BIAS_ROW: StateChange(_on_sampling(sampling_state.set_bias_row), _row_of_vocab(np.float32)),
    MASK_ROWS: StateChange(
        _set_masks,
        lambda sizes: [
            ((NUM_MASK_ROWS,), np.int32, _EVERYWHERE),
            ((NUM_MASK_ROWS, sizes.stored_mask_words), np.int32, _ROWS_VOCAB),
        ],
    ),
    COUNTS_ROW: StateChange(_set_counts, _row_of_vocab(np.int32)),
    HISTORY_ROW: StateChange(
        _set_history,
        lambda sizes: [((), np.int32, _EVERYWHERE), ((sizes.history,), np.int32, _EVERYWHERE)],
        of_history=True,
    ),
    ADAPTERS: StateChange(
        _set_adapters,
        lambda sizes: [((NUM_COLUMN_ROWS,), np.int32, _EVERYWHERE)] * 2,
        everywhere=True,
        of_adapters=True,
    ),
    ROPE_DELTAS: StateChange(
        _set_rope_deltas,
        lambda sizes: [((NUM_COLUMN_ROWS,), np.int32, _EVERYWHERE)] * 2,
        everywhere=True,
        of_places=True,
    ),
}

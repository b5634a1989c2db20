"""State changes: programs with which the host changes device state between steps, one for each kind of change.

Slots are numbered over all replicas (replica * max_num_seqs + the replica's own number), and so are rows of tables.
Entries for slots that no replica has are ignored. Changes of optional capabilities are in their own files
(jaxengine.runner.extensions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxengine.runner.base.device_state import DeviceState, own_slots, write_page_deltas
from jaxengine.runner.base.extension import EVERYWHERE, Shape, StateChange
from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.state import NEUTRAL
from jaxengine.scheduler.base.token_params import MAX_LOGPROB_TOKEN_IDS
from jaxengine.sharding.rules import logical_to_spec

# How many entries one launch of a change writes:
NUM_DELTAS = 1024  # page-table entries
NUM_PARAM_ROWS = 64  # slots, their sampling parameters
NUM_COLUMN_ROWS = 64  # slots, one number each
NUM_LOGPROB_ID_ROWS = 16  # slots, their logprob_token_ids
NUM_LONG_ROWS = 8  # slots, a long row each, such as one over the vocabulary; a second program writes one slot

PAGE_DELTAS, PARAMETERS, BIAS_ROWS, COUNTS_ROWS = "page deltas", "parameters", "bias rows", "counts rows"
LOGPROB_ID_ROWS = "logprob id rows"

_ROWS_VOCAB = logical_to_spec((None, "sampled_vocab"))


def column_shapes() -> list[Shape]:
    """Return the argument shapes of a change that sets one int32 in each of several slots: slots and values, each
    i32[NUM_COLUMN_ROWS].
    """
    return [((NUM_COLUMN_ROWS,), np.int32, EVERYWHERE)] * 2


def long_rows(name: str, function: Callable, length: int, dtype: Any, spec: Any) -> dict[str, StateChange]:
    """Return two StateChanges, by name, that replace rows of slots: one for a single slot, one for NUM_LONG_ROWS slots.
    `ModelRunner.change_rows` runs them.

    function: (DeviceState, slots i32[n], rows [n, length]) -> DeviceState. dtype, spec: dtype of the rows and
    PartitionSpec of their two axes.
    """
    return {
        rows_name(name, size): StateChange(function, [((size,), np.int32, EVERYWHERE), ((size, length), dtype, spec)])
        for size in (1, NUM_LONG_ROWS)
    }


def rows_name(name: str, size: int) -> str:
    """Return the name of the state change `name` that replaces `size` long rows."""
    return f"{name}, {size} at once"


def own_slot(state: DeviceState, slots: jax.Array) -> jax.Array:
    """Convert slots i32[n], numbered over all replicas, to this replica's own numbers. Slots of other replicas become
    max_num_seqs, which no slot has.
    """
    return own_slots(slots, state.slots.num_computed.shape[0])


def _write_deltas(state: DeviceState, deltas: jax.Array) -> DeviceState:
    """Return the state with page-table entries i32[3, n] (row over all replicas, column, page) written."""
    deltas = deltas.at[0].set(own_slots(deltas[0], state.slots.page_table.shape[0]))
    return state._replace(slots=write_page_deltas(state.slots, deltas))


def _set_counts(state: DeviceState, slots: jax.Array, rows: jax.Array) -> DeviceState:
    """Return the state with token counts i32[n, V] written for slots i32[n], numbered over all replicas."""
    assert state.tokens is not None
    counts = sampling_state.set_rows(state.tokens.token_counts, own_slot(state, slots), rows)
    return state._replace(tokens=state.tokens._replace(token_counts=counts))


def _on_sampling(function: Callable) -> Callable[..., DeviceState]:
    """Return a function that changes DeviceState by applying `function` to its SamplingState.

    function: (SamplingState, slots i32[n] with the replica's own numbers, ...) -> SamplingState. The returned function
    takes slots that are numbered over all replicas.
    """

    def change(state: DeviceState, slots: jax.Array, *arguments: jax.Array) -> DeviceState:
        return state._replace(sampling=function(state.sampling, own_slot(state, slots), *arguments))

    return change


def state_changes(vocab_size: int | None) -> dict[str, StateChange]:
    """Return the state changes of a stage, by name: PAGE_DELTAS, and in a stage that samples PARAMETERS,
    LOGPROB_ID_ROWS and the `long_rows` of BIAS_ROWS and COUNTS_ROWS.

    vocab_size: size of the vocabulary over all devices, including padding; None in a stage that does not sample.
    """
    changes = {PAGE_DELTAS: StateChange(_write_deltas, [((3, NUM_DELTAS), np.int32, EVERYWHERE)])}
    if vocab_size is None:
        return changes

    params: list[Shape] = [
        ((NUM_PARAM_ROWS,), np.int32, EVERYWHERE),
        ((NUM_PARAM_ROWS, len(NEUTRAL)), np.int32, EVERYWHERE),
    ]
    changes[PARAMETERS] = StateChange(_on_sampling(sampling_state.write_params), params)
    ids: list[Shape] = [
        ((NUM_LOGPROB_ID_ROWS,), np.int32, EVERYWHERE),
        ((NUM_LOGPROB_ID_ROWS, MAX_LOGPROB_TOKEN_IDS), np.int32, EVERYWHERE),
    ]
    changes[LOGPROB_ID_ROWS] = StateChange(_on_sampling(sampling_state.set_logprob_ids), ids)
    set_biases = _on_sampling(sampling_state.set_bias_rows)
    biases = long_rows(BIAS_ROWS, set_biases, vocab_size, np.float32, _ROWS_VOCAB)
    return changes | biases | long_rows(COUNTS_ROWS, _set_counts, vocab_size, np.int32, _ROWS_VOCAB)

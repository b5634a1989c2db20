"""What the host changes on the devices between steps: a program for each way of changing it.

All name slots as numbered over all replicas: rank * max_num_seqs + the replica's own number, and rows of
tables likewise; entries of slots that no replica has change nothing. Those of optional capabilities stand in
the files of these (jaxengine.runner.extensions). Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxengine.runner.extension import EVERYWHERE, Shape, StateChange
from jaxengine.runner.programs.device_state import DeviceState, own_slots, write_page_deltas
from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.state import NEUTRAL
from jaxengine.scheduler.token_params import MAX_LOGPROB_TOKEN_IDS
from jaxengine.sharding.rules import logical_to_spec

# Entries of one message that brings page-table entries outside a step, and requests whose parameters one brings.
NUM_DELTAS = 1024
NUM_PARAM_ROWS = 64
# Slots of which one brings a number.
NUM_COLUMN_ROWS = 64
# Requests whose logprob_token_ids one brings.
NUM_LOGPROB_ID_ROWS = 16

# Long rows of slots, such as those over the vocabulary, come alone or so many at once.
NUM_LONG_ROWS = 8

PAGE_DELTAS, PARAMETERS, BIAS_ROWS, COUNTS_ROWS = "page deltas", "parameters", "bias rows", "counts rows"
LOGPROB_ID_ROWS = "logprob id rows"

_ROWS_VOCAB = logical_to_spec((None, "sampled_vocab"))


def column_shapes() -> list[Shape]:
    """The arguments of a change that brings a number of some slots: slots and values."""
    return [((NUM_COLUMN_ROWS,), np.int32, EVERYWHERE)] * 2


def long_rows(name: str, function: Callable, length: int, dtype: Any, spec: Any) -> dict[str, StateChange]:
    """A change that replaces rows of slots, of one slot and of NUM_LONG_ROWS at once: two StateChanges by their names,
    for `ModelRunner.change_rows`.

    function: (DeviceState, slots i32[n], rows [n, length]) -> DeviceState. dtype, spec: of the rows; spec is the
    PartitionSpec of both axes.
    """
    sizes = 1, NUM_LONG_ROWS
    shapes = ([((size,), np.int32, EVERYWHERE), ((size, length), dtype, spec)] for size in sizes)
    return {rows_name(name, size): StateChange(function, own) for size, own in zip(sizes, shapes, strict=True)}


def rows_name(name: str, size: int) -> str:
    """The name of the change that brings so many long rows."""
    return f"{name}, {size} at once"


def own_slot(state: DeviceState, slots: jax.Array) -> jax.Array:
    """Slots numbered over all replicas as this one numbers its own; the number of slots for those of others."""
    return own_slots(slots, state.slots.num_computed.shape[0])


def _write_deltas(state: DeviceState, deltas: jax.Array) -> DeviceState:
    deltas = deltas.at[0].set(own_slots(deltas[0], state.slots.page_table.shape[0]))
    return state._replace(slots=write_page_deltas(state.slots, deltas))


def _set_counts(state: DeviceState, slots: jax.Array, rows: jax.Array) -> DeviceState:
    assert state.tokens is not None
    counts = sampling_state.set_rows(state.tokens.token_counts, own_slot(state, slots), rows)
    return state._replace(tokens=state.tokens._replace(token_counts=counts))


def _on_sampling(function: Callable) -> Callable[..., DeviceState]:
    """A change of the sampling parameters of some slots as a change of all that is kept."""

    def change(state: DeviceState, slots: jax.Array, *arguments: jax.Array) -> DeviceState:
        return state._replace(sampling=function(state.sampling, own_slot(state, slots), *arguments))

    return change


def state_changes(vocab_size: int | None) -> dict[str, StateChange]:
    """The state changes of every stage, by name, and with a vocabulary those of a stage that samples.

    vocab_size: of all devices, padding included; None in a stage that does not sample.
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

"""Steering: vectors that requests add to activations, one set for each slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.config.features.steering import TAPS
from jaxengine.models.config.taps import all_taps, read_taps
from jaxengine.models.layers.steering import Steering, StepVectors
from jaxengine.models.layers.taps import check_parts
from jaxengine.runner.base.device_state import DeviceState, own_slots
from jaxengine.runner.base.extension import EVERYWHERE, DeviceExtension, HostExtension, Kept, StageShape, StateChange
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.programs.state_changes import column_shapes
from jaxengine.sampling.state import write_slots
from jaxengine.scheduler.batches.buckets import Bucket

NAME = "steering"
WRITE, SWITCH = "steering vectors", "steering switches"


class SteeringExtension(DeviceExtension):
    """Device extension of steering. Its section of SlotState is `vectors` f32[R, n, D], for each slot and each of the n
    taps, and `is_on` i32[R], 1 for slots that add their vectors.
    """

    name = NAME
    counts_slots = True

    def __init__(self, shape: StageShape):
        """Determine the taps of the option steer. Raises TapError for one that the model lacks, ValueError for a part
        that a layer lacks.
        """
        super().__init__(shape)
        config = shape.model.config
        self.taps = read_taps(shape.config.steer or (), all_taps(config))
        check_parts(TAPS, config.architecture, shape.model.layers, shape.model.stage.layers, self.taps)
        self.description = f"steers {', '.join(tap.name for tap in self.taps)}"

    def label(self, bucket: Bucket) -> str:
        return f", {self.description}"

    def slots(self) -> Any:
        num_slots = self.shape.num_slots
        return {"vectors": Kept((num_slots, *self.of_slot), jnp.float32), "is_on": Kept((num_slots,), jnp.int32)}

    def memory(self) -> Mapping[str, int]:
        return {"steering vectors": 4 * self.shape.num_slots * (1 + int(np.prod(self.of_slot)))}

    @property
    def of_slot(self) -> tuple[int, int]:
        """Shape (n taps, D) of a slot's vectors."""
        return len(self.taps), self.shape.model.config.hidden_size

    @property
    def changes(self) -> Mapping[str, StateChange]:
        vectors = [((1,), np.int32, EVERYWHERE), ((1, *self.of_slot), np.float32, EVERYWHERE)]
        return {WRITE: StateChange(_write_vectors, vectors), SWITCH: StateChange(_switch, column_shapes())}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with a section of the vectors and, for each token, the slot whose vectors are added to it;
        the number of slots, which no slot has, if none are.
        """
        section, num_slots = step.slots.sections[NAME], self.shape.num_slots
        is_on = step.is_token & (section["is_on"][step.rows.index][step.token_row] > 0)
        slots = jnp.where(is_on, step.rows.index[step.token_row], num_slots)
        vectors = StepVectors(section["vectors"], slots, jnp.any(is_on))
        return step.with_section(NAME, Steering(self.taps, vectors))

    def on_host(self, runner: Any) -> HostExtension:
        return SlotVectors(runner, self)


class SlotVectors(HostExtension):
    """Host extension that sets the steering vectors of slots, which are numbered over all replicas."""

    def __init__(self, runner: Any, extension: SteeringExtension):
        super().__init__(runner)
        self._numbers = {tap.name: number for number, tap in enumerate(extension.taps)}
        self._of_slot = extension.of_slot
        self._known = np.zeros(runner.num_ranks * runner.config.max_num_seqs, np.int32)

    def write(self, slot: int, steer: Sequence[tuple[str, bytes]]) -> None:
        """Write a slot's vectors to the devices, for forward passes dispatched afterwards while the slot is switched
        on; taps that `steer` does not name get zeros.

        steer: pairs of a tap's name and a vector as little-endian float32 bytes. Raises KeyError for another tap.
        """
        vectors = np.zeros((1, *self._of_slot), np.float32)
        for at, values in steer:
            vectors[0, self._numbers[at]] = np.frombuffer(values, "<f4")
        self.runner.change_state(WRITE, np.array([slot], np.int32), vectors)

    def switch(self, slots: list[int], values: list[int]) -> None:
        """Turn the vectors of slots on (value 1) or off (0); only changes are sent to the devices."""
        self.runner.set_column(SWITCH, self._known, slots, values)


def _write_vectors(state: DeviceState, slots: jax.Array, vectors: jax.Array) -> DeviceState:
    """Return the state with vectors f32[1, n, D] written for slots i32[1]."""
    own = own_slots(slots, state.slots.num_computed.shape[0])
    section = state.slots.sections[NAME]
    return _with(state, {**section, "vectors": section["vectors"].at[own].set(vectors, mode="drop")})


def _switch(state: DeviceState, slots: jax.Array, values: jax.Array) -> DeviceState:
    """Return the state with `is_on` of slots i32[n] set to values i32[n]."""
    own = own_slots(slots, state.slots.num_computed.shape[0])
    section = state.slots.sections[NAME]
    return _with(state, {**section, "is_on": write_slots(section["is_on"], own, values)})


def _with(state: DeviceState, section: Any) -> DeviceState:
    """Return the state with this extension's section replaced by `section`."""
    return state._replace(slots=state.slots._replace(sections={**state.slots.sections, NAME: section}))

"""Inputs of states: what a layer's state after a token depends on besides the state before it. A step with drafts keeps
them (jaxengine.runner.extensions.states.accepted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.section import Note, Section, notes_of

SECTION = "state_inputs"


class StateInput(Note):
    """Input [T, ...] of a layer's state, one of the `token_inputs` of the layer's state (jaxengine.models.config)."""


class StateInputs(Section):
    """Section that records the inputs of states, or gives layers recorded ones. It must be created and read within the
    same trace.

    Attributes:
      layers: for each layer of the stage with states, in order, its inputs [T, ...]; () for layers that have not run.
    """

    def __init__(self, layers: Sequence[tuple[jax.Array, ...]]):
        """Give layers these inputs; () for a layer whose inputs are to be recorded."""
        self.layers = list(layers)
        self._next = 0

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Store the StateInputs among a layer's notes, in the order of their numbers."""
        found = {path[-1]: note[...] for path, note in notes_of(notes, StateInput)}
        if found:
            self.layers[self._next] = tuple(found[name] for name in sorted(found))
            self._next += 1


def state_input(module: nnx.Module, step: StepInputs, number: int, value: jax.Array) -> Any:
    """Return input `number` of the module's state, [T, ...]: the one that the step gives the layer, otherwise `value`,
    which is recorded if the step asks for it. number: index in `token_inputs` of the layer's state, at most 9.
    """
    if step.state_inputs is None:
        return value
    if step.state_inputs:
        return step.state_inputs[number]
    setattr(module, f"state_input_{number}", StateInput(value))
    return value

"""Section: an entry of `ForwardBatch.sections` that acts on the hidden states between layers.

Other entries are plain arrays or tuples, which the mixer that they are for looks up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch


class Note(nnx.Variable):
    """Array that a module of a layer notes in one step, beside its result."""


class ExpertLoad(Note):
    """Load of one layer and step, i32[E]: tokens of this rank that each expert was picked for."""


class Section:
    """What a step brings that is no token. Every method of this class leaves the step as it is."""

    def embed(self, x: jax.Array) -> jax.Array:
        """Return the first layer's input [T, D], made of the embeddings x [T, D] of the tokens."""
        return x

    def key_limits(self, config: ModelConfig, positions: jax.Array) -> jax.Array | None:
        """Position after the last key that each token at `positions` sees, i32[T]; None where that key is its own."""
        return None

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a layer, a function of its graph (static) and of arrays, made of the function that does so."""
        return run

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """The module that is run as layer of this number of the whole model, `module` or a copy that does more."""
        return module

    def after_layer(self, count: int, x: jax.Array) -> jax.Array:
        """Hidden states [T, D] after layer number count - 1 of the whole model, x being what the layer gave."""
        return x

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Takes note of the hidden states [T, D] after `count` layers of this stage, all sections applied.

        notes: the Notes of the last of these layers; None before the first.
        """


class Capture(Section):
    """Keeps the hidden states after chosen numbers of layers of this stage; made and read within one trace."""

    def __init__(self, counts: Sequence[int]):
        """Keep those after `counts`: 0 is the first layer's input, n what layer number n - 1 gives, before any norm."""
        self.counts = tuple(counts)
        self._found: dict[int, jax.Array] = {}

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        if count in self.counts:
            self._found[count] = x

    def after(self, count: int) -> jax.Array:
        """Hidden states [T, D] after `count` layers; KeyError for another number than those kept."""
        return self._found[count]

    def joined(self) -> jax.Array:
        """Hidden states [T, n * D] after the n counts, side by side."""
        return jnp.concatenate([self._found[count] for count in self.counts], axis=-1)


class Recompute(Section):
    """Computes each layer again for its gradient, instead of keeping what it computed (`jax.checkpoint`)."""

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(run, static_argnums=0)


class ExpertLoads(Section):
    """Counts the tokens that experts were picked for; made and read within one trace."""

    def __init__(self):
        self._loads: list[jax.Array] = []

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        for _, load in notes_of(notes, ExpertLoad):
            self.add(load[...])

    def add(self, load: jax.Array) -> None:
        """Takes note of the load i32[E] of the next layer with experts."""
        self._loads.append(load)

    def stacked(self) -> jax.Array:
        """Loads i32[layers with experts, E], in the order of the layers, of which there must be one."""
        return jnp.stack(self._loads)


def notes_of(notes: nnx.State | None, kind: type[Note]) -> list[tuple[tuple[Any, ...], Any]]:
    """The variables of a kind among the notes of a layer, each with its path in the layer."""
    flat = () if notes is None else nnx.to_flat_state(notes)
    return [(path, variable) for path, variable in flat if isinstance(variable, kind)]


def sections_of(batch: ForwardBatch) -> list[Section]:
    """Sections of a batch that act between layers."""
    return [each for each in batch.sections.values() if isinstance(each, Section)]

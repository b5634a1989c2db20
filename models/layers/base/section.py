"""Section: an entry of `ForwardBatch.sections` that acts on the hidden states between layers.

Other entries are plain arrays or tuples, which layers look up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch


class Given(nnx.Variable):
    """Variable for an array that a step passes to a layer, which is not a weight."""


class Note(nnx.Variable):
    """Array that a module of a layer records in one step, in addition to its result."""


class ExpertLoad(Note):
    """Load of one layer in one step, i32[E]: how many of this replica's tokens were routed to each expert."""


class SelectedKeys(Note):
    """Positions i32[T, k] of the keys that an indexer has selected, for later layers that use the same selection."""


class Section:
    """Base class of inputs of a step that act between layers. Each method is called at one point of the forward pass.
    The methods of the base class change nothing.
    """

    def embed(self, x: jax.Array) -> jax.Array:
        """Return the first layer's input [T, D] for token embeddings x [T, D]; in the base class x itself."""
        return x

    def key_limits(self, config: ModelConfig, positions: jax.Array) -> jax.Array | None:
        """Return for each token at `positions` the position after the last key to which it attends, i32[T]; None if
        that is the position after its own, as in the base class.
        """
        return None

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `run`, the function that runs a layer, whose first argument is static (the layer's
        graph). The base class returns `run` itself.
        """
        return run

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return the module to run as layer number `layer` of the whole model: `module` itself, as in the base class,
        or a copy that does more.
        """
        return module

    def after_layer(self, count: int, x: jax.Array) -> jax.Array:
        """Return the hidden states [T, D] that replace x, the output of layer number count - 1 of the whole model; in
        the base class x itself.
        """
        return x

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Record the hidden states x [T, D] after `count` layers of this stage, with all sections applied. The base
        class does nothing.

        notes: the Notes of the last of these layers; None before the first layer.
        """


class Capture(Section):
    """Section that records the hidden states after chosen layers of this stage. It must be created and read within the
    same trace.
    """

    def __init__(self, counts: Sequence[int]):
        """Choose the hidden states to record. counts: 0 for the first layer's input, n for the output of layer n - 1,
        before any norm.
        """
        self.counts = tuple(counts)
        self._found: dict[int, jax.Array] = {}

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Store the hidden states x [T, D] after `count` layers if these are to be recorded. notes: not used."""
        if count in self.counts:
            self._found[count] = x

    def after(self, count: int) -> jax.Array:
        """Return the recorded hidden states [T, D] after `count` layers. Raises KeyError if they were not recorded."""
        return self._found[count]

    def joined(self) -> jax.Array:
        """Return the hidden states after each of the n `counts`, in their order, concatenated to [T, n * D].

        Raises KeyError for a count that was not observed.
        """
        return jnp.concatenate([self._found[count] for count in self.counts], axis=-1)


class Recompute(Section):
    """Section that recomputes each layer's intermediate results for the gradient instead of storing them
    (`jax.checkpoint`).
    """

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run` under `jax.checkpoint`."""
        return jax.checkpoint(run, static_argnums=0)


class ExpertLoads(Section):
    """Section that collects how many tokens were routed to each expert. It must be created and read within the same
    trace.
    """

    def __init__(self):
        self._loads: list[jax.Array] = []

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Append the ExpertLoads among `notes`, if any. count, x: not used."""
        for _, load in notes_of(notes, ExpertLoad):
            self.add(load[...])

    def add(self, load: jax.Array) -> None:
        """Append the load i32[E] of the next layer with experts to those collected."""
        self._loads.append(load)

    def stacked(self) -> jax.Array:
        """Return the loads i32[layers with experts, E], in the order of the layers. Raises ValueError if there are
        none.
        """
        return jnp.stack(self._loads)


def notes_of(notes: nnx.State | None, kind: type[Note]) -> list[tuple[tuple[Any, ...], Any]]:
    """Return (path in the layer, variable) for each note of class `kind` among a layer's notes; [] if `notes` is
    None.
    """
    flat = () if notes is None else nnx.to_flat_state(notes)
    return [(path, variable) for path, variable in flat if isinstance(variable, kind)]


def sections_of(batch: ForwardBatch) -> list[Section]:
    """Return the entries of the batch's sections that act between layers, in order."""
    return [each for each in batch.sections.values() if isinstance(each, Section)]


def key_limits_of(sections: Sequence[Section], config: ModelConfig, positions: jax.Array) -> jax.Array | None:
    """Return for each token at `positions` i32[T] the largest of the sections' key limits, i32[T]; None if no section
    has any.
    """
    limits = [limit for each in sections if (limit := each.key_limits(config, positions)) is not None]
    return reduce(jnp.maximum, limits) if limits else None

"""Section: an entry of `ForwardBatch.sections` that acts on the hidden states between layers.

Other entries are plain arrays or tuples, which the layer type that they are for looks up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch


class Given(nnx.Variable):
    """Variable of an array that a step passes to a layer, and no weight."""


class Note(nnx.Variable):
    """Array that a module of a layer records in one step, in addition to its result."""


class ExpertLoad(Note):
    """Load of one layer in one step, i32[E]: tokens of this replica that each expert was picked for."""


class SelectedKeys(Note):
    """Positions i32[T, k] of the keys that an indexer has selected, for the layers after it that take its selection."""


class Section:
    """Base class of inputs of a step besides its tokens. Each method changes a point of the forward pass; those here
    change nothing.
    """

    def embed(self, x: jax.Array) -> jax.Array:
        """Return the first layer's input [T, D], made from the tokens' embeddings x [T, D]; here x itself."""
        return x

    def key_limits(self, config: ModelConfig, positions: jax.Array) -> jax.Array | None:
        """Return the position after the last key that each token at `positions` sees, i32[T]; None if that is its own
        key, as here.
        """
        return None

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that runs a layer, which takes the layer's graph (static) and arrays; return the wrapped
        function; here `run` itself.
        """
        return run

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return the module to run as layer number `layer` of the whole model: `module`, or a copy that does more; here
        `module`.
        """
        return module

    def after_layer(self, count: int, x: jax.Array) -> jax.Array:
        """Return the hidden states [T, D] to use after layer number count - 1 of the whole model, given that layer's
        output x; here x itself.
        """
        return x

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Record the hidden states x [T, D] after `count` layers of this stage, with all sections applied; here nothing
        is done.

        notes: the Notes of the last of these layers; None before the first.
        """


class Capture(Section):
    """Section that keeps the hidden states after chosen layers of this stage; made and read within one trace."""

    def __init__(self, counts: Sequence[int]):
        """Choose the hidden states to keep. counts: 0 for the first layer's input, n for the output of layer n - 1,
        before any norm.
        """
        self.counts = tuple(counts)
        self._found: dict[int, jax.Array] = {}

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        if count in self.counts:
            self._found[count] = x

    def after(self, count: int) -> jax.Array:
        """Return the hidden states [T, D] after `count` layers. Raises KeyError for a count that is not kept."""
        return self._found[count]

    def joined(self) -> jax.Array:
        """Return the hidden states after the n counts, joined: [T, n * D].

        Raises KeyError for a count that was not observed.
        """
        return jnp.concatenate([self._found[count] for count in self.counts], axis=-1)


class Recompute(Section):
    """Section that computes each layer again for its gradient, instead of storing intermediate results
    (`jax.checkpoint`).
    """

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(run, static_argnums=0)


class ExpertLoads(Section):
    """Section that collects how many tokens each expert was picked for; made and read within one trace."""

    def __init__(self):
        self._loads: list[jax.Array] = []

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        for _, load in notes_of(notes, ExpertLoad):
            self.add(load[...])

    def add(self, load: jax.Array) -> None:
        """Append the load i32[E] of the next layer with experts."""
        self._loads.append(load)

    def stacked(self) -> jax.Array:
        """Return the loads i32[layers with experts, E], in the order of the layers; raises ValueError without any."""
        return jnp.stack(self._loads)


def notes_of(notes: nnx.State | None, kind: type[Note]) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the variables of a kind among a layer's notes, each with its path in the layer. notes: None for none."""
    flat = () if notes is None else nnx.to_flat_state(notes)
    return [(path, variable) for path, variable in flat if isinstance(variable, kind)]


def sections_of(batch: ForwardBatch) -> list[Section]:
    """Return the Sections of a batch, which act between layers."""
    return [each for each in batch.sections.values() if isinstance(each, Section)]

"""Section: an entry of `ForwardBatch.sections` that acts on the hidden states between layers.

Other entries are plain arrays or tuples, which the mixer that they are for looks up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch


class Section:
    """What a step brings that is no token. Every method of this class leaves the step as it is."""

    def embed(self, x: jax.Array) -> jax.Array:
        """The first layer's input [T, D], x being the embeddings of the tokens."""
        return x

    def key_limits(self, config: ModelConfig, positions: jax.Array) -> jax.Array | None:
        """i32[T], the position after the last key that each token at `positions` sees; None: its own position is."""
        return None

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a layer, a function of its graph (static) and of arrays, made of the function that does so."""
        return run

    def after_layer(self, count: int, x: jax.Array) -> jax.Array:
        """Hidden states [T, D] after layer number count - 1 of the whole model."""
        return x

    def observe(self, count: int, x: jax.Array, load: jax.Array | None = None) -> None:
        """Takes note of the hidden states [T, D] after `count` layers, all sections applied. load: i32[E], the tokens
        that each expert of the last of these layers was picked for; None of a layer without experts."""


class Capture(Section):
    """Keeps the hidden states after chosen numbers of layers of this stage; made and read within one trace."""

    def __init__(self, counts: Sequence[int]):
        """counts: 0 is the first layer's input, n what the layer with number n - 1 gives, before any norm."""
        self.counts = tuple(counts)
        self._found: dict[int, jax.Array] = {}

    def observe(self, count: int, x: jax.Array, load: jax.Array | None = None) -> None:
        if count in self.counts:
            self._found[count] = x

    def after(self, count: int) -> jax.Array:
        """[T, D], those of one of the counts."""
        return self._found[count]

    def joined(self) -> jax.Array:
        """[T, n * D], those of the n counts side by side."""
        return jnp.concatenate([self._found[count] for count in self.counts], axis=-1)


class Recompute(Section):
    """Computes each layer again for its gradient, instead of keeping what it computed (`jax.checkpoint`)."""

    def around_layer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return jax.checkpoint(run, static_argnums=0)


class ExpertLoads(Section):
    """Counts the tokens that experts were picked for; made and read within one trace."""

    def __init__(self):
        self._loads: list[jax.Array] = []

    def observe(self, count: int, x: jax.Array, load: jax.Array | None = None) -> None:
        if load is not None:
            self._loads.append(load)

    def stacked(self) -> jax.Array:
        """i32[layers with experts, E]."""
        return jnp.stack(self._loads)


def sections_of(batch: ForwardBatch) -> list[Section]:
    """Those of a batch that act between layers."""
    return [each for each in batch.sections.values() if isinstance(each, Section)]

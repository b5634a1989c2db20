"""Steering: a section that adds vectors to activations at named points of the model (jaxengine.models.config.taps)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.config.taps import RESIDUAL, Tap
from jaxengine.models.layers.base.section import Given, Section
from jaxengine.models.layers.taps import MODULES, replace_part


class StepVectors(NamedTuple):
    """Steering vectors of a step's tokens.

    Attributes:
      vectors: f32[R, n, D], of each slot at each of n taps.
      slots: i32[T], the slot of each token; R for a token to which nothing is added.
      is_any: bool[], whether a vector is added to any token.
    """

    vectors: jax.Array
    slots: jax.Array
    is_any: jax.Array


def add_vectors(x: jax.Array, step: StepVectors, at: int) -> jax.Array:
    """Return x [T, D] plus its tokens' vectors at tap number `at` (from 0), added in float32 and rounded to x's dtype.
    Elements to which 0 is added keep their bits.
    """

    def add(x: jax.Array) -> jax.Array:
        vectors = step.vectors[:, at].at[step.slots].get(mode="fill", fill_value=0)
        return jnp.where(vectors == 0, x, (x.astype(jnp.float32) + vectors).astype(x.dtype))

    with jax.named_scope("steer"):
        return lax.cond(step.is_any, add, lambda x: x, x)


class SteeredPart(nnx.Module):
    """Part of a layer to whose output (the first one if there are several) the vectors of the only tap in `step` are
    added.
    """

    def __init__(self, module: nnx.Module, step: StepVectors):
        self.module = module
        self.vectors, self.slots, self.is_any = Given(step.vectors), Given(step.slots), Given(step.is_any)

    def __call__(self, x: jax.Array, *more: Any) -> Any:
        found = self.module(x, *more)  # type: ignore[operator]
        step = StepVectors(self.vectors[...], self.slots[...], self.is_any[...])
        if isinstance(found, tuple):
            return add_vectors(found[0], step, 0), *found[1:]
        return add_vectors(found, step, 0)


class Steering(Section):
    """Section that adds the vectors of a step to the activations at `taps`. It is created and used within one trace."""

    def __init__(self, taps: Sequence[Tap], step: StepVectors):
        self._numbers = {tap: number for number, tap in enumerate(taps)}
        self._step = step

    def embed(self, x: jax.Array) -> jax.Array:
        """Return x [T, D] with the vectors of the residual tap before the first layer added, if there is one."""
        return self.after_layer(0, x)

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return a copy of `module` whose attention or MLP adds the vectors of its taps; `module` itself if this layer
        has none.
        """
        wanted = [kind for kind in MODULES if Tap(kind, layer) in self._numbers]
        if not wanted:
            return module
        copied: Any = nnx.merge(*nnx.split(module))
        for kind in wanted:
            at = self._numbers[Tap(kind, layer)]
            # The vectors of this tap alone: equal layers then share a trace.
            own = self._step._replace(vectors=self._step.vectors[:, at : at + 1])
            replace_part(copied, kind, partial(SteeredPart, step=own))
        return copied

    def after_layer(self, count: int, x: jax.Array) -> jax.Array:
        """Return x [T, D] with the vectors of the residual tap after `count` layers added; x itself without such a
        tap.
        """
        at = self._numbers.get(Tap(RESIDUAL, count))
        return x if at is None else add_vectors(x, self._step, at)

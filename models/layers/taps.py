"""Taps: a section that keeps activations at named points of the model (jaxengine.models.config.taps)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, reduce
from typing import Any

import jax
from flax import nnx

from jaxengine.models.config.taps import ATTENTION, EXPERTS, MLP, RESIDUAL, ROUTER, Tap
from jaxengine.models.layers.base.section import Note, Section, notes_of
from jaxengine.models.layers.experts.moe import GivenExperts, MixtureOfExperts, PickedExperts, RouterLogits

# By kind of tap, the attribute of a layer whose output is recorded. A layer whose parts are elsewhere has `parts`: by
# kind, the names that lead to the part.
MODULES = {ATTENTION: "attention", MLP: "mlp"}


class AttentionOutput(Note):
    """Recorded output [T, D] of a layer's attention, or of what replaces it."""


class MLPOutput(Note):
    """Recorded output [T, D] of a layer's feed-forward part."""


_OUTPUTS: dict[str, type[Note]] = {ATTENTION: AttentionOutput, MLP: MLPOutput}


class Tapped(nnx.Module):
    """Part of a layer that also sets its attribute `output` to its output, the first one if there are several. kind: of
    the tap.
    """

    def __init__(self, module: nnx.Module, kind: str):
        self.module, self.kind = module, kind

    def __call__(self, x: jax.Array, *more: Any) -> Any:
        found = self.module(x, *more)  # type: ignore[operator]
        self.output = _OUTPUTS[self.kind](found[0] if isinstance(found, tuple) else found)
        return found


class Taps(Section):
    """Section that records the activations at taps. It is created and read within one trace."""

    def __init__(self, taps: Iterable[Tap]):
        """Set the taps to record, of any kind except FINAL_NORM, which no layer has."""
        self._taps = frozenset(taps)
        self._found: dict[Tap, jax.Array] = {}
        self._layer = 0

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return a copy of `module` whose parts record the outputs that this layer's taps need; `module` itself if it
        has no taps. Stores the layer's number for `observe`.
        """
        self._layer = layer
        wanted = [kind for kind in (*MODULES, ROUTER, EXPERTS) if Tap(kind, layer) in self._taps]
        if not wanted:
            return module
        copied: Any = nnx.merge(*nnx.split(module))
        for each in routers_of(copied):
            each.notes_logits |= ROUTER in wanted
            each.notes_experts |= EXPERTS in wanted
        for kind in wanted:
            if kind in MODULES:
                replace_part(copied, kind, partial(Tapped, kind=kind))
        return copied

    def observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Store x [T, D], the input of the current layer if `notes` is None, else its output, and the outputs, router
        logits and experts among its `notes`, as far as their taps are to be recorded.

        count: not used; the current layer is that of the last call of `tapped`, at first 0.
        """
        if notes is None:
            self._keep(Tap(RESIDUAL, self._layer), x)
            return
        self._keep(Tap(RESIDUAL, self._layer + 1), x)
        for kind, note in _OUTPUTS.items():
            for _, output in notes_of(notes, note):
                self._keep(Tap(kind, self._layer), output[...])
        for _, logits in notes_of(notes, RouterLogits):
            self._keep(Tap(ROUTER, self._layer), logits[...])
        for _, experts in notes_of(notes, PickedExperts):
            self._keep(Tap(EXPERTS, self._layer), experts[...])

    def __getitem__(self, tap: Tap) -> jax.Array:
        """Return the recorded activations at a tap, [T, width]. Raises KeyError for a tap that was not recorded."""
        return self._found[tap]

    def _keep(self, tap: Tap, x: jax.Array) -> None:
        """Store the activations x of `tap`, if it is one of those to record."""
        if tap in self._taps:
            self._found[tap] = x


class ReplayedExperts(Section):
    """Section that sends tokens to given experts. It is used within one trace."""

    def __init__(self, experts: Mapping[int, jax.Array]):
        """Set the experts. experts: for each layer, by its number, the experts i32[T, k] of the step's tokens (see
        GivenExperts).
        """
        self._experts = experts

    def tapped(self, layer: int, module: nnx.Module) -> nnx.Module:
        """Return a copy of `module` whose routers send tokens to the given experts of this layer; `module` itself if
        there are none.
        """
        if layer not in self._experts:
            return module
        copied: Any = nnx.merge(*nnx.split(module))
        for each in routers_of(copied):
            each.given = GivenExperts(self._experts[layer])
        return copied


def routers_of(layer: nnx.Module) -> list[MixtureOfExperts]:
    """Return the modules of a layer that pick experts, its MixtureOfExperts."""
    return [each for _, each in nnx.iter_modules(layer) if isinstance(each, MixtureOfExperts)]


def path_of(layer: Any, kind: str) -> tuple[str, ...]:
    """Return the names of the attributes that lead from a layer to the part of a kind in MODULES: those in the layer's
    `parts` or, for a layer without these, the usual one. It may have no such part.
    """
    parts = getattr(layer, "parts", None)
    return (MODULES[kind],) if parts is None else parts.get(kind, (MODULES[kind],))


def replace_part(layer: Any, kind: str, make: Callable[[nnx.Module], nnx.Module]) -> None:
    """Replace the part of a kind in MODULES, which the layer must have, by what `make` returns for it."""
    *names, last = path_of(layer, kind)
    holder = reduce(getattr, names, layer)
    setattr(holder, last, make(getattr(holder, last)))


def check_parts(option: str, family: str, layers: Iterable[Any], numbers: Iterable[int], taps: Iterable[Tap]) -> None:
    """Raise ValueError for a tap of an attention or MLP that its layer does not have where `path_of` says, which can
    occur in a user's own family. Other kinds of taps pass.

    option: the option that named the taps, for the error. family: the model's, for the error. numbers: the layer
    numbers of `layers`, which include those of all taps.
    """
    by_number = dict(zip(numbers, layers, strict=True))
    for tap in taps:
        if tap.kind not in MODULES:
            continue
        layer = by_number[tap.layer]
        path = path_of(layer, tap.kind)
        if not callable(reduce(lambda module, name: getattr(module, name, None), path, layer)):
            name = ".".join(path)
            raise ValueError(f"{option} names {tap.name}, but that layer of {family} has no part called {name}")

"""Taps: named points of a forward pass whose activations can be read, and most of them changed.

A name is KIND:LAYERS, such as `residual:3`; `final_norm` has no layer. Layers are numbered as in the checkpoint, from
0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

RESIDUAL, ATTENTION, MLP, ROUTER, FINAL_NORM = (
    "residual",
    "attention_output",
    "mlp_output",
    "router_logits",
    "final_norm",
)
# The experts that a router chooses. They are not activations, so this kind has no name.
EXPERTS = "experts"
KINDS = (RESIDUAL, ATTENTION, MLP, ROUTER, FINAL_NORM)
# Kinds of taps to which a steering vector can be added.
STEERED = (RESIDUAL, ATTENTION, MLP)
# Name in SamplingParams.return_hidden_states that requests hidden states.
HIDDEN_STATES = "hidden_states"
FORM = '"residual:3", "attention_output:*", "mlp_output:0-5", "router_logits:-1" or "final_norm"'
_NAME = re.compile(r"([a-z_]+):(?:(\*)|(-?\d{1,6})|(\d{1,6})-(\d{1,6}))")


class TapError(ValueError):
    """Error of an unusable name of a tap.

    Attributes:
      name: the name as given.
      allowed: text with the names that are allowed.
    """

    def __init__(self, name: Any, allowed: str):
        super().__init__(f"{name!r} names no tap; allowed: {allowed}")
        self.name, self.allowed = name, allowed


class Tap(NamedTuple):
    """Point of a forward pass.

    Attributes:
      kind: RESIDUAL is the input of this layer or, if layer is the number of layers, the output of the last one,
        before any norm. ATTENTION is the output of the layer's attention, or of what replaces it, and MLP that of its
        feed-forward part, both before the family's own norm or multiplier. ROUTER is the router's logits, EXPERTS the
        chosen experts. FINAL_NORM is the input of the LM head.
      layer: number of the layer; 0 for FINAL_NORM.
    """

    kind: str
    layer: int

    @property
    def name(self) -> str:
        """Name of the tap, in the form that `read_taps` accepts."""
        return self.kind if self.kind == FINAL_NORM else f"{self.kind}:{self.layer}"

    def width(self, model: ModelConfig) -> int:
        """Return the number of values per token at the tap: for ROUTER, which only models with experts have, the number
        of experts that it scores, otherwise the hidden size.
        """
        if self.kind != ROUTER:
            return model.hidden_size
        assert model.experts is not None
        return model.experts.num_routed


def split_names(value: Any) -> tuple[str, ...]:
    """Return names, given as a list or as one text separated by commas, as a tuple without surrounding spaces. Raises
    TypeError for any other value, and for an empty list; an empty text is one empty name.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"a list of names is needed, got {type(value).__name__}")
    return tuple(name.strip() for name in names)


def check_form(names: Iterable[str]) -> None:
    """Raise TapError for a name of a form that is valid for no model."""
    for name in names:
        found = _NAME.fullmatch(name)
        if name != FINAL_NORM and (found is None or found[1] not in (RESIDUAL, ATTENTION, MLP, ROUTER)):
            raise TapError(name, f"such as {FORM}")


def all_taps(model: ModelConfig, kinds: Sequence[str] = KINDS) -> dict[str, list[int]]:
    """Return, for each of `kinds`, the ascending list of the layers that have such a tap: for ATTENTION and MLP all
    layers that have this part, those with experts for ROUTER, [0] for FINAL_NORM. RESIDUAL has one more than there are
    layers, the last layer's output, but none in a model with several hidden states per token. Layers that attend to
    images compute their parts in some steps only, and have no such taps. Kinds that the model lacks are left out.
    """
    count, experts = model.num_layers, model.experts
    routed = [] if experts is None else [layer for layer in range(count) if layer not in experts.dense_layers]
    without = {*model.skipped_layers, *(() if model.tower is None else model.tower.crossed_layers)}
    own = [(layer, each) for layer, each in enumerate(model.attention) if layer not in without]
    found = {
        RESIDUAL: list(range(count + 1)) if model.num_streams == 1 else [],  # there are several
        ATTENTION: [layer for layer, each in own if not each.feed_forward_only],
        MLP: [layer for layer, each in own if not each.mixer_only],
        ROUTER: routed,
        FINAL_NORM: [0],
    }
    return {kind: found[kind] for kind in kinds if found[kind]}


def read_taps(
    names: Iterable[str], known: Mapping[str, Sequence[int]], model: Mapping[str, Sequence[int]] | None = None
) -> tuple[Tap, ...]:
    """Return the taps that names stand for, without repetitions, in the order of the names.

    known: existing taps, from `all_taps`; `*` stands for all layers of a kind in it, and A-B includes B. model: all
    taps of the model, from whose end negative layers count; None for `known`. Raises TapError for a name of another
    form than FORM, or with a layer that is not in `known`.
    """
    found: dict[Tap, None] = {}
    for name in names:
        check_form([name])
        match = _NAME.fullmatch(name)
        kind = FINAL_NORM if match is None else match[1]
        layers, every = known.get(kind, ()), (model or known).get(kind, ())
        wanted = layers if match is None else _wanted(match, layers, every)
        # A range may name a million layers, so its length is compared before its elements.
        if not 0 < len(wanted) <= len(layers) or not set(wanted) <= set(layers):
            is_counted = model is not None and every and ":-" in name
            end = f"; {name} counts from the end of the model's {describe({kind: every})}" if is_counted else ""
            raise TapError(name, describe(known) + end)
        found.update((Tap(kind, layer), None) for layer in wanted)
    return tuple(found)


def _wanted(match: re.Match[str], layers: Sequence[int], every: Sequence[int]) -> Sequence[int]:
    """Return the layers that a matched name stands for, whether or not they exist. layers: layers for `*`. every: all
    layers, of which -1 is the last. A negative number beyond the first layer gives an empty list.
    """
    if match[2]:
        return layers
    if match[3] is None:
        return range(int(match[4]), int(match[5]) + 1)
    number = int(match[3])
    return [number] if number >= 0 else every[number : number + 1 or None]


def describe(known: Mapping[str, Sequence[int]]) -> str:
    """Return the names of taps as one readable text, such as "residual:0-2, router_logits:1, final_norm". Kinds
    without layers are left out.
    """
    return ", ".join(
        kind if kind == FINAL_NORM else f"{kind}:{_spans(layers)}" for kind, layers in known.items() if layers
    )


def layers_of(taps: Iterable[Tap]) -> dict[str, list[int]]:
    """Return the ascending layers of these taps by kind, in the form of `all_taps`; a layer of two equal taps twice.
    Kinds without taps are left out.
    """
    found: dict[str, list[int]] = {}
    for tap in taps:
        found.setdefault(tap.kind, []).append(tap.layer)
    return {kind: sorted(found[kind]) for kind in KINDS if kind in found}


def _spans(layers: Sequence[int]) -> str:
    """Return ascending layers as a text in which runs are first-last, such as "0-2 and 5"."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return " and ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)

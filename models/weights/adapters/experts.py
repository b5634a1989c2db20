"""Adapter matrices for all experts of a layer together, as PEFT writes them if transformers has one parameter for all.

PEFT's `target_parameters` names such a parameter, [E, p, q], "...mlp.experts.gate_up_proj" ("...up_proj" of experts
without a gate) or "...mlp.experts.down_proj". Its `ParamWrapper` has one pair of matrices for it:

    lora_A  [E * r, in]     rows of an expert, then of a rank
    lora_B  [out, r * E]    columns of a rank, then of an expert

The file calls the pair `experts`; if there are two, gate_up_proj's is called `experts.base_layer`.

Which of p and q is `in` has changed with PEFT 0.19, so the pair is for the matrix of a linear layer, or for its
transpose; shapes decide, and where a matrix is square, the others of the same file do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.adapters.config import AdapterConfig
from jaxengine.models.weights.adapters.pools import AdapterTargets, ExpertTargets
from jaxengine.models.weights.adapters.tensors import ENDS, AdapterTensors
from jaxengine.models.weights.views.stacked import DOWN, GATE_UP, UP

_BELOW = ".base_layer"
_PARTS = (GATE_UP, UP, DOWN)  # in the order of transformers' modules


@dataclass(frozen=True)
class JoinedExperts:
    """One pair of a file for all experts of a layer.

    Attributes:
      name: the pair's name in the file.
      key: the configuration's name of its parameter.
      experts: targets of the layer.
      part: GATE_UP, UP or DOWN.
      size, out: inputs and outputs of the parameter's matrix of one expert.
    """

    name: str
    key: str
    experts: ExpertTargets
    part: str
    size: int
    out: int

    def count(self, tensors: AdapterTensors, rank: int) -> int:
        """Return the number of experts that the pair is for: those of the layer, or all that its router chooses from if
        A has so many rows.
        """
        own, routed = self.experts.num_experts, self.experts.num_routed
        return routed if tensors.shapes(self.name)[0][:1] == (routed * rank,) else own

    def shapes(self, tensors: AdapterTensors, rank: int, transposed: bool) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the shapes of A and B in a file, for the parameter's matrices or, if `transposed`, for their
        transposes.
        """
        size, out = (self.out, self.size) if transposed else (self.size, self.out)
        count = self.count(tensors, rank)
        return (count * rank, size), (out, rank * count)

    def read(
        self, tensors: AdapterTensors, rank: int, scale: float, transposed: bool | None
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return A [r, in] and B [out, r] of each expert's modules, by the model's name of the module.

        rank: LoRA rank of each expert. scale: factor by which B is multiplied. transposed: orientation of the file's
        matrices if their shapes do not decide it; None if it is unknown. Raises ModelFileError for other shapes, for
        numbers that are not finite, and for an unknown orientation.
        """
        shapes, wanted = tensors.shapes(self.name), [self.shapes(tensors, rank, each) for each in (False, True)]
        if shapes not in wanted:
            fits = [each for each in wanted if each[0] == shapes[0]]
            allowed = " or ".join(str(each[bool(fits)]) for each in dict.fromkeys(fits or wanted))
            name = tensors.tensor(self.name, ENDS[bool(fits)])
            raise ModelFileError(tensors.path, f"shape must be {allowed}, got {shapes[bool(fits)]}", name)
        if wanted[0] != wanted[1]:
            transposed = shapes == wanted[1]
        elif transposed is None:
            text = f"the matrices of {self.key} are square, and no others tell which of their sides are inputs"
            raise ModelFileError(tensors.path, f"{text}: save the adapter with those of single experts", self.name)
        count = self.count(tensors, rank)
        a, b = tensors.read(self.name, *shapes, scale)
        a, b = a.reshape(count, rank, -1), np.moveaxis(b.reshape(-1, rank, count), 2, 0)
        if transposed:
            a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        modules = self.experts.joined[self.part]
        return {
            module.replace("{expert}", str(expert)): (a[expert], b[expert, own])
            for module, own in zip(modules, self.experts.rows_of_parts(len(modules), self.out), strict=True)
            for expert in range(self.experts.num_experts)
        }


def find_joined(
    tensors: AdapterTensors, config: AdapterConfig, targets: AdapterTargets
) -> tuple[list[JoinedExperts], frozenset[str]]:
    """Return the pairs of a file that are for all experts of a layer, and the set of their names in the file.

    Raises ModelFileError unless the file has exactly the pairs that the configuration names, with both matrices each.
    """
    by_layer: dict[str, list[str]] = {}
    for name in tensors.modules:
        prefix = name.removesuffix(_BELOW)
        if targets.module(prefix) in targets.experts:
            by_layer.setdefault(prefix, []).append(name)
    found: list[JoinedExperts] = []
    for prefix, names in by_layer.items():
        experts = targets.experts[targets.module(prefix)]
        # The first parameter is wrapped innermost.
        parts = [part for part in _PARTS if part in experts.joined and config.wants_parameter(f"{prefix}.{part}")]
        calls = {prefix + _BELOW * depth: part for depth, part in enumerate(reversed(parts))}
        for name in names:
            if name not in calls:
                text = "the file has matrices of it, but target_parameters does not name as many of its parameters"
                raise ModelFileError(config.path, text, name)
        for name, part in calls.items():
            if name not in names:
                text = "target_parameters names it, but the file has no matrices of it"
                raise ModelFileError(config.path, text, f"{prefix}.{part}")
            if len(ends := tensors.modules[name]) != len(ENDS):
                raise ModelFileError(tensors.path, f"has {min(ends)[1:]} of it and not the other matrix", name)
            modules = experts.joined[part]
            size, out = targets.shapes[modules[0].replace("{expert}", "0")]
            found.append(JoinedExperts(name, f"{prefix}.{part}", experts, part, size, out * len(modules)))
    layers = {targets.module(prefix) for prefix in by_layer}
    for layer, experts in targets.experts.items():
        for part in filter(experts.joined.__contains__, _PARTS):
            keys = [f"{name}.{part}" for name in targets.stored_names(layer)]
            if layer not in layers and any(map(config.wants_parameter, keys)):
                text = "target_parameters names it, but the file has no matrices of it"
                raise ModelFileError(config.path, text, f"{layer}.{part}")
    return found, frozenset(name for names in by_layer.values() for name in names)


def is_transposed(tensors: AdapterTensors, joined: Iterable[JoinedExperts], ranks: Mapping[str, int]) -> bool | None:
    """Return whether the pairs of a file are for transposed matrices, A [experts * rank, out] instead of [experts *
    rank, in].

    Only matrices that are not square decide; None if there are none, or if they disagree. joined: the pairs of the
    file. ranks: LoRA ranks by JoinedExperts.key.
    """
    tells = set()
    for each in (pair for pair in joined if pair.size != pair.out):
        straight, turned = (each.shapes(tensors, ranks[each.key], transposed) for transposed in (False, True))
        if (found := tensors.shapes(each.name)) in (straight, turned):
            tells.add(found == turned)
    return tells.pop() if len(tells) == 1 else None

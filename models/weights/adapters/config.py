"""Reader of an adapter_config.json in PEFT's format: every field is checked before any of it is used.

PEFT matches names in its `check_target_module_exists`, `_inject_parameters` and `get_pattern_key`, and scales in its
`LoraLayer.update_layer`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.rules import pattern_fault
from jaxengine.models.weights.adapters.pools import AdapterTargets

_ALL_LINEAR = "all-linear"
_MAX_NAMES, _MAX_NAME = 1 << 14, 512
# Each expression is tried on each module.
_MAX_EXPRESSIONS = 256
_NAME = re.compile(r"[\w.-]+")
# Fields that do not affect the adapter's results, or are read below.
_SILENT = frozenset(
    [
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "peft_version",
        "runtime_config",
        "eva_config",
        "corda_config",
        "loftq_config",
        "megatron_core",
        "qalora_group_size",
        "lora_ga_config",
    ]
)
# Initialisations that change the base model's own weights too, unless PEFT converts the adapter when saving.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterConfig:
    """A checked adapter_config.json."""

    def __init__(self, path: Path, raw: Mapping[str, Any]):
        self.path = path
        if (kind := raw.get("peft_type")) != "LORA":
            raise ModelFileError(path, f"peft_type must be 'LORA', got {short(kind)}", "peft_type")
        for name, value in raw.items():
            if name not in _SILENT and value and not (name == "bias" and value == "none"):
                raise ModelFileError(path, f"{name[:60]} is {short(value)}, which is not supported", name)
        if raw.get("bias", "none") != "none":
            raise ModelFileError(path, f"bias must be 'none', got {short(raw['bias'])}", "bias")
        begun = raw.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
            what = f"init_lora_weights is {short(begun)}, which changes the base model: convert the adapter with PEFT"
            raise ModelFileError(path, what, "init_lora_weights")
        self._r = self._rank("r", raw.get("r", 8))
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha", 8))
        self._ranks = self._pattern(raw, "rank_pattern", self._rank)
        self._alphas = self._pattern(raw, "alpha_pattern", self._number)
        rslora = raw.get("use_rslora")
        if rslora is not None and type(rslora) is not bool:
            raise ModelFileError(path, f"use_rslora must be true or false, got {short(rslora)}", "use_rslora")
        self._root = bool(rslora)
        self._targets, self._parameters = self._names(raw, "target_modules"), self._names(raw, "target_parameters")
        if isinstance(self._parameters, str):
            what = f"target_parameters must be a list of names, got {short(self._parameters)}"
            raise ModelFileError(path, what, "target_parameters")
        if not self._targets and not self._parameters:
            raise ModelFileError(path, "target_modules must name what is changed, got nothing", "target_modules")
        self._excluded = self._names(raw, "exclude_modules")
        self._layers = self._layer_numbers(raw)

    def key_of(self, name: str) -> str:
        """Name under which patterns match a module of the file: that of its weight, if the weight is what is
        targeted."""
        return f"{name}.weight" if not self.wants(name) and self.wants_parameter(f"{name}.weight") else name

    def rank_of(self, name: str) -> int:
        """Rank of the module, or the parameter, with this name in the file."""
        return self._ranks.find(name, self._r)

    def scale_of(self, name: str, rank: int) -> float:
        """Factor of B, as in Kalajdzievski 2023, arXiv:2312.03732, with rslora."""
        return self._alphas.find(name, self._alpha) / (math.sqrt(rank) if self._root else rank)

    def wants(self, name: str) -> bool:
        """Whether target_modules names the module with this name in the file."""
        if self._excluded and _matches(self._excluded, name):
            return False
        if self._layers is not None:
            # The first number of a name is the layer's, a later one may be the expert's.
            number = re.match(r".*?\.[^.]*\.([0-9]+)\.", name)
            if number is None or int(number[1]) not in self._layers:
                return False
        return _matches(self._targets, name)

    def wants_parameter(self, name: str) -> bool:
        """Whether target_parameters names this parameter of the file, by a suffix that begins at a dot."""
        return _matches(self._parameters, name)

    def check_modules(self, stored: Mapping[str, str], parameters: Collection[str], targets: AdapterTargets) -> None:
        """Raise ModelFileError unless the file has the matrices of all modules that the configuration names, and of no
        others.

        Single experts may be left out.

        stored: the model's names, and those of the file. parameters: the file's other entries, all of them named.
        """
        for name in stored.values():
            if not self.wants(name) and not self.wants_parameter(f"{name}.weight"):
                raise ModelFileError(
                    self.path, "the file has matrices of it, but target_modules does not name it", name
                )
        named = "{} names it, but the file has no matrices of it"
        for module in targets.shapes:
            if module in stored or targets.is_expert(module):
                continue
            names = targets.stored_names(module)
            if self._targets != _ALL_LINEAR and any(map(self.wants, names)):
                raise ModelFileError(self.path, named.format("target_modules"), module)
            if any(self.wants_parameter(f"{name}.weight") for name in names):
                raise ModelFileError(self.path, named.format("target_parameters"), module)
        ends = {end for name in stored.values() for end in _ends(name)}
        if isinstance(self._targets, frozenset) and (missing := sorted(self._targets - ends)):
            raise ModelFileError(self.path, named.format("target_modules"), missing[0])
        ends = {end for name in (*parameters, *(f"{name}.weight" for name in stored.values())) for end in _ends(name)}
        if missing := sorted(frozenset(self._parameters) - ends):
            raise ModelFileError(self.path, named.format("target_parameters"), missing[0])

    def _names(self, raw: Mapping[str, Any], field: str) -> str | frozenset[str]:
        """Read names, a regular expression, or "all-linear"."""
        value = raw.get(field) or []
        if isinstance(value, str):
            if value != _ALL_LINEAR:
                self._check_pattern(field, value)
            return value
        if not isinstance(value, list) or len(value) > _MAX_NAMES:
            raise ModelFileError(self.path, f"{field} must be a list of names or a text, got {short(value)}", field)
        for name in value:
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
                what = f"{field} must hold names of 1 to {_MAX_NAME} characters, got {short(name)}"
                raise ModelFileError(self.path, what, field)
        return frozenset(value)

    def _pattern(self, raw: Mapping[str, Any], field: str, read: Callable[[str, Any], Any]) -> _Patterns:
        value = raw.get(field) or {}
        if not isinstance(value, dict) or len(value) > _MAX_NAMES:
            raise ModelFileError(
                self.path, f"{field} must be an object of names and numbers, got {short(value)}", field
            )
        for pattern in value:
            self._check_pattern(field, pattern)
        patterns = _Patterns({pattern: read(field, number) for pattern, number in value.items()})
        if patterns.num_expressions > _MAX_EXPRESSIONS:
            what = f"{field} must have at most {_MAX_EXPRESSIONS} expressions that are no plain names"
            raise ModelFileError(self.path, f"{what}, got {patterns.num_expressions}", field)
        return patterns

    def _check_pattern(self, field: str, pattern: str) -> None:
        if fault := pattern_fault(pattern):
            raise ModelFileError(self.path, f"{field} must hold {fault}, got {short(pattern)}", field)

    def _layer_numbers(self, raw: Mapping[str, Any]) -> frozenset[int] | None:
        value = raw.get("layers_to_transform")
        if value is None or value == []:
            return None
        value = [value] if type(value) is int else value
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            what = f"layers_to_transform must be whole numbers, got {short(value)}"
            raise ModelFileError(self.path, what, "layers_to_transform")
        return frozenset(value)

    def _rank(self, field: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= 1 << 16:
            raise ModelFileError(self.path, f"{field} must be a whole number of at least 1, got {short(value)}", field)
        return value

    def _number(self, field: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e9:
            raise ModelFileError(self.path, f"{field} must be a number below 1e9, got {short(value)}", field)
        return float(value)


def _ends(name: str) -> list[str]:
    """List a name, and each of its suffixes that follow a dot."""
    return [name, *(name[dot.end() :] for dot in re.finditer(r"\.", name))]


def _matches(wanted: str | frozenset[str], name: str) -> bool:
    if wanted == _ALL_LINEAR:
        return True
    if isinstance(wanted, str):
        return bool(re.fullmatch(wanted, name))
    return not wanted.isdisjoint(_ends(name))


class _Patterns:
    """Values by regular expressions, most of which are plain names.

    Attributes:
      num_expressions: number of those that are not.
    """

    def __init__(self, values: Mapping[str, Any]):
        numbered = [(number, *pair) for number, pair in enumerate(values.items())]
        self._names = {key: (number, value) for number, key, value in numbered if _NAME.fullmatch(key)}
        self._others = [(number, re.compile(key), value) for number, key, value in numbered if key not in self._names]
        self.num_expressions = len(self._others)

    def find(self, name: str, default: Any) -> Any:
        """Value of the first pattern that matches the name or one of its suffixes after a dot."""
        ends = _ends(name)
        first = min((self._names[end] for end in ends if end in self._names), key=lambda found: found[0], default=None)
        for number, pattern, value in self._others:
            if first is not None and first[0] < number:
                break
            if any(pattern.fullmatch(end) for end in ends):
                return value
        return default if first is None else first[1]


def short(value: Any) -> str:
    """Shorten a value from a file for an error."""
    return repr(value if isinstance(value, (str, int, float)) else json.dumps(value, default=str))[:100]

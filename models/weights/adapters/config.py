"""Reader of an adapter_config.json in PEFT's format: every field is checked before any of it is used.

As in PEFT, names that match no module of the model are ignored, since the same names serve models of all kinds. PEFT
matches names in its `check_target_module_exists`, `_inject_parameters` and `get_pattern_key`, and scales in its
`LoraLayer.update_layer`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxengine.models.config.readers.name_patterns import Effort, NamePattern, PatternError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.adapters.pools import AdapterTargets

_ALL_LINEAR = "all-linear"
_MAX_NAMES, _MAX_NAME = 1 << 14, 512
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
        "modules_to_save",
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
        "fan_in_fan_out",
        "peft_version",
        "runtime_config",
        "eva_config",
        "corda_config",
        "loftq_config",
        "megatron_core",
        "qalora_group_size",
        "lora_ga_config",
        "ensure_weight_tying",  # of tables and heads, which no adapter may change
    ]
)
# Initialisations that change the base model's own weights too, unless PEFT converts the adapter when saving.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterConfig:
    """Content of an adapter_config.json, checked. Raises ModelFileError, which names `path`, for an invalid file or an
    unsupported option; fields that are not known must be absent, null, false, 0 or empty. `r` and lora_alpha are by
    default 8.

    Names of modules are those of the adapter's file, unless stated otherwise. Methods raise ModelFileError, too, if
    matching the file's expressions takes too many steps.

    Attributes:
      largest_rank: the largest LoRA rank that a module can have.
    """

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
        self._effort, self._wanted = Effort(), dict[str, bool]()
        self._r = self._rank("r", raw.get("r", 8))
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha", 8))
        self._ranks = self._pattern(raw, "rank_pattern", self._rank)
        self.largest_rank = max((self._r, *self._ranks.values))
        self._alphas = self._pattern(raw, "alpha_pattern", self._number)
        rslora = raw.get("use_rslora")
        if rslora is not None and type(rslora) is not bool:
            raise ModelFileError(path, f"use_rslora must be true or false, got {short(rslora)}", "use_rslora")
        self._root = bool(rslora)
        self._targets, self._parameters = self._names(raw, "target_modules"), self._list(raw, "target_parameters")
        if not self._targets and not self._parameters:
            raise ModelFileError(path, "target_modules must name what is changed, got nothing", "target_modules")
        # Phi-4-multimodal's expression is of modules of the model without its head, and its tensors are of the whole.
        # No other expression may match so: one like (?!model\.layers\.0\.).* would match what it leaves out.
        wanted = raw.get("target_modules")
        self._is_headless = isinstance(wanted, str) and wanted.lstrip("^(?:").startswith("layers")
        self._excluded = self._names(raw, "exclude_modules")
        saved = sorted(self._list(raw, "modules_to_save"))
        self._saved = [self._expression("modules_to_save", rf"(?:.*\.)?(?:{name})(?:\..*)?") for name in saved]
        self._layers, self._layer_lists = self._layer_numbers(raw), self._layers_pattern(raw)

    def key_of(self, name: str) -> str:
        """Return the name by which patterns match a module of the file: the name of its weight if that is targeted as a
        parameter, otherwise the module's own name.

        Raises ModelFileError if expressions take too many steps.
        """
        return f"{name}.weight" if not self.wants(name) and self.wants_parameter(f"{name}.weight") else name

    def rank_of(self, name: str) -> int:
        """Return the LoRA rank of the module, or the parameter, with this name in the file: that of rank_pattern,
        otherwise `r`.

        Raises ModelFileError if expressions take too many steps.
        """
        return self._ranks.find(name, self._r)

    def scale_of(self, name: str, rank: int) -> float:
        """Return the factor of B: alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski 2023,
        arXiv:2312.03732), where alpha is that of alpha_pattern, otherwise lora_alpha.

        name: the module, or the parameter, in the file. Raises ModelFileError if expressions take too many steps.
        """
        return self._alphas.find(name, self._alpha) / (math.sqrt(rank) if self._root else rank)

    def wants(self, name: str) -> bool:
        """Return whether PEFT changes the module with this name in the file, if the model has it: target_modules names
        it, it is in layers_to_transform, and exclude_modules and modules_to_save do not name it. An expression in
        target_modules that begins with "layers" is matched with the name without a leading "model.".

        Results are cached. Raises ModelFileError if expressions take too many steps.
        """
        if (known := self._wanted.get(name)) is None:
            headless = name.removeprefix("model.") if self._is_headless else name
            known = self._matches("target_modules", self._targets, headless) and self._is_in_layers(name)
            known = known and not self._matches("exclude_modules", self._excluded, name) and not self._is_saved(name)
            self._wanted[name] = known
        return known

    def wants_parameter(self, name: str) -> bool:
        """Return whether target_parameters has this parameter of the file, or a suffix of its name that begins after a
        dot.
        """
        return not self._parameters.isdisjoint(_ends(name))

    def check_saved(self, targets: AdapterTargets) -> None:
        """Raise ModelFileError if modules_to_save names a module of the model, which the adapter would then replace, or
        if expressions take too many steps.
        """
        for module in (*targets.shapes, *targets.others) if self._saved else ():
            if any(map(self._is_saved, targets.stored_names(module))):
                what = "modules_to_save names it, which is not supported: merge the adapter into its model"
                raise ModelFileError(self.path, what, module)

    def faults_of_modules(
        self, stored: Mapping[str, str], held: Collection[str], targets: AdapterTargets
    ) -> Iterator[ModelFileError]:
        """Yield an error for each module that the file has and the configuration does not name, and then for each
        module of the model that the configuration names and the file lacks.

        Names that match no module of this model are ignored, and with "all-linear" the file need not have any. A module
        is excluded if any of the names that files may have for it is. Single experts may be missing, because
        transformers may store them as one parameter. stored: for each module in the file that may be there, by the
        model's name, the file's name of it. held: the model's names of all modules in the file. Raises ModelFileError
        if expressions take too many steps.
        """
        for name in stored.values():
            if not self.wants(name) and not self.wants_parameter(f"{name}.weight"):
                yield ModelFileError(
                    self.path, "the file has matrices of it, but target_modules does not name it", name
                )
        named = "{} names it, but the file has no matrices of it"
        found = {*held, *(part for name in held for part in targets.wholes.get(name, ()))}
        found |= {whole for whole, parts in targets.wholes.items() if found.issuperset(parts)}
        for module in (*targets.shapes, *targets.parts, *targets.wholes, *sorted(targets.others)):
            if module in found or module in targets.experts or targets.is_expert(module):
                continue
            names = targets.stored_names(module)
            excluded = any(self._matches("exclude_modules", self._excluded, name) for name in names)
            if self._targets != _ALL_LINEAR and not excluded and any(map(self.wants, names)):
                yield ModelFileError(self.path, named.format("target_modules"), module)
            elif any(self.wants_parameter(f"{name}.weight") for name in names):
                yield ModelFileError(self.path, named.format("target_parameters"), module)

    def _is_saved(self, name: str) -> bool:
        """Return whether modules_to_save names the module with this name in the file.

        Raises ModelFileError if expressions take too many steps.
        """
        return any(self._fits("modules_to_save", each, name) for each in self._saved)

    def _is_in_layers(self, name: str) -> bool:
        """Return whether the module with this name in the file is in one of layers_to_transform.

        Returns True also without that field, if target_modules is not a list, and for a name that the list has as a
        whole. Raises ModelFileError if expressions take too many steps.
        """
        if self._layers is None or not isinstance(self._targets, frozenset) or name in self._targets:
            return True
        # Of several numbers of a name, the first is the layer's, a later one may be the expert's.
        for number in re.finditer(r"(?<=\.)[0-9]+(?=\.)", name):
            before = name[: number.start() - 1]
            if any(self._fits("layers_pattern", each, before) for each in self._layer_lists):
                return int(number[0]) in self._layers
        return False

    def _matches(self, field: str, wanted: str | NamePattern | frozenset[str], name: str) -> bool:
        """Return whether `wanted`, the value that `_names` read from `field`, matches a module's name: a set by the
        name or a suffix of it after a dot, an expression as a whole, and "all-linear" always.

        Raises ModelFileError if expressions take too many steps.
        """
        if isinstance(wanted, frozenset):
            return not wanted.isdisjoint(_ends(name))
        return isinstance(wanted, str) or self._fits(field, wanted, name)

    def _fits(self, field: str, pattern: NamePattern, name: str) -> bool:
        """Return whether an expression of `field` matches the whole name. Uses up steps of the file's budget, and
        raises ModelFileError if they do not suffice.
        """
        try:
            return pattern.fullmatch(name, self._effort)
        except PatternError as error:
            raise ModelFileError(self.path, f"{field} must hold {error}", field) from None

    def _names(self, raw: Mapping[str, Any], field: str) -> str | NamePattern | frozenset[str]:
        """Return the value of a field that names modules: for a list the set of its names (empty if the field is absent
        or "", which PEFT takes for the same), for a text a regular expression, or "all-linear" unchanged.

        raw: the adapter_config.json. Raises ModelFileError for anything else.
        """
        value = raw.get(field)
        if not isinstance(value, str):
            return self._list(raw, field)
        if not value:
            return frozenset()
        return value if value == _ALL_LINEAR else self._expression(field, value)

    def _list(self, raw: Mapping[str, Any], field: str) -> frozenset[str]:
        """Return the names in a field that is a list; an empty set if it is absent. Raises ModelFileError for anything
        else, and for too many or too long names.
        """
        value = [] if raw.get(field) is None else raw[field]
        if not isinstance(value, list) or len(value) > _MAX_NAMES:
            raise ModelFileError(self.path, f"{field} must be a list of names, got {short(value)}", field)
        for name in value:
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
                what = f"{field} must hold names of 1 to {_MAX_NAME} characters, got {short(name)}"
                raise ModelFileError(self.path, what, field)
        return frozenset(value)

    def _pattern(self, raw: Mapping[str, Any], field: str, read: Callable[[str, Any], Any]) -> _Patterns:
        """Return the values of a field that maps names or regular expressions to numbers.

        read: function of (field name, number) that returns the checked number. Raises ModelFileError for anything else,
        and for too many names; errors of `read` are passed on.
        """
        value = {} if raw.get(field) is None else raw[field]
        if not isinstance(value, dict) or len(value) > _MAX_NAMES:
            raise ModelFileError(
                self.path, f"{field} must be an object of names and numbers, got {short(value)}", field
            )
        numbers = {name: read(field, number) for name, number in value.items()}
        # PEFT's get_pattern_key.
        others = {name: self._expression(field, rf"(?:.*\.)?(?:{name})") for name in value if not _NAME.fullmatch(name)}
        return _Patterns(numbers, others, partial(self._fits, field))

    def _expression(self, field: str, source: str) -> NamePattern:
        """Return the NamePattern of a regular expression in the file. Raises ModelFileError, which names the field, if
        it is not supported.
        """
        try:
            return NamePattern(source)
        except PatternError as error:
            raise ModelFileError(self.path, f"{field} must hold {error}, got {short(source)}", field) from None

    def _layers_pattern(self, raw: Mapping[str, Any]) -> list[NamePattern]:
        """Return expressions that match the names of lists of layers, from `layers_pattern`; without that field, one
        that matches any name. Raises ModelFileError for an invalid field.
        """
        value = raw.get(field := "layers_pattern")
        listed = ([value] if value else []) if isinstance(value, str) else value
        names = sorted(self._list({field: listed}, field))
        return [self._expression(field, rf".*\.(?:{name})") for name in names or [r"[^.]*"]]

    def _layer_numbers(self, raw: Mapping[str, Any]) -> frozenset[int] | None:
        """Return the layer numbers in layers_to_transform; None, which means all layers, if it is absent or empty.
        Raises ModelFileError for anything but an integer >= 0 or a list of them.
        """
        value = raw.get("layers_to_transform")
        if value is None or value == []:
            return None
        value = [value] if type(value) is int else value
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            what = f"layers_to_transform must be whole numbers, got {short(value)}"
            raise ModelFileError(self.path, what, "layers_to_transform")
        return frozenset(value)

    def _rank(self, field: str, value: Any) -> int:
        """Return `value`, a LoRA rank from 1 to 2^16. Raises ModelFileError, which names the field, for anything
        else.
        """
        if type(value) is not int or not 1 <= value <= 1 << 16:
            raise ModelFileError(self.path, f"{field} must be a whole number of 1 to 2^16, got {short(value)}", field)
        return value

    def _number(self, field: str, value: Any) -> float:
        """Return `value` as a float; it must be a number above -1e9 and below 1e9. Raises ModelFileError, which
        names the field, for anything else.
        """
        if type(value) not in (int, float) or not abs(value) < 1e9:
            raise ModelFileError(self.path, f"{field} must be a number between -1e9 and 1e9, got {short(value)}", field)
        return float(value)


def _ends(name: str) -> list[str]:
    """Return the name itself, and each of its suffixes that follow a dot."""
    return [name, *(name[dot.end() :] for dot in re.finditer(r"\.", name))]


class _Patterns:
    """Values by regular expressions, most of which are plain names.

    values: by key, in the file's order. others: expressions by the keys that are not plain names. fits: function that
    returns whether an expression matches a name.

    Attributes:
      values: list of all values.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        others: Mapping[str, NamePattern],
        fits: Callable[[NamePattern, str], bool],
    ):
        self.values = list(values.values())
        numbered = [(number, *pair) for number, pair in enumerate(values.items())]
        self._names = {key: (number, value) for number, key, value in numbered if key not in others}
        self._others = [(number, others[key], value) for number, key, value in numbered if key in others]
        self._fits = fits

    def find(self, name: str, default: Any) -> Any:
        """Return the value of the first pattern, in the file's order, that matches the name; `default` if none does.

        A plain pattern matches the name, or a suffix of it after a dot; an expression must match the whole name. Errors
        of `fits` are passed on.
        """
        found = (self._names[end] for end in _ends(name) if end in self._names)
        first = min(found, key=lambda each: each[0], default=None)
        for number, pattern, value in self._others:
            if first is not None and first[0] < number:
                break
            if self._fits(pattern, name):
                return value
        return default if first is None else first[1]


def short(value: Any) -> str:
    """Return the repr of a value from a file (of its JSON if it is a list, an object or null) for an error, at most 100
    characters.
    """
    return repr(value if isinstance(value, (str, int, float)) else json.dumps(value, default=str))[:100]

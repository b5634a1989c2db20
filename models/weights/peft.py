"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

The files are written by others: every field, count, name, shape and number is checked before any of it is used, and
whatever is wrong is one ModelFileError. What is not built is refused by its name. How PEFT matches names: its
`check_target_module_exists` and `get_pattern_key`; how it scales: its `LoraLayer.update_layer`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from models.quantization.rules import pattern_fault
from models.weights.errors import ModelFileError
from models.weights.files import inside, read_object
from models.weights.lora_pools import AdapterTargets
from models.weights.safetensors import PICKLE_SUFFIXES, SafetensorsCheckpoint
from models.weights.source import renamed

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _ENDS = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
_ALL_LINEAR = "all-linear"
_MAX_CONFIG_BYTES, _MAX_NAMES, _MAX_NAME = 1 << 20, 1 << 14, 512
# Fields that say nothing of what the adapter computes.
_SILENT = frozenset(
    [
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "target_modules",
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
# Ways of beginning that change the base model's own weights too, unless PEFT converts what it saves.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter, read and checked.

    Attributes:
      rank: the largest of its matrices.
      digest: SHA-256 of all that it computes with.
      matrices: by module of the model, A [r, in] and B [out, r] with the scale folded in, in the model's dtype.
    """

    path: str
    rank: int
    digest: bytes
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @property
    def num_bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())


def read_adapter(folder: str | os.PathLike[str], targets: AdapterTargets, max_rank: int, dtype: Any) -> AdapterWeights:
    """Reads an adapter for a model. Raises ModelFileError; nothing has changed then."""
    folder, dtype = Path(folder), jnp.dtype(dtype)
    raw = read_object(folder, CONFIG_FILE, _MAX_CONFIG_BYTES)
    if raw is None:
        raise ModelFileError(folder, f"has no {CONFIG_FILE}: name the folder that PEFT has saved")
    config = _Config(folder / CONFIG_FILE, raw)
    checkpoint = SafetensorsCheckpoint(_weights_file(folder))
    try:
        stored = _stored_modules(checkpoint, targets)
        ranks = {module: config.rank_of(name) for module, name in stored.items()}
        if (rank := max(ranks.values())) > max_rank:
            raise ModelFileError(config.path, f"rank is {rank}; allowed is at most {max_rank} (max_lora_rank)", "r")
        config.check_modules(stored, targets)
        digest, matrices = hashlib.sha256(), {}
        for module, name in sorted(stored.items()):
            size, out = targets.shapes[module]
            a, b = (
                _read(checkpoint, f"{_PREFIX}{name}{end}", shape)
                for end, shape in zip(_ENDS, ((ranks[module], size), (out, ranks[module])), strict=True)
            )
            scale = config.scale_of(name, ranks[module])
            matrices[module] = (
                _finite(checkpoint.path, name, a, 1.0, dtype),
                _finite(checkpoint.path, name, b, scale, dtype),
            )
            digest.update(f"{module} {a.shape} {b.shape} {dtype}\n".encode())
            for matrix in matrices[module]:
                digest.update(np.ascontiguousarray(matrix).view(np.uint8).data)
        return AdapterWeights(str(folder), rank, digest.digest(), matrices)
    finally:
        checkpoint.close()


class _Config:
    """A checked adapter_config.json."""

    def __init__(self, path: Path, raw: Mapping[str, Any]):
        self.path = path
        if (kind := raw.get("peft_type")) != "LORA":
            raise ModelFileError(path, f"peft_type must be 'LORA', got {_short(kind)}", "peft_type")
        for name, value in raw.items():
            if name not in _SILENT and value and not (name == "bias" and value == "none"):
                raise ModelFileError(path, f"{name[:60]} is {_short(value)}, which is not supported", name)
        if raw.get("bias", "none") != "none":
            raise ModelFileError(path, f"bias must be 'none', got {_short(raw['bias'])}", "bias")
        begun = raw.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
            what = f"init_lora_weights is {_short(begun)}, which changes the base model: convert the adapter with PEFT"
            raise ModelFileError(path, what, "init_lora_weights")
        self._r = self._rank("r", raw.get("r", 8))
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha", 8))
        self._ranks = self._pattern(raw, "rank_pattern", self._rank)
        self._alphas = self._pattern(raw, "alpha_pattern", self._number)
        rslora = raw.get("use_rslora")
        if rslora is not None and type(rslora) is not bool:
            raise ModelFileError(path, f"use_rslora must be true or false, got {_short(rslora)}", "use_rslora")
        self._root = bool(rslora)
        self._targets = self._names(raw, "target_modules")
        if not self._targets:
            raise ModelFileError(path, "target_modules must name what is changed, got nothing", "target_modules")
        self._excluded = self._names(raw, "exclude_modules")
        self._layers = self._layer_numbers(raw)

    def rank_of(self, name: str) -> int:
        """Of the module that the file calls so."""
        return _by_pattern(self._ranks, name, self._r)

    def scale_of(self, name: str, rank: int) -> float:
        """What B is multiplied with: Kalajdzievski 2023, arXiv:2312.03732, where rslora is asked for."""
        return _by_pattern(self._alphas, name, self._alpha) / (math.sqrt(rank) if self._root else rank)

    def check_modules(self, stored: Mapping[str, str], targets: AdapterTargets) -> None:
        """Raises unless the file has the matrices of all modules that the configuration names, and of no others.

        stored: the model's names, and those of the file.
        """
        for name in stored.values():
            if not self._wants(name):
                raise ModelFileError(
                    self.path, "the file has matrices of it, but target_modules does not name it", name
                )
        for module in targets.shapes:
            names = [module, *(old + module[len(new) :] for old, new in targets.prefixes if module.startswith(new))]
            if module not in stored and self._targets != _ALL_LINEAR and any(map(self._wants, names)):
                raise ModelFileError(self.path, "target_modules names it, but the file has no matrices of it", module)
        if isinstance(self._targets, list):
            for target in self._targets:
                if not any(_is_named(name, [target]) for name in stored.values()):
                    raise ModelFileError(
                        self.path, "target_modules names it, but the file has no matrices of it", target
                    )

    def _wants(self, name: str) -> bool:
        if self._excluded and self._matches(self._excluded, name):
            return False
        if self._layers is not None:
            number = re.match(r".*\.[^.]*\.([0-9]+)\.", name)
            if number is None or int(number[1]) not in self._layers:
                return False
        return self._matches(self._targets, name)

    @staticmethod
    def _matches(wanted: str | list[str], name: str) -> bool:
        if wanted == _ALL_LINEAR:
            return True
        return bool(re.fullmatch(wanted, name)) if isinstance(wanted, str) else _is_named(name, wanted)

    def _names(self, raw: Mapping[str, Any], field: str) -> str | list[str]:
        """A list of names, a regular expression, or "all-linear"."""
        value = raw.get(field) or []
        if isinstance(value, str):
            if value != _ALL_LINEAR:
                self._check_pattern(field, value)
            return value
        if not isinstance(value, list) or len(value) > _MAX_NAMES:
            raise ModelFileError(self.path, f"{field} must be a list of names or a text, got {_short(value)}", field)
        for name in value:
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
                what = f"{field} must hold names of 1 to {_MAX_NAME} characters, got {_short(name)}"
                raise ModelFileError(self.path, what, field)
        return value

    def _pattern(self, raw: Mapping[str, Any], field: str, read: Callable[[str, Any], Any]) -> dict[str, Any]:
        value = raw.get(field) or {}
        if not isinstance(value, dict) or len(value) > _MAX_NAMES:
            raise ModelFileError(
                self.path, f"{field} must be an object of names and numbers, got {_short(value)}", field
            )
        for pattern in value:
            self._check_pattern(field, pattern)
        return {pattern: read(field, number) for pattern, number in value.items()}

    def _check_pattern(self, field: str, pattern: str) -> None:
        if fault := pattern_fault(pattern):
            raise ModelFileError(self.path, f"{field} must hold {fault}, got {_short(pattern)}", field)

    def _layer_numbers(self, raw: Mapping[str, Any]) -> frozenset[int] | None:
        value = raw.get("layers_to_transform")
        if value is None:
            return None
        value = [value] if type(value) is int else value
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            what = f"layers_to_transform must be whole numbers, got {_short(value)}"
            raise ModelFileError(self.path, what, "layers_to_transform")
        return frozenset(value)

    def _rank(self, field: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= 1 << 16:
            raise ModelFileError(self.path, f"{field} must be a whole number of at least 1, got {_short(value)}", field)
        return value

    def _number(self, field: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e9:
            raise ModelFileError(self.path, f"{field} must be a number below 1e9, got {_short(value)}", field)
        return float(value)


def _weights_file(folder: Path) -> Path:
    path = inside(folder, WEIGHTS_FILE)
    if path.exists():
        return path
    if any(file.suffix in PICKLE_SUFFIXES for file in folder.iterdir()):
        raise ModelFileError(folder, "holds pickle weights, which can run code and are never read: use safetensors")
    raise ModelFileError(folder, f"has no {WEIGHTS_FILE}")


def _stored_modules(checkpoint: SafetensorsCheckpoint, targets: AdapterTargets) -> dict[str, str]:
    """The modules that the file has both matrices of: the model's name, and the file's."""
    found: dict[str, set[str]] = {}
    for tensor in checkpoint.names():
        end = next((end for end in _ENDS if tensor.endswith(end)), None)
        if end is None or not tensor.startswith(_PREFIX):
            what = f"a tensor must be called {_PREFIX}NAME{_ENDS[0]} or {_ENDS[1]}: nothing else is supported"
            raise ModelFileError(checkpoint.path, what, tensor)
        found.setdefault(tensor[len(_PREFIX) : -len(end)], set()).add(end)
    if not found:
        raise ModelFileError(checkpoint.path, "holds no matrices")
    stored: dict[str, str] = {}
    for name in found:
        module = renamed(name, targets.prefixes)
        if module not in targets.shapes:
            raise ModelFileError(checkpoint.path, _why_not(module, targets), name)
        if module in stored:
            raise ModelFileError(checkpoint.path, f"stands for {module}, as does {stored[module]}", name)
        stored[module] = name
    for name, ends in found.items():
        if len(ends) != len(_ENDS):
            raise ModelFileError(checkpoint.path, f"has {min(ends)[1:]} of it and not the other matrix", name)
    return stored


def _why_not(module: str, targets: AdapterTargets) -> str:
    if ".experts" in module:
        return "adapters of experts are not supported"
    if module in targets.others:
        return "the model has it, but adapters of it are not supported"
    return "the model has no such module: the adapter is for another base model"


def _read(checkpoint: SafetensorsCheckpoint, tensor: str, shape: tuple[int, int]) -> np.ndarray:
    found = tuple(checkpoint.shape(tensor))
    if found != shape:
        raise ModelFileError(checkpoint.path, f"shape must be {shape}, got {found}", tensor)
    array = checkpoint.read(tensor)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ModelFileError(checkpoint.path, f"must hold floating-point numbers, got {array.dtype}", tensor)
    return array.astype(np.float32, copy=False)


def _finite(path: str, name: str, matrix: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = (matrix * np.float32(scale)).astype(dtype, copy=False)
    if not np.isfinite(rounded.astype(np.float32, copy=False)).all():
        raise ModelFileError(path, f"its matrices must be finite in {dtype}", name)
    return rounded


def _is_named(name: str, wanted: list[str]) -> bool:
    return any(name == each or name.endswith(f".{each}") for each in wanted)


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first pattern that fits the name, or what follows one of its dots."""
    firsts = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
    fits = (value for key, value in patterns.items() if any(re.compile(key).fullmatch(name, at) for at in firsts))
    return next(fits, default)


def _short(value: Any) -> str:
    return repr(value if isinstance(value, (str, int, float)) else json.dumps(value, default=str))[:100]

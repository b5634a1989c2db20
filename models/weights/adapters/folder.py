"""Reader of PEFT adapters: a folder with adapter_config.json and adapter_model.safetensors.

The files are untrusted: every field, count, name, shape and number is checked before any of it is used, and
every fault is one ModelFileError. Unsupported features are refused by name. Matrices of experts are handled in
jaxengine.models.weights.adapters.experts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.models.params.errors import Faults, ModelFileError
from jaxengine.models.params.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, inside, read_object
from jaxengine.models.params.source import WeightSource
from jaxengine.models.weights.adapters.config import AdapterConfig
from jaxengine.models.weights.adapters.experts import JoinedExperts, find_joined, is_transposed
from jaxengine.models.weights.adapters.pools import AdapterTargets
from jaxengine.models.weights.adapters.tensors import ENDS, AdapterTensors
from jaxengine.models.weights.formats.safetensors import PICKLE_SUFFIXES, SafetensorsCheckpoint

_MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16  # for adapters that are added to weights, which any LoRA rank fits


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """LoRA adapter, read and checked.

    Attributes:
      config: configuration by which it was read.
      rank: the largest LoRA rank of its matrices.
      digest: SHA-256 of everything that affects its results.
      matrices: by module of the model, A [r, in] and B [out, r] with the scale folded in, in the model's dtype.
    """

    config: AdapterConfig
    rank: int
    digest: bytes
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @property
    def num_bytes(self) -> int:
        """Size of all matrices in bytes."""
        return sum(a.nbytes + b.nbytes for a, b in self.matrices.values())


def read_adapter(folder: str | os.PathLike[str], targets: AdapterTargets, max_rank: int, dtype: Any) -> AdapterWeights:
    """Read the adapter in `folder` for a model with these targets. dtype: dtype of the model, and of the matrices that
    are returned.

    Raises ModelFileError for an invalid or unsupported adapter, for one of another model, or with a rank above
    `max_rank`; the error's `others` are all further faults of tensors.
    """
    folder = Path(folder)
    raw = read_object(folder, ADAPTER_CONFIG, _MAX_CONFIG_BYTES)
    if raw is None:
        raise ModelFileError(folder, f"has no {ADAPTER_CONFIG}: name the folder that PEFT has saved")
    config = AdapterConfig(folder / ADAPTER_CONFIG, raw)
    config.check_saved(targets)
    checkpoint = SafetensorsCheckpoint(_weights_file(folder))
    try:
        return adapter_of(config, checkpoint, targets, max_rank, dtype)
    finally:
        checkpoint.close()


def adapter_of(
    config: AdapterConfig, source: WeightSource, targets: AdapterTargets, max_rank: int, dtype: Any
) -> AdapterWeights:
    """Return the adapter with this configuration and the tensors of `source`, for a model with these targets. Reads all
    matrices of `source` and does not close it.

    dtype: dtype of the model, and of the matrices that are returned. Raises ModelFileError for an adapter that is
    invalid, unsupported, of another model, or with a rank above `max_rank`; its `others` are all further faults of
    tensors.
    """
    dtype, faults = jnp.dtype(dtype), Faults()
    tensors = AdapterTensors(source, dtype, faults)
    stored, joined = _stored_modules(tensors, config, targets, faults)
    keys = {module: config.key_of(name) for module, name in stored.items()}
    ranks = {key: config.rank_of(key) for key in (*keys.values(), *(each.key for each in joined))}
    rank = max(ranks.values(), default=0)
    with faults.collect():
        if rank > max_rank:
            raise ModelFileError(config.path, f"rank is {rank}; allowed: at most {max_rank} (max_lora_rank)", "r")
    held = {targets.module(name) for name in tensors.modules}
    for fault in config.faults_of_modules(stored, held, targets):
        with faults.collect():
            raise fault
    matrices: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, name in stored.items():
        if len(tensors.modules[name]) != len(ENDS):
            continue
        size, out = targets.sides(module)
        rank_of_it, scale = ranks[keys[module]], config.scale_of(keys[module], ranks[keys[module]])
        with faults.collect():
            matrices[module] = tensors.read(name, (rank_of_it, size), (out, rank_of_it), scale)
    transposed = is_transposed(tensors, joined, ranks)
    for each in joined:
        with faults.collect():
            found = each.read(tensors, ranks[each.key], config.scale_of(each.key, ranks[each.key]), transposed)
            if twice := next((module for module in found if module in matrices), None):
                raise ModelFileError(source.path, f"stands for {twice}, as does another matrix", each.name)
            matrices |= found
    faults.check()
    _join_parts(matrices, targets, max_rank, source.path)
    _split_wholes(matrices, targets, source.path)
    rank = max((len(a) for a, _ in matrices.values()), default=0)
    return AdapterWeights(config, rank, _digest(matrices, dtype), matrices)


def _join_parts(
    matrices: dict[str, tuple[np.ndarray, np.ndarray]], targets: AdapterTargets, max_rank: int, path: str
) -> None:
    """Replace the matrices of targets.parts in `matrices` by those of the modules that they are rows of.

    These have the sum of the parts' LoRA ranks: A has the rows of all, and B [out, r], for each part, its own in its
    rows and its ranks, zeros elsewhere. Raises ModelFileError for a sum above `max_rank`, and if `matrices` has both a
    module and a part of it. path: the file, for errors.
    """
    by_module: dict[str, list[str]] = {}
    for part in targets.parts.keys() & matrices.keys():
        by_module.setdefault(targets.parts[part][0], []).append(part)
    for module, parts in by_module.items():
        parts.sort(key=lambda part: targets.parts[part][1].start)
        pairs = [matrices.pop(part) for part in parts]
        if module in matrices:
            raise ModelFileError(path, f"stands for rows of {module}, as does another matrix", parts[0])
        a = np.concatenate([first for first, _ in pairs])
        if len(a) > max_rank:
            what = f"{', '.join(parts)} are one matrix in the checkpoint, for which their ranks add up to {len(a)}"
            raise ModelFileError(path, f"{what}; allowed: at most {max_rank} (max_lora_rank)", module)
        b, rank = np.zeros((targets.shapes[module][1], len(a)), a.dtype), 0
        for part, (_, second) in zip(parts, pairs, strict=True):
            b[targets.parts[part][1], rank : rank + second.shape[1]] = second
            rank += second.shape[1]
        matrices[module] = a, b


def _split_wholes(matrices: dict[str, tuple[np.ndarray, np.ndarray]], targets: AdapterTargets, path: str) -> None:
    """Replace the matrices of targets.wholes in `matrices` by those of the modules that they join: each has the same A,
    and its own rows of B. Raises ModelFileError if `matrices` has both a module and a part of it. path: the file, for
    errors.
    """
    for whole in targets.wholes.keys() & matrices.keys():
        (a, b), first = matrices.pop(whole), 0
        for part in targets.wholes[whole]:
            if part in matrices:
                raise ModelFileError(path, f"stands for rows of {whole}, as does another matrix", part)
            end = first + targets.shapes[part][1]
            matrices[part], first = (a, b[first:end]), end


def _digest(matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], dtype: np.dtype) -> bytes:
    """Return the SHA-256 of an adapter's matrices, their modules and shapes, and `dtype`."""
    digest = hashlib.sha256()
    for module, (a, b) in sorted(matrices.items()):
        digest.update(f"{module} {a.shape} {b.shape} {dtype}\n".encode())
        for matrix in (a, b):
            digest.update(np.ascontiguousarray(matrix).view(np.uint8).data)
    return digest.digest()


def _weights_file(folder: Path) -> Path:
    """Return the path of the weights in an adapter's folder. Raises ModelFileError if there are none, or only pickle
    files, and for a link out of the folder.
    """
    path = inside(folder, ADAPTER_WEIGHTS)
    if path.exists():
        return path
    if any(file.suffix in PICKLE_SUFFIXES for file in folder.iterdir()):
        raise ModelFileError(folder, "holds pickle weights, which can run code and are never read: use safetensors")
    raise ModelFileError(folder, f"has no {ADAPTER_WEIGHTS}")


def _stored_modules(
    tensors: AdapterTensors, config: AdapterConfig, targets: AdapterTargets, faults: Faults
) -> tuple[dict[str, str], list[JoinedExperts]]:
    """Return the modules of a file, as a map from the model's names to the file's, and its pairs for all experts of a
    layer, which are not in the map. Modules that no layer multiplies by (AdapterTargets.is_unused) are left out.

    Modules that lack one of their two matrices, that the model does not have, or that appear twice are added to
    `faults` as errors; those that lack a matrix are in the map all the same. Raises ModelFileError, with all of
    `faults`, if the pairs for all experts are not those of the configuration.
    """
    path = tensors.path
    stored: dict[str, str] = {}
    try:
        joined, of_joined = find_joined(tensors, config, targets)
    except ModelFileError as error:
        faults.add(error)
        faults.check()
        raise
    for name in tensors.modules:
        if name in of_joined or targets.is_unused(name):
            continue
        module = targets.module(name)
        with faults.collect():
            if not any(module in known for known in (targets.shapes, targets.parts, targets.wholes)):
                raise ModelFileError(path, _why_not(module, targets), name)
            if module in stored:
                raise ModelFileError(path, f"stands for {module}, as does {stored[module]}", name)
            stored[module] = name
    for name, ends in tensors.modules.items():
        with faults.collect():
            if len(ends) != len(ENDS):
                raise ModelFileError(path, f"has {min(ends)[1:]} of it and not the other matrix", name)
    return stored, joined


def _why_not(module: str, targets: AdapterTargets) -> str:
    """Return why the model takes no adapter of `module`: not supported, part of a tower or of what is not read, no such
    expert or matrix, or no such module.
    """
    if module in targets.others or module in targets.tensors:
        return "the model has it, but adapters of it are not supported"
    if targets.is_beside(module):
        return "it is in a tower or a part that is not read, of which adapters are not supported"
    layer, _, rest = module.partition(".experts.")
    if rest and (experts := targets.experts.get(f"{layer}.experts")) is not None:
        modules = (name for part in sorted(experts.joined, reverse=True) for name in experts.joined[part])
        names = ", ".join(name.rpartition(".")[2] for name in modules)
        return f"experts must be 0 to {experts.num_experts - 1} and their matrices {names}: is it for another model?"
    return "the model has no such module: the adapter is for another base model"

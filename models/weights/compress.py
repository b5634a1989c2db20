"""Writer of compressed-tensors checkpoints: rounds a checkpoint's matrices to a format that other engines read as well.

Rounding is jaxengine.models.quantization.base.online's, and the same as when an engine rounds at load. Nothing is
calibrated. Of the configuration only quantization_config is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.stored import StoredModule, dequantized, num_groups
from jaxengine.models.weights.formats.safetensors import INDEX_FILE, SINGLE_FILE
from jaxengine.models.weights.views.quantized import QuantizedSource, plain_name
from jaxengine.models.weights.views.renamed import RenamedSource
from jaxengine.models.weights.views.stacked import split_stack

MAX_FILE_BYTES = 4 << 30
# Bits of the integer formats.
_BITS = {"int4": 4, "int8": 8}


def compress(
    checkpoint: WeightSource,
    model: CausalLM,
    folder: Path,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Write the tensors of a checkpoint to `folder`, which must exist, with the matrices of layers rounded. Files of
    the same names are replaced.

    Args:
      model: abstract, of all stages, with one of jaxengine.models.quantization.registry.ROUNDED.
      progress: called before each tensor with (tensors done, tensors in total, its name), and at the end with "written"
        as the name.

    Returns the quantization_config, and the error of each kind of matrix, by its module's name with "*" for numbers:
    the root of the mean squared error relative to the matrix's own root mean square, NaN for matrices of zeros. Raises
    ModelFileError for a checkpoint that does not fit the model, that stores experts in one tensor or joins matrices
    that would be rounded, that has no matrix to round, or whose matrices have numbers that are not finite, and if
    writing fails.
    """
    renamed = RenamedSource(checkpoint, model.checkpoint_names)
    if model.config.experts is not None and any(split_stack(name) for name in renamed.names()):
        text = "keeps the experts of a layer in one tensor, and such are not written quantised"
        raise ModelFileError(checkpoint.path, text)
    if joined := next(_joined(renamed, model), None):
        raise ModelFileError(checkpoint.path, "joins matrices of modules, and such are not written quantised", joined)
    held = QuantizedSource(renamed, declared_params(model), model.build.scheme).modules
    modules: dict[str, tuple[Any, StoredModule]] = {
        renamed.stored_name(module.tensor("weight")): (scheme.stored, module) for scheme, module in held.values()
    }
    if not modules:
        raise ModelFileError(checkpoint.path, "has no matrix that could be written quantised")
    names, squares = list(checkpoint.names()), {}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for number, name in enumerate(names):
            progress(number, len(names), name)
            if name not in modules:
                yield name, checkpoint.read(name)
                continue
            module = name.removesuffix(".weight")
            parts, *own = _rounded(*modules[name])
            kind = ".".join("*" if part.isdecimal() else part for part in module.split("."))
            squares[kind] = np.add(squares.get(kind, (0.0, 0.0)), own)
            yield from ((f"{module}.{part}", values) for part, values in parts.items())
        progress(len(names), len(names), "written")

    _write(folder, tensors())
    matrices = {
        name.removesuffix(".weight") for name in names if len(checkpoint.shape(name)) == 2 and name.endswith(".weight")
    }
    ignored = _ignored(matrices, {name.removesuffix(".weight") for name in modules})
    rounded = next(iter(modules.values()))[0]
    return settings(rounded, ignored), {kind: float(np.sqrt(e / w)) for kind, (e, w) in squares.items()}


def _joined(source: WeightSource, model: CausalLM) -> Iterator[str]:
    """Yield the names of tensors of `source` whose rows are those of several matrices that the model rounds."""
    declared = {tensor.name for param in declared_params(model) for tensor in param.decl.sources}
    rounded = {plain_name(name, model.build.scheme) for name in declared} - declared
    return (name for name in source.names() if rounded.intersection(model.checkpoint_names.parts_of_rows(name)))


def settings(rounded: Rounded, ignored: list[str]) -> dict[str, Any]:
    """Return the quantization_config of matrices rounded by `_rounded`: pack-quantized integers or float-quantized
    e4m3, by group or by channel. ignored: names of modules that are not rounded.
    """
    weights: dict[str, Any] = {"dynamic": False, "symmetric": not rounded.has_zeros}
    if rounded.group is None:
        weights["strategy"] = "channel"
    else:
        weights |= {"strategy": "group", "group_size": rounded.group}
    bits = _BITS.get(rounded.dtype)
    kind = {"num_bits": 8, "type": "float"} if bits is None else {"num_bits": bits, "type": "int"}
    kept = "float-quantized" if bits is None else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights | kind, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kept,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _ignored(matrices: set[str], rounded: set[str]) -> list[str]:
    """Return the entries of `ignore`, sorted, given the module names of all matrices and of those that are rounded.

    A part without a rounded matrix, such as a tower or a projector, is also listed as a pattern, since other engines
    may have longer names for its modules, and so is a tied head.
    """
    taken = {part for name in rounded for part in _beginnings(name)}
    ignored = {"lm_head"} | matrices - rounded
    for name in matrices - rounded:
        whole = next((part for part in _beginnings(name) if part not in taken), name)
        part = whole.rpartition(".")[2]
        pattern = f".*{re.escape(part)}[.]"
        if whole != name and not part.isdecimal() and not any(re.match(pattern, other) for other in rounded):
            ignored.add(f"re:{pattern}")
    return sorted(ignored)


def _beginnings(name: str) -> list[str]:
    """Return the dotted prefixes of a name, shortest first: for "a.b.c", "a", "a.b" and "a.b.c"."""
    return list(accumulate(name.split("."), lambda start, part: f"{start}.{part}"))


def _rounded(rounded: Rounded, module: StoredModule) -> tuple[dict[str, np.ndarray], float, float]:
    """Return the tensors of a rounded module by suffix, and the sums of squares of the rounding error and of the
    matrix.

    Raises ModelFileError for numbers that are not finite.
    """
    rows, size = slice(0, module.shape[0]), module.shape[1]
    weight = module.read("weight")
    codes, (scales, zeros) = rounded.codes(module, rows, slice(0, size)), rounded.scales(module, rows)
    moved = dequantized(codes, scales, zeros, rounded.group) - weight
    error, whole = (float(np.sum(np.square(each, dtype=np.float64))) for each in (moved, weight))
    if (bits := _BITS.get(rounded.dtype)) is None:
        return {"weight": codes, "weight_scale": scales}, error, whole
    half = 1 << bits - 1
    parts = {
        "weight_packed": packed(codes.astype(np.int16) + half, bits),
        "weight_scale": scales,
        "weight_shape": np.array(module.shape, np.int64),
    }
    if zeros is not None:
        points = np.rint(zeros / scales).astype(np.int16) + half
        parts["weight_zero_point"] = packed(points.T, bits).T
    return parts, error, whole


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Return values [n, size], each from 0 to 2**bits - 1, packed into int32 words [n, ceil(size * bits / 32)], the
    first in the lowest bits.

    bits: a divisor of 32. A last word that is not full ends with zeros.
    """
    per_word = 32 // bits
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word))).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = values.reshape(len(values), num_groups(values.shape[1], per_word), per_word) << shifts
    return np.bitwise_or.reduce(words, axis=2).view(np.int32)


def _write(folder: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write `tensors` to one file, or to several of at most MAX_FILE_BYTES (or one tensor) and their index. Files of
    the same names are replaced.

    Raises ModelFileError if that fails; files that were begun remain.
    """
    written: list[tuple[Path, list[str]]] = []
    held: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"part-{len(written) + 1:05d}.safetensors"
        path.touch()
        mode = path.stat().st_mode  # save_file restricts reading to the owner
        save_file(held, path, {"format": "pt"})
        path.chmod(mode)
        written.append((path, list(held)))
        held.clear()

    try:
        for name, array in tensors:
            if held and sum(each.nbytes for each in held.values()) + array.nbytes > MAX_FILE_BYTES:
                flush()
            held[name] = np.asarray(array, order="C")  # ascontiguousarray makes [1] of []
            total += array.nbytes
        flush()
        if len(written) == 1:
            written[0][0].rename(folder / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(written, 1):
            file = f"model-{number:05d}-of-{len(written):05d}.safetensors"
            path.rename(folder / file)
            weight_map |= dict.fromkeys(names, file)
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))
    except (OSError, SafetensorError) as error:  # a full disk raises either
        raise ModelFileError(folder, f"cannot be written: {error}") from error

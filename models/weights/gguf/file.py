"""GGUF files as checkpoints: Hugging Face names and orientation over the tensors of a llama.cpp file.

Handles the order of the query and key rows of llama files, rows and columns that are arranged otherwise (arranged.py),
stacked experts as tensors of their own, factors of whole matrices, and matrices whose blocks are read as codes and
scales. Differences between architectures are rows of
gguf/layouts.py. Headers are read by gguf/header.py, block formats by gguf/dequant.py.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from typing import Any

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import open_regular
from jaxengine.models.params.source import WHOLE
from jaxengine.models.quantization.schemes.gguf import CODES, SCALES, ZEROS
from jaxengine.models.weights.gguf.arranged import Arranged, arrange, arrangements
from jaxengine.models.weights.gguf.dequant import BlockFormat, dequantize, split_blocks
from jaxengine.models.weights.gguf.header import TensorInfo, read_header
from jaxengine.models.weights.gguf.layout import GGUFLayout
from jaxengine.models.weights.gguf.layouts import LAYOUTS
from jaxengine.models.weights.gguf.split import check_part, check_tensors, other_parts

# Bytes of the file dequantised at a time, in complete rows: large enough for numpy, small enough to stay in cache.
CHUNK_BYTES = 1 << 18
# A stacked tensor stands for as many names as it has experts: a few times what the largest models have.
MAX_EXPERTS = 4096

# Ends of the names of factors of a whole matrix, in addition to the scales of its blocks (NVFP4).
_SCALE, _INPUT_SCALE = ".scale", ".input_scale"
_NUMBER = re.compile(r"blk\.([0-9]{1,6})\.")
# A bias of a layer; and weights, of a layer or outside.
_BIAS = re.compile(r"(?:enc\.)?blk\.[0-9]+\.([a-z0-9_]+)\.bias")
_WEIGHT = re.compile(r"(?:enc\.)?(?:blk\.[0-9]+\.)?([a-z_0-9]+(?:\.[a-z]+)?)\.weight")
_HEADS, _HEADS_KV = "attention.head_count", "attention.head_count_kv"
_SIZES = "attention.key_length", "attention.value_length"
_JOINED_QKV = re.compile(r"(blk\.([0-9]{1,6})\.attn_)qkv(\.(?:weight|bias))")


def unpermute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Return query or key rows of a llama file in Hugging Face order: [num_heads * H, ...], any number of dimensions.

    llama.cpp rotates neighbouring rows of a head, Hugging Face rows that are H/2 apart. llama.cpp's converter
    interleaves the two halves of every head, which this undoes.
    """
    head_dim = array.shape[0] // num_heads
    split = array.reshape(num_heads, head_dim // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


class GGUFFile:
    """WeightSource over one GGUF file, or over the files of a split model. Headers are checked on opening; tensors are
    read on demand.

    Attributes:
      path: the given path, as text; of a split model, that of the first file.
      metadata: the file's key-values: Python scalars, strings, lists of strings, numpy arrays of numbers.
      architecture: one of jaxengine.models.weights.gguf.layouts.LAYOUTS.
      biased: llama.cpp's names of layers' matrices that have a bias in any layer, such as attn_q.
      stored: see GGUFConfig.

    Raises ModelFileError for a file that is missing, not a regular file, inconsistent, or of another architecture.
    Several threads may read at once. It is a context manager, and `close` may be called twice.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._files: list[FileIO] = []
        try:
            self.metadata, tensors = self._open(self.path)
            others = other_parts(self.path, self.metadata)
            self.architecture = _architecture(self.path, self.metadata)
            for number, path in enumerate(others, 1):
                metadata, more = self._open(path)
                check_part(path, metadata, number, len(others) + 1)
                tensors += more
            if others:
                check_tensors(self.path, self.metadata, len(tensors))
            tensors = _of_read_layers(self.architecture, self.metadata, tensors)
            self._layout = LAYOUTS[self.architecture]
            if "attn_qkv" not in self._layout.parts and any(_JOINED_QKV.fullmatch(info.name) for info in tensors):
                counts = [self._head_counts(key) for key in (_HEADS, _HEADS_KV)]
                usual = self._positive("embedding_length") // max(counts[0])
                sizes = [self._positive(key, self.metadata.get(f"{self.architecture}.{key}", usual)) for key in _SIZES]
                tensors = tuple(part for info in tensors for part in _queries_apart(self.path, info, counts, sizes))
            # Only where rows of heads are permuted.
            self._heads = {module: self._head_counts(key) for module, key in self._layout.heads.items()}
            count = self._positive("block_count") if self._layout.numbers else 0
            self._numbers = dict(_listed_numbers(self.path, self.metadata, self._layout, count))
            self._factors: dict[str, TensorInfo] = {}
            self._tensors = self._named(tensors)
            orders = arrangements(self.architecture, self._positive)
            self._arranged = arrange(self.path, self._tensors, self._factors, orders)
            self.biased = frozenset(match[1] for info in tensors if (match := _BIAS.fullmatch(info.name)))
            named = ((_WEIGHT.fullmatch(info.name), info) for info in reversed(tensors))
            self.stored = {match[1]: info.shape for match, info in named if match is not None}
            self._kept: dict[str, tuple[str, str]] = {}
        except BaseException as error:
            self.close()
            if isinstance(error, ModelFileError) or not isinstance(error, (OSError, ValueError)):
                raise
            # ValueError: a path that holds a NUL byte.
            raise ModelFileError(self.path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self, path: str) -> tuple[dict[str, Any], tuple[TensorInfo, ...]]:
        """Open one more file; return its metadata, and its tensors, marked with the number of the file. Raises
        FileNotFoundError or NotADirectoryError for a missing file, ModelFileError for an invalid one, and OSError if it
        cannot be mapped.
        """
        descriptor, size = open_regular(path)
        self._files.append(FileIO(descriptor))
        header = read_header(path, descriptor, size)
        part = len(self._files) - 1
        return header.metadata, tuple(replace(info, part=part) for info in header.tensors)

    def names(self) -> Iterable[str]:
        """Return the canonical names of all tensors: in the order of the file, arranged ones after the others, then
        those whose numbers the metadata list, then the parts of kept matrices.
        """
        kept = {weight for weight, _ in self._kept.values()}
        return (*(name for name in self._tensors if name not in kept), *self._numbers, *self._kept)

    def formats(self) -> dict[str, BlockFormat]:
        """Return the block format of each quantised matrix, by its module (the name without `.weight`), but for those
        whose Arrangement divides blocks.
        """
        matrices = (item for item in self._tensors.items() if item[0].endswith(".weight") and len(item[1].shape) == 2)
        matrices = ((name, info) for name, info in matrices if info.format.parts is not None)
        return {
            name.removesuffix(".weight"): info.format
            for name, info in matrices
            if name not in self._arranged or self._arranged[name].has_blocks(info.format)
        }

    def keep(self, modules: Iterable[str]) -> None:
        """Serve the matrices of these modules, a subset of `formats`, as codes, scales and zeros instead of
        dequantised.

        MODULE.weight [out, in] becomes MODULE.codes i8[out, in], MODULE.scales f32[out, n] and, if the format has them,
        MODULE.zeros f32[out, n]: a weight is codes * scales - zeros. Several calls add up. Raises KeyError for another
        module.
        """
        formats = self.formats()
        for module in modules:
            for kind in (CODES, SCALES, ZEROS)[: 3 if formats[module].has_zeros else 2]:
                self._kept[f"{module}.{kind}"] = f"{module}.weight", kind

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._numbers:
            return self._numbers[name].shape
        weight, kind = self._kept.get(name, (name, None))
        return _shape(self._info(weight), kind)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return these rows and columns of [out, in]: float16 or bfloat16 if the file stores them so and nothing is
        undone, int8 for kept codes, otherwise float32.

        What the file's converter does to values is undone: the offset of the weights of norms, and exp(A_log) of
        states. Factors of whole matrices are applied, and rows of heads are in Hugging Face's order. Raises
        ModelFileError for a tensor that the file does not have or whose values are not possible, and if it cannot be
        read.
        """
        if name in self._numbers:
            return self._numbers[name][rows]
        name, kind = self._kept.get(name, (name, None))
        values = self._read(name, kind, rows, columns)
        if kind != CODES and name in self._factors:
            factor = self._read_rows(self._factors[name], None, 0, 1, WHOLE)
            values = values.astype(np.float32) * factor.astype(np.float32)
        if offset := self._layout.offset_of(name):
            return values.astype(np.float32) - np.float32(offset)
        if name.endswith(".A_log"):
            decays = self._layout.decay * values.astype(np.float32)
            if (decays < 0).any():
                side = "above" if self._layout.decay < 0 else "below"
                raise ModelFileError(self.path, f"must not hold numbers {side} 0", self._info(name).name)
            with np.errstate(divide="ignore"):  # without decay
                return np.log(decays)
        return values

    def _read(self, name: str, kind: str | None, rows: slice, columns: slice) -> np.ndarray:
        """Return rows and columns of a tensor in Hugging Face order, without factors. kind: None for values, or a part
        (codes, scales or zeros) of a kept matrix. Raises ModelFileError for an unknown tensor, and if it cannot be
        read.
        """
        info, num_heads = self._info(name), self._permuted_heads(name)
        if name in self._arranged:
            return self._read_arranged(self._arranged[name], kind, rows, columns)
        first, last, _ = rows.indices(info.shape[0])
        if num_heads is None or first >= last:
            return self._read_rows(info, kind, first, last, columns)
        head_dim = info.shape[0] // num_heads
        first_head, last_head = first // head_dim, -(-last // head_dim)
        stored = self._read_rows(info, kind, first_head * head_dim, last_head * head_dim, columns)
        start = first_head * head_dim
        return unpermute_rows(stored, last_head - first_head)[first - start : last - start]

    def _read_arranged(self, arranged: Arranged, kind: str | None, rows: slice, columns: slice) -> np.ndarray:
        """Return rows and columns of a tensor in the checkpoint's order, with factors; see `_read`."""
        stored, order = (columns, None) if arranged.order.columns is None else (WHOLE, arranged.columns(kind))
        pieces = []
        for part, factor, first, last in arranged.runs(rows):
            piece = self._read_rows(part, kind, first, last, stored)
            if factor is not None and kind != CODES:
                piece = piece.astype(np.float32) * self._read_rows(factor, None, 0, 1, WHOLE).astype(np.float32)
            pieces.append(piece)
        values = np.concatenate(pieces)
        return values if order is None else values[:, order[columns]]

    def _read_rows(self, info: TensorInfo, kind: str | None, first: int, last: int, columns: slice) -> np.ndarray:
        """Return rows `first` to last - 1 in the order of the file, reading CHUNK_BYTES of complete rows at a time.
        kind: None for values, or a part of a kept matrix. Raises ModelFileError if the file cannot be read.
        """
        if len(info.shape) == 1:  # blocks may cross entries, so this is one row
            return _decoded(info, kind, self._bytes(info, 0, info.num_bytes)).reshape(-1)[first:last]
        row_bytes = info.num_bytes // info.shape[0]
        step = max(1, CHUNK_BYTES // row_bytes)
        shape = _shape(info, kind)[1:]
        start, stop, _ = columns.indices(shape[0])
        values = np.empty((last - first, stop - start, *shape[1:]), _decoded(info, kind, b"").dtype)
        for row in range(first, last, step):
            count = min(step, last - row)
            chunk = _decoded(info, kind, self._bytes(info, row * row_bytes, count * row_bytes))
            values[row - first : row - first + count] = chunk.reshape(count, *shape)[:, columns]
        return values

    def _info(self, name: str) -> TensorInfo:
        """Return the location of the tensor with this canonical name. Raises ModelFileError if there is none."""
        if name not in self._tensors:
            raise ModelFileError(self.path, "no such tensor in the file", name)
        return self._tensors[name]

    def _bytes(self, info: TensorInfo, start: int, num_bytes: int) -> bytes:
        """Return `num_bytes` bytes of a tensor from its byte `start` on. Raises ModelFileError if the file is closed,
        cannot be read or became shorter.
        """
        if not self._files or self._files[info.part].closed:
            raise ModelFileError(self.path, "the file has been closed", info.name)
        try:
            data = os.pread(self._files[info.part].fileno(), num_bytes, info.start + start)
        except OSError as error:
            raise ModelFileError(self.path, f"cannot be read: {error.strerror}", info.name) from None
        if len(data) != num_bytes:
            raise ModelFileError(self.path, "the file became shorter while it was read", info.name)
        return data

    def _named(self, tensors: tuple[TensorInfo, ...]) -> dict[str, TensorInfo]:
        """Return the tensors by their canonical names, and add factors of whole matrices to `_factors`. Factors of
        inputs are left out, as inputs are not rounded.

        Raises ModelFileError for a name that two tensors have, for shapes that are not possible, and for a factor
        without its matrix.
        """
        named: dict[str, TensorInfo] = {}
        scaled: dict[str, TensorInfo] = {}
        for info in tensors:
            for name, part in self._parts(info):
                if name.endswith(_INPUT_SCALE):  # activations are not rounded
                    scaled[name.removesuffix(_INPUT_SCALE) + ".weight"] = part
                    continue
                if info.name.endswith(_SCALE) and not name.endswith(tuple(self._layout.factors.values())):
                    whole = name.removesuffix(_SCALE) + ".weight"
                    if whole in self._factors:
                        raise ModelFileError(
                            self.path, f"stands for {name}, as does {self._factors[whole].name}", info.name
                        )
                    if math.prod(part.shape) != 1:
                        raise ModelFileError(self.path, f"must be one factor of {whole}, got {info.shape}", info.name)
                    self._factors[whole] = part
                    continue
                if name in named:
                    raise ModelFileError(self.path, f"stands for {name}, as does {named[name].name}", info.name)
                named[name] = part
                heads = self._permuted_heads(name)
                if heads is not None and (not heads or info.shape[0] % (2 * heads)):
                    text = f"{info.shape[0]} rows are not an even number for each of {heads} heads"
                    raise ModelFileError(self.path, text, info.name)
        for whole, part in (scaled | self._factors).items():
            if whole not in named:
                raise ModelFileError(self.path, f"is a factor of {whole}, which is not in the file", part.name)
        return named

    def _parts(self, info: TensorInfo) -> Iterable[tuple[str, TensorInfo]]:
        """Return (canonical name, location) of the tensors that a tensor of the file represents: itself, or one for
        each expert. Raises ModelFileError for too many experts, and for a tensor that is not a stack of experts.
        """
        names = self._layout.canonical_names(info.name)
        if "{expert}" not in names[0]:
            return [(names[0], replace(info, shape=self._layout.usual_shape(info.name, info.shape)))]
        count, *shape = info.shape
        shape = shape or [1] * names[0].endswith((_SCALE, _INPUT_SCALE))
        cut = shape[-1] % (info.format.values * (len(names) if len(shape) == 1 else 1)) if shape else 0
        if not shape or count > MAX_EXPERTS or shape[0] % len(names) or cut:
            parts = f", each in {len(names)} equal parts," if len(names) > 1 else ""
            text = f"must be the matrices of at most {MAX_EXPERTS} experts{parts} got {info.shape}"
            raise ModelFileError(self.path, text, info.name)
        size = info.num_bytes // count // len(names)
        each = replace(info, shape=(shape[0] // len(names), *shape[1:]), num_bytes=size)
        named = [name.replace("{expert}", str(expert)) for expert in range(count) for name in names]
        return [(name, replace(each, start=info.start + at * size)) for at, name in enumerate(named)]

    def _permuted_heads(self, name: str) -> int | None:
        """Return the number of heads whose rows are permuted in the tensor `name`; None if its rows are in Hugging Face
        order.
        """
        if not self._layout.permuted or not name.startswith("model.layers."):
            return None
        kinds = ("weight", "bias") if self._layout.permuted_biases else ("weight",)
        for part, heads in self._heads.items():
            if name.endswith(tuple(f".{part}.{kind}" for kind in kinds)):
                return _of_layer(heads, int(name.split(".")[2]))
        return None

    def _head_counts(self, key: str) -> list[int]:
        """Return the number of heads of each layer in the metadata's field `key`, without its architecture, or one for
        all; those of queries if it is absent. Of a list, zeros are left out if the others are equal. Raises
        ModelFileError for anything but integers >= 1.
        """
        listed = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(listed, np.ndarray):
            return [self._positive(_HEADS if listed is None else key)]
        numbers = listed.ravel().tolist()
        counts = set(numbers) - {0}  # layers with a state, or without attention, have none
        for count in counts or [numbers]:
            self._positive(key, count)
        return list(counts) if len(counts) == 1 else numbers

    def _positive(self, key: str, number: Any = None) -> int:
        """Return the metadata's field `key`, without its architecture, or `number` as its value. Raises ModelFileError
        for anything but an integer >= 1.
        """
        key = f"{self.architecture}.{key}"
        number = self.metadata.get(key) if number is None else number
        if type(number) is not int or number < 1:
            raise ModelFileError(self.path, f"must be a positive number, got {repr(number)[:100]}", key)
        return number


def _queries_apart(path: str, info: TensorInfo, counts: Sequence[list[int]], sizes: Sequence[int]) -> list[TensorInfo]:
    """Return the tensors of queries, keys and values whose rows a tensor joins, as the converter's --fuse-qkv does; of
    another tensor itself. counts: heads of queries, and KV heads, of layers. sizes: elements of a key, and of a value.
    Raises ModelFileError for another number of rows.
    """
    if (match := _JOINED_QKV.fullmatch(info.name)) is None:
        return [info]
    stem, layer, end = match.groups()
    heads, kv_heads = (_of_layer(each, int(layer)) for each in counts)
    rows = {"q": heads * sizes[0], "k": kv_heads * sizes[0], "v": kv_heads * sizes[1]}
    if info.shape[0] != sum(rows.values()) or not all(rows.values()) or info.num_bytes % info.shape[0]:
        raise ModelFileError(path, f"must have the rows of queries, keys and values, {rows}", info.name)
    row, first, parts = info.num_bytes // info.shape[0], info.start, []
    for part, count in rows.items():
        name, shape, size = f"{stem}{part}{end}", (count, *info.shape[1:]), count * row
        parts.append(replace(info, name=name, shape=shape, start=first, num_bytes=size))
        first += size
    return parts


def _listed_numbers(
    path: str, metadata: Mapping[str, Any], layout: GGUFLayout, count: int
) -> Iterable[tuple[str, np.ndarray]]:
    """Yield (canonical name, f32[1]) of the tensors of one number that metadata list for `count` layers, or give for
    all. Raises ModelFileError for other metadata.
    """
    for key, part in layout.numbers.items():
        listed = metadata.get(key)
        values = np.atleast_1d(listed if isinstance(listed, (float, np.ndarray)) else ())
        if values.dtype.kind != "f" or values.shape not in ((1,), (count,)) or not np.isfinite(values).all():
            raise ModelFileError(path, f"must be a number for each of {count} layers", key)
        values = np.broadcast_to(values, count).astype(np.float32)
        yield from ((f"{layout.layers}.{layer}.{part}", values[layer : layer + 1]) for layer in range(count))


def _of_layer(counts: list[int], layer: int) -> int:
    """Return the layer's number in `counts`, or that of all layers; 0 for a layer that the list does not have."""
    return counts[0] if len(counts) == 1 else counts[layer] if layer < len(counts) else 0


def _of_read_layers(
    architecture: str, metadata: Mapping[str, Any], tensors: tuple[TensorInfo, ...]
) -> tuple[TensorInfo, ...]:
    """Return the tensors without those of the last layers, which predict further tokens and are not read; all tensors
    if the metadata do not give both numbers of layers as integers.
    """
    count, further = (metadata.get(f"{architecture}.{name}") for name in ("block_count", "nextn_predict_layers"))
    if type(count) is not int or type(further) is not int:
        return tensors
    layers = ((info, _NUMBER.match(info.name)) for info in tensors)
    return tuple(info for info, layer in layers if layer is None or int(layer[1]) < count - further)


def _shape(info: TensorInfo, kind: str | None) -> tuple[int, ...]:
    """Return the shape of a tensor if `kind` is None, otherwise of that part (codes, scales or zeros) of a kept
    matrix.
    """
    return info.shape if kind in (None, CODES) else (info.shape[0], info.shape[1] // info.format.group)


def _decoded(info: TensorInfo, kind: str | None, data: bytes) -> np.ndarray:
    """Return complete blocks decoded to the tensor's values if `kind` is None, otherwise to that part (codes, scales or
    zeros). Raises ValueError if the data ends within a block.
    """
    return dequantize(info.format, data) if kind is None else getattr(split_blocks(info.format, data), kind)


def _architecture(path: str, metadata: Mapping[str, Any]) -> str:
    """Return the file's architecture, one of LAYOUTS. Raises ModelFileError for any other, with the nearest one if any
    is similar.
    """
    key = "general.architecture"
    architecture = metadata.get(key)
    if not isinstance(architecture, str) or architecture not in LAYOUTS:
        near = difflib.get_close_matches(str(architecture)[:100], LAYOUTS, 1, 0.7)
        nearest = f", the nearest is {near[0]}" if near else ""
        text = f"architecture {repr(architecture)[:100]} is not supported{nearest}; supported: {', '.join(LAYOUTS)}"
        raise ModelFileError(path, text, key)
    return architecture

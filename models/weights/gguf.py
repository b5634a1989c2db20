"""GGUF files as checkpoints: Hugging Face names and orientation over the tensors of a llama.cpp file.

Owns what differs between the two conventions: names, and the order of the query and key rows of llama files.
The header is read by gguf_header, block formats by gguf_dequant. Knows nothing of model classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from io import FileIO
from typing import Any

import numpy as np

from models.weights.errors import ModelFileError
from models.weights.files import open_regular
from models.weights.gguf_dequant import dequantize
from models.weights.gguf_header import TensorInfo, read_header
from models.weights.source import WHOLE

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Bytes of the file dequantised at a time, in whole rows: large enough for numpy, small enough to stay in cache.
CHUNK_BYTES = 1 << 18

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_GLOBAL_TENSOR = re.compile(r"([a-z_]+)\.(weight|bias)")
_HEADS_KEY = {"self_attn.q_proj": "attention.head_count", "self_attn.k_proj": "attention.head_count_kv"}


def canonical_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that has no counterpart is kept."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    if match := _GLOBAL_TENSOR.fullmatch(name):
        part, kind = match.groups()
        if part in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[part]}.{kind}"
    return name


def unpermute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows of a llama file in Hugging Face order: [num_heads * H, ...], any number of dimensions.

    llama.cpp rotates neighbouring rows of a head, Hugging Face rows that are H/2 apart; its converter interleaves the
    two halves of every head, and this undoes it.
    """
    head_dim = array.shape[0] // num_heads
    split = array.reshape(num_heads, head_dim // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


class GGUFFile:
    """WeightSource over one GGUF file. The header is checked here; tensors are read when asked for.

    Attributes:
      path: as given, as text.
      metadata: the file's key-values: Python scalars, strings, lists of strings, numpy arrays of numbers.
      architecture: "llama", "qwen2" or "qwen3".

    Raises ModelFileError for a file that is missing, not a regular file, inconsistent, of another architecture, or one
    part of a split model. Reading is safe from several threads. A context manager; `close` may be called twice.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._file: FileIO | None = None
        try:
            descriptor, size = open_regular(self.path)
            self._file = FileIO(descriptor)
            header = read_header(self.path, descriptor, size)
            self.metadata = header.metadata
            self.architecture = _architecture(self.path, header.metadata)
            self._heads = {part: self._head_count(key) for part, key in _HEADS_KEY.items()}
            self._tensors = self._named(header.tensors)
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
        if self._file is not None:
            self._file.close()

    def names(self) -> Iterable[str]:
        """Canonical names, in the order of the file."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """These rows and columns of [out, in]: float16 or bfloat16 where the file holds it so, else float32."""
        info, num_heads = self._info(name), self._permuted_heads(name)
        first, last, _ = rows.indices(info.shape[0])
        if num_heads is None:
            return self._read_rows(info, first, last, columns)
        head_dim = info.shape[0] // num_heads
        first_head, last_head = first // head_dim, -(-last // head_dim)
        stored = self._read_rows(info, first_head * head_dim, last_head * head_dim, columns)
        start = first_head * head_dim
        return unpermute_rows(stored, last_head - first_head)[first - start : last - start]

    def _read_rows(self, info: TensorInfo, first: int, last: int, columns: slice) -> np.ndarray:
        """Rows in the order of the file. Whole rows are read, one at least, and some at a time."""
        if len(info.shape) == 1:  # blocks may cross entries, so this is one row
            return dequantize(info.format, self._bytes(info, 0, info.num_bytes)).reshape(-1)[first:last]
        row_bytes = info.num_bytes // info.shape[0]
        step = max(1, CHUNK_BYTES // row_bytes)
        start, stop, _ = columns.indices(info.shape[1])
        values = np.empty((last - first, stop - start, *info.shape[2:]), info.format.dtype)
        for row in range(first, last, step):
            count = min(step, last - row)
            chunk = dequantize(info.format, self._bytes(info, row * row_bytes, count * row_bytes))
            values[row - first : row - first + count] = chunk.reshape(count, *info.shape[1:])[:, columns]
        return values

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ModelFileError(self.path, "no such tensor in the file", name)
        return self._tensors[name]

    def _bytes(self, info: TensorInfo, start: int, num_bytes: int) -> bytes:
        if self._file is None or self._file.closed:
            raise ModelFileError(self.path, "the file has been closed", info.name)
        try:
            data = os.pread(self._file.fileno(), num_bytes, info.start + start)
        except OSError as error:
            raise ModelFileError(self.path, f"cannot be read: {error.strerror}", info.name) from None
        if len(data) != num_bytes:
            raise ModelFileError(self.path, "the file became shorter while it was read", info.name)
        return data

    def _named(self, tensors: tuple[TensorInfo, ...]) -> dict[str, TensorInfo]:
        named: dict[str, TensorInfo] = {}
        for info in tensors:
            name = canonical_name(info.name)
            if name in named:
                raise ModelFileError(self.path, f"stands for {name}, as does {named[name].name}", info.name)
            named[name] = info
            heads = self._permuted_heads(name)
            if heads is not None and info.shape[0] % (2 * heads):
                raise ModelFileError(self.path, f"{info.shape[0]} rows are no even number for {heads} heads", info.name)
        return named

    def _permuted_heads(self, name: str) -> int | None:
        """The number of heads whose rows are permuted in this tensor; None when rows are in Hugging Face order."""
        if self.architecture != "llama" or not name.startswith("model.layers."):
            return None
        for part, heads in self._heads.items():
            if name.endswith((f".{part}.weight", f".{part}.bias")):
                return heads
        return None

    def _head_count(self, key: str) -> int:
        # Files whose key and query heads are equally many may leave out the former.
        key = f"{self.architecture}.{key}"
        heads = self.metadata.get(key, self.metadata.get(f"{self.architecture}.{_HEADS_KEY['self_attn.q_proj']}"))
        if type(heads) is not int or heads < 1:
            raise ModelFileError(self.path, f"must be a positive number, got {repr(heads)[:100]}", key)
        return heads


def _architecture(path: str, metadata: Mapping[str, Any]) -> str:
    key = "general.architecture"
    architecture = metadata.get(key)
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        shown = repr(architecture)[:100]
        raise ModelFileError(path, f"architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}", key)
    parts = metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        text = "one part of a split model; join the parts with llama-gguf-split --merge"
        raise ModelFileError(path, text, "split.count")
    return architecture

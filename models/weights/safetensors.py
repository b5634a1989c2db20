"""Safetensors checkpoints: one file, or shards listed by an index (format: github.com/huggingface/safetensors).

The files are written by others, so everything is checked before it is used: header, offsets, and that no path leaves
the checkpoint's folder. Formats that are programs (pickle: .bin, .pt, .pth) are refused. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.weights.errors import ModelFileError
from models.weights.source import WHOLE

MAX_HEADER_BYTES = 100 << 20
MAX_RANK = 16
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `start` is counted from the beginning of the file, in bytes."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsCheckpoint:
    """WeightSource over a checkpoint folder or one .safetensors file; headers are read at once, tensors on demand.

    Of a tensor only the bytes of the rows and columns asked for are read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._files: list[_SafetensorsFile] = []
        self._where: dict[str, _SafetensorsFile] = {}
        try:
            self._open(Path(path))
        except BaseException:
            self.close()
            raise

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).tensors[name].shape

    @property
    def bytes_read(self) -> int:
        """Bytes read of all files so far, headers included."""
        return sum(file.bytes_read for file in self._files)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """These rows and columns in the dtype of the file, in memory of their own."""
        return self._file(name).read(name, rows, columns)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file(self, name: str) -> _SafetensorsFile:
        if name not in self._where:
            raise ModelFileError(self.path, "there is no such tensor", name)
        return self._where[name]

    def _open(self, path: Path) -> None:
        if path.suffix in PICKLE_SUFFIXES:
            raise ModelFileError(path, "pickle files can run code and are never read: convert to safetensors")
        if not path.is_dir():
            self._add(path)
        elif (path / SINGLE_FILE).exists() or (path / SINGLE_FILE).is_symlink():
            self._add(_inside(path, SINGLE_FILE))
        elif (path / INDEX_FILE).exists():
            self._open_index(path)
        elif any(child.suffix in PICKLE_SUFFIXES for child in path.iterdir()):
            raise ModelFileError(path, "holds pickle weights, which can run code and are never read: use safetensors")
        else:
            raise ModelFileError(path, f"holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    def _add(self, path: Path) -> _SafetensorsFile:
        file = _SafetensorsFile(path)
        self._files.append(file)
        self._where |= dict.fromkeys(file.tensors, file)
        return file

    def _open_index(self, folder: Path) -> None:
        index_path = _inside(folder, INDEX_FILE)
        if not index_path.is_file() or index_path.stat().st_size > MAX_HEADER_BYTES:
            raise ModelFileError(index_path, f"must be a regular file of at most {MAX_HEADER_BYTES} bytes")
        weight_map = _parse_object(index_path, index_path.read_bytes()).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFileError(index_path, "must map tensor names to file names", "weight_map")
        for file_name in dict.fromkeys(weight_map.values()):
            file = self._add(_inside(folder, file_name))
            listed = {tensor for tensor, where in weight_map.items() if where == file_name}
            differing = sorted(listed ^ file.tensors.keys())
            if differing:
                raise ModelFileError(index_path, f"index and file {file_name} disagree about this tensor", differing[0])


def _inside(folder: Path, name: str) -> Path:
    """The file `name` of a checkpoint folder; ModelFileError if it is elsewhere, by its spelling or by a link.

    One kind of link out is legitimate: the Hugging Face cache keeps files in <model>/blobs, and
    <model>/snapshots/<revision> holds links to them.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise ModelFileError(folder, "file names must be relative and stay inside the folder", name)
    try:
        home, target = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise ModelFileError(folder, f"cannot be resolved: {error}", name) from error
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(place) for place in allowed):
        raise ModelFileError(folder, "links must not lead out of the folder", name)
    return target


class _SafetensorsFile:
    """One open file whose header has been checked: every byte after it belongs to exactly one tensor."""

    def __init__(self, path: Path):
        self.path = path
        self.bytes_read = 0
        self._fd = -1
        try:
            # Asked before opening: opening a pipe would wait for a writer.
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ModelFileError(path, "must be a regular file")
            self._fd = os.open(path, os.O_RDONLY)
            self.tensors = self._read_header(os.fstat(self._fd).st_size)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
        except ModelFileError:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        info = self.tensors[name]
        spans = [part.indices(size)[:2] for part, size in zip((rows, columns), info.shape, strict=False)]
        array = np.empty([end - start for start, end in spans] + list(info.shape[2:]), info.dtype)
        if array.size == 0:
            return array
        # In bytes: of a whole row, and where the part of one begins.
        row_bytes = info.num_bytes // info.shape[0] if spans else info.num_bytes
        start = info.start + (spans[0][0] * row_bytes if spans else 0)
        if len(spans) < 2 or spans[1] == (0, info.shape[1]):
            self._fill(array.reshape(-1).view(np.uint8).data, start)
        else:
            start += spans[1][0] * (row_bytes // info.shape[1])
            for number, row in enumerate(array.reshape(len(array), -1).view(np.uint8)):
                self._fill(row.data, start + number * row_bytes)
        return array

    def _fill(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                raise ModelFileError(self.path, "the file ends before its data", f"byte {offset}")
            self.bytes_read += count
            view, offset = view[count:], offset + count

    def _read_header(self, file_bytes: int) -> dict[str, TensorInfo]:
        if file_bytes < 8:
            raise ModelFileError(self.path, f"must be at least 8 bytes long, got {file_bytes}")
        prefix = bytearray(8)
        self._fill(memoryview(prefix), 0)
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ModelFileError(self.path, f"header must be at most {MAX_HEADER_BYTES} bytes, got {header_bytes}")
        if 8 + header_bytes > file_bytes:
            raise ModelFileError(self.path, f"header of {header_bytes} bytes does not fit a file of {file_bytes}")
        raw = bytearray(header_bytes)
        self._fill(memoryview(raw), 8)
        data_start = 8 + header_bytes
        header = _parse_object(self.path, bytes(raw))
        header.pop("__metadata__", None)
        tensors = {name: _tensor_info(self.path, name, entry, data_start) for name, entry in header.items()}
        self._check_cover(tensors, data_start, file_bytes)
        return tensors

    def _check_cover(self, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int) -> None:
        position = data_start
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if info.start != position:
                what = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
                raise ModelFileError(self.path, f"data_offsets: the tensor {what}", name)
            position += info.num_bytes
        if position != file_bytes:
            raise ModelFileError(self.path, f"the header describes {position} bytes, but the file has {file_bytes}")


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(path, "an entry must hold exactly dtype, shape and data_offsets", name)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ModelFileError(path, f"dtype must be one of {', '.join(DTYPES)}, got {code!r}", name)
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise ModelFileError(path, f"shape must be a list of at most {MAX_RANK} integers >= 0, got {shape!r}", name)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(path, f"data_offsets must be [begin, end] with 0 <= begin <= end, got {offsets!r}", name)
    num_bytes = math.prod(shape) * DTYPES[code].itemsize
    if num_bytes != offsets[1] - offsets[0]:
        raise ModelFileError(
            path, f"{code} {shape} takes {num_bytes} bytes, but data_offsets span {offsets[1] - offsets[0]}", name
        )
    return TensorInfo(DTYPES[code], tuple(shape), data_start + offsets[0], num_bytes)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ModelFileError(path, "a JSON key appears twice", next(n for n in names if names.count(n) > 1))
        return found

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=without_duplicates)
    except ModelFileError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"holds invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"must hold a JSON object, got {type(value).__name__}")
    return value

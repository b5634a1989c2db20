"""Safetensors checkpoints: one file, or shards listed by an index (format: github.com/huggingface/safetensors).

The files are untrusted, so everything is checked before it is used: header, offsets, and that no path leaves
the checkpoint's folder. Formats that are programs (pickle: .bin, .pt, .pth) are refused.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import inside, open_regular, parse_object, read_bytes
from jaxengine.models.params.source import WHOLE

logger = logging.getLogger(__name__)

MAX_SHOWN = 8
MAX_HEADER_BYTES = 100 << 20
MAX_RANK = 16
MAX_SIZE = 2**63 - 1
# Beginnings of the names of weight files: transformers' and those of Mistral AI's own format.
USUAL, CONSOLIDATED = "model", "consolidated"
SINGLE_FILE = f"{USUAL}.safetensors"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
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


def files_of(stem: str) -> tuple[str, str]:
    """Return the names of the single weight file and of the index of shards. stem: their beginning."""
    return f"{stem}.safetensors", f"{stem}.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """Description of one tensor of a file. start: offset of its first byte from the beginning of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class ByteFile(Protocol):
    """Open file whose bytes are read at any offset.

    Attributes:
      by_row: whether reading a piece of each of many rows costs little; otherwise whole rows are read once, and
        cached until other rows are read.
      size: bytes of the file.
    """

    by_row: bool
    size: int

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read bytes from `offset` on into `view`; return the number of bytes read, 0 at the end of the file. Raises
        OSError if reading fails.
        """
        ...

    def close(self) -> None: ...


class LocalFile:
    """ByteFile of this machine. Its constructor raises the errors of `open_regular`."""

    by_row = True

    def __init__(self, path: Path):
        self._fd, self.size = open_regular(path)

    def read_into(self, view: memoryview, offset: int) -> int:
        return os.preadv(self._fd, [view], offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SafetensorsCheckpoint:
    """WeightSource over a checkpoint folder or one .safetensors file; headers are read on opening, tensors on demand.

    Only the bytes of the requested rows and columns of a tensor are read, or of its whole rows (ByteFile.by_row).
    open_remote: function that opens a weight file of the folder by its name, if they are stored elsewhere. stem:
    beginning of the names of the folder's files, USUAL or CONSOLIDATED. Raises ModelFileError for a checkpoint that is
    missing, invalid or of pickle files, and for a tensor that it does not have.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        open_remote: Callable[[str], ByteFile] | None = None,
        stem: str = USUAL,
    ):
        self.path = os.fspath(path)
        self._open_remote = open_remote
        self.stem, (self._single, self._index) = stem, files_of(stem)
        self._files: list[_SafetensorsFile] = []
        self._where: dict[str, _SafetensorsFile] = {}
        try:
            self._open(Path(path))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # a folder that cannot be listed
                raise ModelFileError(self.path, f"cannot be read: {error.strerror}") from None
            raise

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).tensors[name].shape

    @property
    def bytes_read(self) -> int:
        """Number of bytes read from all files so far, headers included."""
        return sum(file.bytes_read for file in self._files)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return these rows and columns in the dtype of the file, in newly allocated memory. Raises ModelFileError for
        an unknown tensor, and if the file cannot be read.
        """
        return self._file(name).read(name, rows, columns)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _file(self, name: str) -> _SafetensorsFile:
        """Return the file that has the tensor `name`. Raises ModelFileError if there is no such tensor."""
        if name not in self._where:
            raise ModelFileError(self.path, "there is no such tensor", name)
        return self._where[name]

    def _open(self, path: Path) -> None:
        """Open the checkpoint's files: the one at `path` or, of a folder, the single file or else the files of its
        index; of remote files, those of the index if the folder has one. Raises ModelFileError if there are none of a
        supported format, and for an invalid one; OSError for a folder that cannot be listed.
        """
        if path.suffix in PICKLE_SUFFIXES:
            raise ModelFileError(path, "pickle files can run code and are never read: convert to safetensors")
        if not path.is_dir():
            self._add(path)
        elif self._open_remote is not None:
            if (path / self._index).exists():
                self._open_index(path)
            else:
                self._add_named(path, self._single)
        elif (path / self._single).exists() or (path / self._single).is_symlink():
            self._add(inside(path, self._single))
        elif (path / self._index).exists():
            self._open_index(path)
        elif any(child.name.endswith((*PICKLE_SUFFIXES, ".bin.index.json")) for child in path.iterdir()):
            raise ModelFileError(path, "holds pickle weights, which can run code and are never read: use safetensors")
        else:
            raise ModelFileError(path, f"holds neither {self._single} nor {self._index}; pickle weights are never read")

    def _add_named(self, folder: Path, name: str) -> _SafetensorsFile:
        """Open the file `name` of the folder, locally or by `open_remote`, add its tensors, and return it. Raises
        ModelFileError for a name outside the folder, and for a file that is missing or invalid.
        """
        path = inside(folder, name)
        return self._add(path, None if self._open_remote is None else partial(self._open_remote, name))

    def _add(self, path: Path, open_file: Callable[[], ByteFile] | None = None) -> _SafetensorsFile:
        """Open a file, by `open_file` or, if it is None, `path` on this machine; add its tensors, which replace others
        of the same names, and return it.

        Raises ModelFileError for a file that is missing or invalid.
        """
        file = _SafetensorsFile(path, open_file or partial(LocalFile, path))
        self._files.append(file)
        self._where |= dict.fromkeys(file.tensors, file)
        return file

    def _open_index(self, folder: Path) -> None:
        """Open the files that the folder's index lists, and set the file of each tensor: the one in the index if
        several have it. Raises ModelFileError for an invalid index or file, and if the index does not decide.
        """
        index_path = folder / self._index
        raw = read_bytes(folder, self._index, MAX_HEADER_BYTES) or b""
        weight_map = _parse_unique(index_path, raw).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelFileError(index_path, "must map tensor names to file names", "weight_map")
        files = {name: self._add_named(folder, name) for name in dict.fromkeys(weight_map.values())}
        self._where = _placed(index_path, weight_map, files)


def _placed(
    index_path: Path, weight_map: Mapping[str, str], files: Mapping[str, _SafetensorsFile]
) -> dict[str, _SafetensorsFile]:
    """Return, for each tensor of `files` (by file name), the file that it is read from. If several files have a tensor,
    that is the one in the index (weight_map, file names by tensor).

    An index that differs from its files is used as far as possible, as in transformers, and the differences are logged
    as a warning. Raises ModelFileError for a tensor in several files none of which the index names.
    """
    holders: dict[str, list[str]] = {}
    for file_name, file in files.items():
        for tensor in file.tensors:
            holders.setdefault(tensor, []).append(file_name)
    chosen, wrong = {}, []
    for tensor, names in holders.items():
        listed = weight_map.get(tensor)
        if listed not in names:
            if len(names) > 1:
                text = f"the tensor is in {' and '.join(names[:3])}, and the index names {listed or 'none'} for it"
                raise ModelFileError(index_path, text, tensor)
            wrong.append(
                f"{tensor} is in {names[0]}, not in {listed}" if listed else f"{tensor} of {names[0]} is left out"
            )
        chosen[tensor] = files[listed if listed in names else names[0]]
    wrong += [f"{tensor} is not in {name}" for tensor, name in weight_map.items() if tensor not in holders]
    if wrong:
        more = f", and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        logger.warning("%s differs from its files: %s%s", index_path, "; ".join(wrong[:MAX_SHOWN]), more)
    return chosen


class _SafetensorsFile:
    """One open file whose header has been checked: every byte after it belongs to exactly one tensor. Raises
    ModelFileError for a file that cannot be opened or read, and for an invalid header.
    """

    def __init__(self, path: Path, open_file: Callable[[], ByteFile]):
        self.path = path
        self.bytes_read = 0
        self._file: ByteFile | None = None
        # The whole rows that were read last: (tensor, first row, row after the last), and their values.
        self._rows: tuple[tuple[str, int, int], np.ndarray] | None = None
        try:
            self._file = open_file()
            self.tensors = self._read_header(self._file.size)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._rows = None
        if self._file is not None:
            self._file.close()

    def read(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Return these rows and columns of a tensor, slices of step 1. Raises ModelFileError if the file cannot be read
        or ends early.
        """
        info = self.tensors[name]
        spans = [part.indices(size)[:2] for part, size in zip((rows, columns), info.shape, strict=False)]
        array = np.empty([end - start for start, end in spans] + list(info.shape[2:]), info.dtype)
        if array.size == 0:
            return array
        # Bytes of a complete row, and the offset of the first byte to read.
        row_bytes = info.num_bytes // info.shape[0] if spans else info.num_bytes
        start = info.start + (spans[0][0] * row_bytes if spans else 0)
        if len(spans) < 2 or spans[1] == (0, info.shape[1]):
            self._fill(array.reshape(-1).view(np.uint8).data, start)
        elif not self._opened.by_row:
            array[...] = self._whole_rows(name, *spans[0])[:, slice(*spans[1])]
        else:
            start += spans[1][0] * (row_bytes // info.shape[1])
            for number, row in enumerate(array.reshape(len(array), -1).view(np.uint8)):
                self._fill(row.data, start + number * row_bytes)
        return array

    @property
    def _opened(self) -> ByteFile:
        """The file, which must be open."""
        assert self._file is not None
        return self._file

    def _whole_rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return rows `first` to last - 1 of a tensor, all columns. They are cached, in place of the previous ones,
        until other rows are requested.

        Raises ModelFileError if the file cannot be read or ends early.
        """
        if self._rows is None or self._rows[0] != (name, first, last):
            self._rows = None
            self._rows = (name, first, last), self.read(name, slice(first, last), WHOLE)
        return self._rows[1]

    def _fill(self, view: memoryview, offset: int) -> None:
        """Read bytes from `offset` on until `view` is full, and add their number to `bytes_read`. Raises ModelFileError
        if reading fails, or the file ends before.
        """
        while len(view):
            try:
                count = self._opened.read_into(view, offset)
            except OSError as error:  # a disk or a network file system that fails
                raise ModelFileError(self.path, f"cannot be read: {error.strerror}", f"byte {offset}") from error
            if count == 0:
                raise ModelFileError(self.path, "the file ends before its data", f"byte {offset}")
            self.bytes_read += count
            view, offset = view[count:], offset + count

    def _read_header(self, file_bytes: int) -> dict[str, TensorInfo]:
        """Return the descriptions of all tensors, checked, of a file of `file_bytes` bytes. Raises ModelFileError for a
        header that is too large, cut short or invalid.
        """
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
        header = _parse_unique(self.path, bytes(raw))
        header.pop("__metadata__", None)
        tensors = {name: _tensor_info(self.path, name, entry, data_start) for name, entry in header.items()}
        self._check_cover(tensors, data_start, file_bytes)
        return tensors

    def _check_cover(self, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int) -> None:
        """Raise ModelFileError unless each byte from `data_start` to the end of the file belongs to exactly one
        tensor.
        """
        position = data_start
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
            if info.start != position:
                what = "overlaps the tensor before it" if info.start < position else "leaves a gap before it"
                raise ModelFileError(self.path, f"data_offsets: the tensor {what}", name)
            position += info.num_bytes
        if position != file_bytes:
            raise ModelFileError(self.path, f"the header describes {position} bytes, but the file has {file_bytes}")


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Return the TensorInfo of a header's entry. data_start: offset of the first byte after the header. Raises
    ModelFileError unless it has a known dtype, a shape of at most MAX_RANK sizes, and offsets that span its bytes.
    """
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelFileError(path, "an entry must hold exactly dtype, shape and data_offsets", name)
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ModelFileError(path, f"dtype must be one of {', '.join(DTYPES)}, got {_short(code)}", name)
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        text = f"shape must be a list of at most {MAX_RANK} integers from 0 to 2^63 - 1, got {_short(shape)}"
        raise ModelFileError(path, text, name)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        text = f"data_offsets must be [begin, end] with 0 <= begin <= end < 2^63, got {_short(offsets)}"
        raise ModelFileError(path, text, name)
    if math.prod(max(size, 1) for size in shape) > MAX_SIZE // 8:  # numpy counts this way even if a size is 0
        raise ModelFileError(path, f"shape must have sizes with a product of at most 2^60, got {_short(shape)}", name)
    num_bytes = math.prod(shape) * DTYPES[code].itemsize
    if num_bytes != offsets[1] - offsets[0]:
        raise ModelFileError(
            path, f"{code} {shape} takes {num_bytes} bytes, but data_offsets span {offsets[1] - offsets[0]}", name
        )
    return TensorInfo(DTYPES[code], tuple(shape), data_start + offsets[0], num_bytes)


def _short(value: Any) -> str:
    """Return the first 100 characters of the repr of a header's value, for an error."""
    return repr(value)[:100]


def _is_sizes(value: Any) -> bool:
    """Return whether a header's value is a list of integers from 0 to MAX_SIZE."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= MAX_SIZE for n in value)


def _without_duplicates(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Return an object_pairs_hook for json that returns dicts and raises ModelFileError for a key that appears
    twice.
    """

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise ModelFileError(path, "a JSON key appears twice", name)
                seen.add(name)
        return found

    return checked


def _parse_unique(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`, in which no key may appear twice. Raises ModelFileError for anything else."""
    try:
        source = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(path, f"not UTF-8 text: {error.reason}") from None
    return parse_object(path, source, _without_duplicates(path))

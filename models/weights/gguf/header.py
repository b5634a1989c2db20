"""GGUF headers, versions 2 and 3 (layout: ggml-org/ggml, docs/gguf.md).

The file is not trusted. Every count and length is compared with the remaining bytes before anything is read or
allocated, in Python integers, which do not overflow; so is the location of every tensor. Every fault becomes one
ModelFileError that says where.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import open_regular
from jaxengine.models.weights.gguf.dequant import FORMATS, BlockFormat

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 16
MAX_DIMS = 4
MAX_KEY_BYTES = 65535
MAX_TENSOR_NAME_BYTES = 256
MAX_NESTING = 4
# A short string or a table row takes more memory than bytes of the file, so the number per file is bounded. The largest
# vocabularies have 0.3 million tokens and twice as many merges.
MAX_ITEMS = 1 << 21
ITEMS_OF_A_LIST = 4
MAX_TENSORS = 1 << 17

# ggml's names of unsupported types, for the error.
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 27: "I64", 28: "F64", 41: "Q1_0"}

STRING, ARRAY, BOOL = 8, 9, 7
# Value types of one fixed size, by GGUF's number.
SCALARS: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclass(frozen=True)
class TensorInfo:
    """Location of a tensor. `shape` is row-major ([out, in]); `start` counts bytes from the beginning of the file.

    part: number of the file among those of a split model.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    start: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True)
class Header:
    """Content of a header.

    metadata: Python scalars, strings, lists and numpy arrays by key. tensors: in the order of the file.
    """

    version: int
    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]


def header_of(path: str | os.PathLike[str]) -> Header:
    """Return the header of a GGUF file, checked. Raises ModelFileError for a file that is invalid or cannot be read."""
    try:
        descriptor, size = open_regular(path)
        try:
            return read_header(path, descriptor, size)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a path that holds a NUL byte
        raise ModelFileError(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_header(path: str | os.PathLike[str], descriptor: int, size: int) -> Header:
    """Return the header of an open regular file of `size` bytes, checked. path: for errors.

    Raises ModelFileError for an invalid file, OSError if it cannot be mapped.
    """
    if size == 0:
        raise ModelFileError(path, "the file is empty")
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as view:
        cursor = _Cursor(path, view, size)
        version = _read_version(cursor)
        num_tensors = cursor.count("tensor count", least_bytes=32)
        if num_tensors > MAX_TENSORS:
            raise cursor.fail(f"{num_tensors} tensors, at most {MAX_TENSORS} are allowed", "tensor count")
        num_keys = cursor.count("metadata count", least_bytes=13)
        metadata = _read_metadata(cursor, num_keys)
        alignment = _alignment(cursor, metadata)
        entries = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
        data_start = _round_up(cursor.position, alignment)
        return Header(version, metadata, _locate_tensors(path, entries, data_start, alignment, size))


class _Cursor:
    """Read position in the file, which never passes its end."""

    def __init__(self, path: str | os.PathLike[str], view: mmap.mmap, size: int):
        self.path, self.size, self.position = path, size, 0
        self._view = view
        self._items_left = MAX_ITEMS

    def fail(self, what: str, where: str | None = None) -> ModelFileError:
        """Return, for the caller to raise, the error that the file has the fault `what`. where: the key, name or
        position of the fault; None for the present offset.
        """
        return ModelFileError(self.path, what, where or f"byte {self.position}")

    def take(self, num_bytes: int, where: str) -> bytes:
        """Return the next `num_bytes` bytes and move past them. where: key or name for the error, here and in the other
        methods. Raises ModelFileError if fewer bytes are left.
        """
        left = self.size - self.position
        if num_bytes > left:
            raise self.fail(f"{num_bytes} bytes announced, but the file ends after {left}", where)
        start = self.position
        self.position += num_bytes
        return self._view[start : self.position]

    def integer(self, num_bytes: int, where: str) -> int:
        """Return the next unsigned little-endian integer of `num_bytes` bytes and move past it. Raises ModelFileError
        if fewer bytes are left.
        """
        return int.from_bytes(self.take(num_bytes, where), "little")

    def count(self, where: str, *, least_bytes: int) -> int:
        """Return the next 64-bit number, a count of items of at least `least_bytes` bytes each, and move past it.
        Raises ModelFileError if the rest of the file is too short for them.
        """
        count = self.integer(8, where)
        left = self.size - self.position
        if count * least_bytes > left:
            raise self.fail(f"{count} entries announced, but only {left} bytes are left", where)
        return count

    def text(self, where: str, limit: int | None = None) -> str:
        """Return the next string and move past it. limit: its most bytes; None for any length. Raises ModelFileError
        for a longer one, for one that passes the file's end, and unless it is UTF-8.
        """
        length = self.integer(8, where)
        if limit is not None and length > limit:
            raise self.fail(f"a name of {length} bytes, at most {limit} are allowed", where)
        try:
            return self.take(length, where).decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"text is not UTF-8: {error.reason}", where) from None

    def spend(self, items: int, where: str) -> None:
        """Deduct `items` Python objects from the file's budget. Raises ModelFileError if the budget is exceeded."""
        self._items_left -= items
        if self._items_left < 0:
            raise self.fail(f"metadata holds more than {MAX_ITEMS} strings and lists", where)


def _read_version(cursor: _Cursor) -> int:
    """Read the file's first eight bytes and return its version, one of VERSIONS. Raises ModelFileError for another
    version, for big-endian files, and for files that are not GGUF.
    """
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file: it starts with {magic!r}", "magic")
    version = cursor.integer(4, "version")
    if version and not version & 0xFFFF:
        raise cursor.fail("a big-endian GGUF file; only little-endian ones are read", "version")
    if version not in VERSIONS:
        raise cursor.fail(f"GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read", "version")
    return version


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    """Read `num_keys` keys and values and return them. Raises ModelFileError for a key that is given twice, and for
    invalid values.
    """
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        cursor.spend(1, "metadata")
        key = cursor.text("metadata key", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.fail("metadata key given twice", key)
        metadata[key] = _read_value(cursor, cursor.integer(4, key), key, depth=0)
    return metadata


def _read_value(cursor: _Cursor, kind: int, where: str, depth: int) -> Any:
    """Read and return a value of GGUF's type `kind`. depth: number of arrays around it. Raises ModelFileError for an
    unknown type, and an invalid value.
    """
    if kind == STRING:
        return cursor.text(where)
    if kind == ARRAY:
        return _read_array(cursor, where, depth + 1)
    return _read_scalars(cursor, kind, 1, where)[0].item()


def _read_array(cursor: _Cursor, where: str, depth: int) -> np.ndarray | list[Any]:
    """Read and return an array: a numpy array of numbers or bools, a list of strings or arrays. depth: 1 for the
    outermost array.

    Raises ModelFileError for deeper nesting than MAX_NESTING, an unknown type, and more entries than the file or the
    budget has.
    """
    if depth > MAX_NESTING:
        raise cursor.fail(f"arrays nested deeper than {MAX_NESTING}", where)
    kind = cursor.integer(4, where)
    if kind in SCALARS:
        count = cursor.count(where, least_bytes=SCALARS[kind].itemsize)
        return _read_scalars(cursor, kind, count, where)
    if kind not in (STRING, ARRAY):
        raise cursor.fail(f"unknown value type {kind}", where)
    count = cursor.count(where, least_bytes=8 if kind == STRING else 12)
    cursor.spend(count if kind == STRING else count * ITEMS_OF_A_LIST, where)
    return [_read_value(cursor, kind, where, depth) for _ in range(count)]


def _read_scalars(cursor: _Cursor, kind: int, count: int, where: str) -> np.ndarray:
    """Read and return `count` values of GGUF's type `kind`, one of SCALARS. Raises ModelFileError for another type, for
    a bool that is neither 0 nor 1, and if too few bytes are left.
    """
    if kind not in SCALARS:
        raise cursor.fail(f"unknown value type {kind}", where)
    raw = np.frombuffer(cursor.take(count * SCALARS[kind].itemsize, where), np.uint8)
    if kind == BOOL and raw.max(initial=0) > 1:
        raise cursor.fail(f"a bool must be 0 or 1, got {raw.max()}", where)
    return raw.view(SCALARS[kind])


def _alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    """Return the number of bytes to which tensors are aligned; DEFAULT_ALIGNMENT if the metadata has none.

    Raises ModelFileError unless it is a power of two from 8 to MAX_ALIGNMENT.
    """
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    valid = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT and alignment.bit_count() == 1
    if not valid:
        text = f"alignment must be a power of two from 8 to {MAX_ALIGNMENT}, got {repr(alignment)[:100]}"
        raise cursor.fail(text, ALIGNMENT_KEY)
    return alignment


def _read_tensor_entry(cursor: _Cursor) -> TensorInfo:
    """Read and return one row of the tensor table, with `start` relative to the data section and not yet checked.

    Raises ModelFileError for an invalid row, or a format that is not supported.
    """
    name = cursor.text("tensor name", MAX_TENSOR_NAME_BYTES)
    num_dims = cursor.integer(4, name)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"a tensor has 1 to {MAX_DIMS} dimensions, got {num_dims}", name)
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, name))
    if 0 in dims:
        raise cursor.fail(f"a dimension of {dims} is 0", name)
    kind = cursor.integer(4, name)
    if kind not in FORMATS:
        known = ", ".join(block_format.name for block_format in FORMATS.values())
        shown = f"{OTHER_TYPES[kind]} ({kind})" if kind in OTHER_TYPES else kind
        raise cursor.fail(f"tensor type {shown} is not supported; supported: {known}", name)
    block_format = FORMATS[kind]
    # GGUF lists the fastest dimension first, and a block never crosses rows.
    if dims[0] % block_format.values:
        text = f"{block_format.name} rows must be a multiple of {block_format.values} values, got {dims[0]}"
        raise cursor.fail(text, name)
    num_bytes = math.prod(dims) // block_format.values * block_format.nbytes
    return TensorInfo(name, dims[::-1], block_format, cursor.integer(8, name), num_bytes)


def _locate_tensors(
    path: str | os.PathLike[str], entries: list[TensorInfo], data_start: int, alignment: int, size: int
) -> tuple[TensorInfo, ...]:
    """Return the entries with `start` converted to offsets from the beginning of the file, of `size` bytes.

    data_start: offset of the data section. Raises ModelFileError for a name given twice, for data out of bounds,
    unaligned or overlapping, and for bytes after the last tensor's, other than those that align the file's end.
    """
    seen: set[str] = set()
    located = []
    for entry in entries:
        if entry.name in seen:
            raise ModelFileError(path, "tensor name given twice", entry.name)
        seen.add(entry.name)
        if entry.start % alignment:
            raise ModelFileError(path, f"tensor offset {entry.start} is not aligned to {alignment}", entry.name)
        start = data_start + entry.start
        if start + entry.num_bytes > size:
            text = f"tensor data reaches byte {start + entry.num_bytes}, but the file has {size}: cut short or corrupt"
            raise ModelFileError(path, text, entry.name)
        located.append(TensorInfo(entry.name, entry.shape, entry.format, start, entry.num_bytes))
    end = data_start
    for entry in sorted(located, key=lambda entry: entry.start):
        if entry.start < end:
            raise ModelFileError(path, f"tensor data at byte {entry.start} overlaps other data", entry.name)
        end = entry.start + entry.num_bytes
    if size > _round_up(end, alignment):
        raise ModelFileError(path, f"{size - end} bytes follow the last tensor; the file is not what its header says")
    return tuple(located)


def _round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple

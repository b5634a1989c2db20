"""One recorded step as a safetensors file: arrays by name, and a description of the step as JSON in its metadata.

Any safetensors library opens it. Every array has a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

FORMAT = 1
# Arrays whose entries, along the first axis, have a digest each.
BY_ENTRY = ("pages/data", "after/pages/data")
_ABOUT = "jaxengine_step"
_MAX_HEADER_BYTES = 100 << 20
_DTYPES = {
    np.dtype(dtype): name
    for name, dtype in {
        "BOOL": np.bool_,
        "I8": np.int8,
        "U8": np.uint8,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class RecordError(ValueError):
    """Raised if a recorded step cannot be read or run. The message has its file and the reason."""


class RecordedStep(NamedTuple):
    """A step as read from its file.

    Attributes:
      about: plain JSON values: `step`, `bucket`, `weights`, `time`.
      arrays: the step's arrays by name.
      digests: SHA-256 of each array as recorded: a text, or for the arrays of BY_ENTRY a list with one per entry.
    """

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digests: dict[str, Any]

    def damaged(self) -> list[tuple[str, list[int]]]:
        """Return (name, indices of damaged entries) of each array whose digest is not the recorded one, or is not
        recorded.

        The indices are empty for an array that was recorded with a single digest, or with none.
        """
        found = []
        for name, array in self.arrays.items():
            digest, recorded = digest_of(name, array), self.digests.get(name)
            if digest != recorded:
                entries = zip(digest, recorded, strict=False) if isinstance(recorded, list) else ()
                found.append((name, [at for at, (own, other) in enumerate(entries) if own != other]))
        return found


def digest_of(name: str, array: np.ndarray) -> Any:
    """Return the SHA-256 of an array's bytes in hexadecimal; for an array whose `name` is in BY_ENTRY a list, one for
    each entry of axis 0.
    """
    if name in BY_ENTRY:
        return [_sha256(entry) for entry in array]
    return _sha256(array)


def num_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Return the total bytes of the arrays of a step. Its file takes some hundred bytes more for each array."""
    return sum(array.nbytes for array in arrays.values())


def write_step(path: Path, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
    """Write a step to the file `path`, completely or not at all, in place of an earlier one; return the size of the
    file in bytes.

    about: description, plain JSON values. Raises KeyError for an array of a dtype that _DTYPES lacks, and OSError.
    """
    return write_whole(path, _chunks(about, {name: np.asarray(array, order="C") for name, array in arrays.items()}))


def write_whole(path: Path, chunks: Iterator[bytes | memoryview]) -> int:
    """Write `chunks` to the file `path`, readable by its owner alone, completely or not at all, and flush it to the
    disk; return its size in bytes.

    Raises OSError if it cannot be written, or what `chunks` raises; an earlier file of that name is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb", opener=_owned) as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return size


def read_step(path: Path) -> RecordedStep:
    """Read a step from a file; its arrays are read-only. Digests are not compared, see RecordedStep.damaged.

    Raises RecordError for a file that is unreadable, truncated, not a recorded step, or of another format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror})") from None
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(_MAX_HEADER_BYTES, len(content) - 8):
        raise RecordError(f"{path} is cut short, or no recorded step")
    try:
        header = json.loads(content[8 : 8 + size])
        metadata = json.loads(header.pop("__metadata__")[_ABOUT])
        about, digests, version = metadata["about"], metadata["digests"], metadata["format"]
        arrays = {name: _array(content, 8 + size, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(f"{path} is cut short, or no recorded step ({error})") from None
    if version != FORMAT:
        raise RecordError(f"{path} has format {version!r}; this version of jaxengine reads {FORMAT}")
    return RecordedStep(about, arrays, digests)


def _owned(path: str, flags: int) -> int:
    """Open the file at `path` with the mode 0o600, as records hold what users sent; an `opener` for `open`. flags: as
    of os.open. Returns the descriptor.
    """
    return os.open(path, flags, 0o600)


def _chunks(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Iterator[bytes | memoryview]:
    """Yield the content of a step's file: the header of safetensors, then each array. about: description, plain JSON
    values. arrays: C-contiguous. Raises KeyError for a dtype that _DTYPES lacks.
    """
    digests = {name: digest_of(name, array) for name, array in arrays.items()}
    header: dict[str, Any] = {
        "__metadata__": {_ABOUT: json.dumps({"format": FORMAT, "about": about, "digests": digests})}
    }
    end = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _DTYPES[array.dtype],
            "shape": array.shape,
            "data_offsets": [end, end := end + array.nbytes],
        }
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    yield len(written).to_bytes(8, "little") + written
    for array in arrays.values():
        if array.nbytes:
            yield _bytes(array)


def _array(content: bytes, first: int, entry: Mapping[str, Any]) -> np.ndarray:
    """Return an array of a file as a view. first: offset of the arrays; entry: its entry in the header. Raises
    ValueError, KeyError or TypeError for an entry that does not fit the file.
    """
    dtype, shape, (begin, end) = _BY_NAME[entry["dtype"]], tuple(map(int, entry["shape"])), entry["data_offsets"]
    count = math.prod(shape)
    if min(shape, default=0) < 0 or begin < 0 or end - begin != count * dtype.itemsize or first + end > len(content):
        raise ValueError("an array lies outside of the file")
    return np.frombuffer(content, dtype, count, first + begin).reshape(shape)


def _bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of an array in C order, if possible as a view."""
    # By way of uint8: buffers of ml_dtypes' types have formats that Python does not support.
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _sha256(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes in hexadecimal."""
    return hashlib.sha256(_bytes(array) if array.nbytes else b"").hexdigest()

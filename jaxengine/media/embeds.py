"""Embeddings that a request passes instead of an image, read from array files and never unpickled.

The row width and the grid that a model family needs are checked when the prompt is assembled.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from safetensors import deserialize

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.fetching import base64_pieces
from jaxengine.scheduler.base.errors import show_value

# Keys of embeddings and of their grid, which some families need; vLLM's.
EMBEDS, GRID = "image_embeds", "image_grid_thw"
_ARRAY = "[rows, size] of float32, float16 or bfloat16"
_FORMS = "safetensors with one tensor, or .npy"
_PICKLED = "is a file of torch.save or pickle, which may contain code and is not read; give the tensor as " + _FORMS
# First bytes of files of torch.save and pickle; of safetensors with some lengths of header, too.
_PICKLES = (b"PK\3\4", b"\x80")
_NPY_VERSIONS = ((1, 0), (2, 0), (3, 0))
_TYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, eq=False)
class GivenEmbeds:
    """Embeddings as received, unchecked.

    Attributes:
      data: bytes of a file, its base64, or an array.
      grid: (time, height, width) in patches; None if not given.
    """

    data: Any
    grid: Any = None


@dataclass(frozen=True, eq=False)
class Embeds:
    """Checked embeddings.

    Attributes:
      values: f32[rows, E], finite.
      grid: (time, height, width) in patches before merging; None if not given.
    """

    values: np.ndarray
    grid: tuple[int, int, int] | None


def without_torch(value: Any) -> Any:
    """Return a tensor of torch, on any device, as a numpy array, bfloat16, which numpy lacks, as float32; values of
    other classes, subclasses outside of torch included, unchanged. Never imports torch.
    """
    if type(value).__module__.partition(".")[0] != "torch" or not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return np.asarray(value.float() if "bfloat16" in str(value.dtype) else value)


def given_embeds(value: Any) -> GivenEmbeds | None:
    """Return a value as GivenEmbeds if it is embeddings in place of an image; None for anything else.

    Embeddings are a floating-point array [rows, E], a dict with "image_embeds" and perhaps "image_grid_thw", or an
    Embeds; tensors of torch are arrays. The content of the dict is not checked.
    """
    value = without_torch(value)
    if isinstance(value, Embeds):
        return GivenEmbeds(value.values, value.grid)
    if isinstance(value, Mapping) and EMBEDS in value:
        return GivenEmbeds(without_torch(value[EMBEDS]), without_torch(value.get(GRID)))
    is_rows = isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype.kind in "fV"
    return GivenEmbeds(value) if is_rows else None


def read_embeds(given: GivenEmbeds, options: MediaOptions) -> Embeds:
    """Decode (files and base64) and check embeddings, and return them as f32. A contiguous array of float32 is not
    copied.

    Raises MediaError for more than options.max_media_bytes, for anything but one array [rows, E] of float32, float16 or
    bfloat16 with finite numbers, and for a grid that is not three whole numbers of at least 1.
    """
    data = given.data
    values = data if isinstance(data, np.ndarray) else _read_file(decoded(data, options.max_media_bytes))
    if values.dtype.name not in ("float16", "bfloat16", "float32") or values.ndim != 2 or 0 in values.shape:
        shown = f"{values.dtype}{list(values.shape)}"
        raise MediaError(f"is an array {shown}; allowed: {_ARRAY}")
    values = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(values).all():
        raise MediaError("has numbers that are not finite")
    return Embeds(values, _read_grid(given.grid))


def decoded(data: Any, most: int) -> bytes:
    """Return the bytes of a file given as bytes or as base64 text.

    Raises MediaError for anything else, invalid base64, and more than `most` bytes.
    """
    if not isinstance(data, (str, bytes)):
        raise MediaError(f"is a {type(data).__name__}; allowed: base64 of {_FORMS}, or in Python an array")
    size = len(data) if isinstance(data, bytes) else len(data) * 3 // 4 - 2
    if size > most:
        raise MediaError(f"has {size} bytes or more; allowed: {most} (max_media_bytes)")
    if isinstance(data, bytes):
        return data
    try:
        return base64_pieces.decode(data.encode("ascii"))
    except ValueError:  # binascii.Error and UnicodeError are some
        raise MediaError(f"is not valid base64; allowed: base64 of {_FORMS}") from None


def _read_file(data: bytes) -> np.ndarray:
    """Return the only array, [rows, E], of a .npy or safetensors file; bfloat16 becomes float32. data: bytes of the
    file.

    Raises MediaError for other files, pickles among them, other dtypes, several tensors, and another shape.
    """
    if data.startswith(b"\x93NUMPY"):
        return _read_npy(data)
    try:
        tensors = deserialize(data)
    except Exception:  # not only SafetensorError, and MemoryError for what a header claims
        if data.startswith(_PICKLES):
            raise MediaError(_PICKLED) from None
        raise MediaError(f"is a file of an unknown type; allowed: {_FORMS}") from None
    if len(tensors) != 1:
        raise MediaError(f"has {len(tensors)} tensors; allowed: one")
    _, tensor = tensors[0]
    if (kind := _TYPES.get(tensor["dtype"])) is None:
        raise MediaError(f"is a tensor of {tensor['dtype']}; allowed: {', '.join(_TYPES)}")
    values = np.frombuffer(tensor["data"], kind)
    if tensor["dtype"] == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return _shaped(values, tensor["shape"], "a safetensors file")


def _read_npy(data: bytes) -> np.ndarray:
    """Return the array [rows, E] in the bytes of a .npy file, without unpickling: a view of `data`, of any dtype
    without objects.

    Raises MediaError for an array of objects, other versions and shapes, and damaged files.
    """
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _NPY_VERSIONS:
            raise MediaError(f"is a .npy of version {version}; allowed: 1.0, 2.0 and 3.0")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(file)
        # The header may claim more data than there is, so its shape does not allocate memory.
        values = None if dtype.hasobject else np.frombuffer(data, dtype, offset=file.tell())
    except MediaError:
        raise
    except Exception:  # the header is a Python expression: its parser's errors, MemoryError and RecursionError are some
        raise MediaError("is a .npy that is damaged or cut short") from None
    if values is None:
        raise MediaError(_PICKLED)
    return _shaped(values, shape, "a .npy", "F" if by_columns else "C")


def _shaped(values: np.ndarray, shape: Sequence[int], name: str, order: Literal["C", "F"] = "C") -> np.ndarray:
    """Return `values`, [n], in the shape [rows, E] that the file claims.

    name: the file's type, for errors. order: "C" if they are stored row by row, "F" by columns. Raises MediaError for
    another number of dimensions, an empty array, and a shape that does not have n elements.
    """
    if len(shape) != 2 or 0 in shape:
        raise MediaError(f"is an array {values.dtype}{show_value(list(shape))}; allowed: {_ARRAY}")
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) != values.size:
        problem = f"is {name} that is damaged or cut short"
        raise MediaError(f"{problem}: it has the shape {show_value(list(shape))} and {values.size} numbers")
    return values.reshape(shape, order=order)


def _read_grid(grid: Any) -> tuple[int, int, int] | None:
    """Return a grid, given as a list, tuple or array of three whole numbers from 1 to 65,535, as a tuple; None for
    None. Raises MediaError for other values.
    """
    if grid is None:
        return None
    listed = grid.reshape(-1).tolist() if isinstance(grid, np.ndarray) else grid
    listed = list(listed) if isinstance(listed, (list, tuple)) else []
    if len(listed) != 3 or any(type(side) is not int or not 1 <= side < 1 << 16 for side in listed):
        problem = f"has {GRID} {show_value(grid)}; allowed: three whole numbers"
        raise MediaError(f"{problem}: time, height and width in patches")
    return listed[0], listed[1], listed[2]

"""WeightSource over arrays in memory, as a trainer has them: names and orientation of Hugging Face checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WHOLE, WrappedSource

PATH = "the given arrays"
# Halfway between the largest bfloat16 and the next power of two: from here on numbers are rounded to infinity.
_BEYOND = (2 - 2**-8) * 2.0**127


class Taken(NamedTuple):
    """Shape of a tensor that has been read and is no longer in memory."""

    shape: tuple[int, ...]


class ArraySource:
    """WeightSource over tensors by name. Each is copied to host memory when it is read, and only the last one read is
    cached there.

    Of a tensor that is split over devices, only the requested rows and columns are copied. Methods raise KeyError for
    an unknown name.
    """

    path = PATH

    def __init__(self, tensors: Mapping[str, Any]):
        """Store the tensors by name: numpy or jax arrays of any sharding, or Taken, which have a shape and cannot be
        read.
        """
        self._tensors = tensors
        self._newest: tuple[str, np.ndarray] | None = None

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        if is_in_pieces(tensor := self._tensors[name]):
            return read_slice(tensor, (rows, columns)[: tensor.ndim])
        if self._newest is None or self._newest[0] != name:
            self._newest = name, on_host(self._tensors[name])
        array = self._newest[1]
        return array[(rows, columns)[: array.ndim]].copy()  # the given ones are the trainer's

    def close(self) -> None:
        """Drop all tensors, so that no name is known any more."""
        self._newest = None
        self._tensors = {}


class FiniteSource(WrappedSource):
    """View of a source whose `read` raises ModelFileError for floating-point numbers that are not finite, or would not
    be in bfloat16.
    """

    def read(self, name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> np.ndarray:
        """Return these rows and columns of a tensor. Raises ModelFileError if they have floating-point numbers that are
        not finite, or would not be in bfloat16.
        """
        array = self._source.read(name, rows, columns)
        if jnp.issubdtype(array.dtype, jnp.floating) and not _is_finite(array):
            raise ModelFileError(self.path, "has numbers that are not finite", name)
        return array


def _is_finite(array: np.ndarray) -> bool:
    """Return whether all numbers are finite; those of more than two bytes must also be finite when they are rounded to
    bfloat16.
    """
    if array.itemsize <= 2 or array.size == 0:
        return bool(np.isfinite(array).all())
    return bool(array.min() > -_BEYOND and array.max() < _BEYOND)  # false for NaN


def as_array(tensor: Any) -> Any:
    """Return a PyTorch tensor as a numpy array, over its memory, or over a copy of a tensor on another device.

    Any other object is returned unchanged. So is a tensor without numbers (meta), a sparse one, or one split over
    processes, for which `fault_of` returns an error.
    """
    torch: Any = sys.modules.get("torch")
    if not isinstance(tensor, getattr(torch, "Tensor", ())) or hasattr(tensor, "full_tensor"):
        return tensor
    try:
        host = tensor.detach().cpu()
        kind = getattr(ml_dtypes, str(host.dtype).removeprefix("torch."), None)  # bfloat16 and the kinds of 8 bits
        if kind is None:
            return host.numpy()
        return host.view(torch.uint8 if host.element_size() == 1 else torch.int16).numpy().view(kind)
    except (TypeError, RuntimeError):
        return tensor


def fault_of(array: Any) -> str | None:
    """Return a text that says what is wrong with an object given as an array, None if nothing is. Objects that are not
    arrays with a numpy dtype, masked arrays, and deleted jax arrays are wrong.
    """
    is_array = hasattr(array, "__array__") and hasattr(array, "shape")
    if not is_array or not isinstance(getattr(array, "dtype", None), np.dtype):
        return f"must be an array of numbers, got {type(array).__name__}"
    if isinstance(array, np.ma.MaskedArray):
        return "must be an array without a mask"
    if isinstance(array, jax.Array) and array.is_deleted():
        return "is an array that has been deleted or given up"
    return None


def is_in_pieces(array: Any) -> bool:
    """Return whether an array is a jax array that is split over devices."""
    return isinstance(array, jax.Array) and len(_pieces(array)) > 1


def read_slice(array: jax.Array, index: Sequence[slice]) -> np.ndarray:
    """Return a part of an array in host memory; compiles nothing. This process must have all of the part.

    If devices have memory of their own, host memory holds the part and one of the array's pieces at a time. index:
    slices of step 1 along the first axes.
    """
    index = (*index, *(slice(None) for _ in range(array.ndim - len(index))))
    wanted = [part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True)]
    out = np.empty([end - begin for begin, end in wanted], array.dtype)
    for place, piece in _pieces(array).items():
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, place, strict=True)]
        if all(begin < end for begin, end in common):
            target = tuple(slice(b - own, e - own) for (b, e), (own, _) in zip(common, wanted, strict=True))
            source = tuple(slice(b - own, e - own) for (b, e), (own, _) in zip(common, place, strict=True))
            out[target] = on_host(piece)[source]
    return out


def _pieces(array: jax.Array) -> dict[tuple[tuple[int, int], ...], jax.Array]:
    """Return the pieces of an array on this process's devices, by their bounds (begin, end) along each axis, without
    duplicates.
    """
    bounds = (
        (tuple(part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)), shard.data)
        for shard in array.addressable_shards
    )
    return {tuple(place): data for place, data in bounds}


def on_host(array: Any) -> np.ndarray:
    """Return an array's numbers in host memory, possibly the array itself. The copy of a jax array is not cached by
    that array.
    """
    if isinstance(array, jax.Array):
        parts = [shard.data for shard in array.addressable_shards]
        array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts, dtype=array.dtype)
    return np.asarray(array)

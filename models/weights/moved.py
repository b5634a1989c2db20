"""Copies of arrays to the sharding and layout of an engine's, through host memory: no program is compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.models.weights.formats.arrays import on_host, read_slice
from jaxengine.models.weights.huge_pages import HugePages


def on_device(array: Any) -> jax.Array:
    """Return a jax array unchanged, and a copy on the default device of any other array."""
    return array if isinstance(array, jax.Array) else jax.device_put(np.array(array))


def is_finite(array: jax.Array, chunk_bytes: int | None = None) -> bool:
    """Return whether this process's part of an array has only finite numbers; True for integers.

    One device's piece at a time is in host memory. chunk_bytes: the most bytes of results for its elements; None for a
    whole piece.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    pieces = (on_host(shard.data) for shard in array.addressable_shards)
    return all(np.isfinite(piece[index]).all() for piece in pieces for index in _bands(piece.shape, chunk_bytes))


def _bands(shape: tuple[int, ...], chunk_bytes: int | None, number_bytes: int = 1) -> Iterator[Any]:
    """Yield slices of the first axis of an array of this shape, with at most `chunk_bytes` each, or one row if that is
    larger; one `...` for the whole array if chunk_bytes is None or the array has no axes.

    number_bytes: bytes of an element.
    """
    if chunk_bytes is None or not shape:
        yield ...
        return
    step = max(1, chunk_bytes // max(1, math.prod(shape[1:]) * number_bytes))
    for first in range(0, shape[0], step):
        yield slice(first, min(first + step, shape[0]))


def moved(array: jax.Array, old: Any, chunk_bytes: int | None = None) -> jax.Array:
    """Return a copy of `array` with the sharding and layout of `old`, which has its dtype and its shape, but may have
    more rows, which are zeros, after the transfers are complete.

    One device's part at a time goes through host memory: no program is compiled. chunk_bytes: bytes of further copies
    in host memory at a time; None for the whole part.
    """
    parts, memory = [], HugePages() if next(iter(old.sharding.device_set)).platform == "cpu" else None
    for device, index in old.sharding.addressable_devices_indices_map(old.shape).items():
        shape = old.sharding.shard_shape(old.shape)
        host = np.zeros(shape, old.dtype) if memory is None else memory.zeros(shape, np.dtype(old.dtype))
        for band in _bands(shape, chunk_bytes, np.dtype(old.dtype).itemsize):
            rows = read_slice(array, _within(index, band, old.shape))
            host[band][tuple(map(slice, rows.shape))] = rows
            del rows  # before the next ones are read
        parts.append(jax.block_until_ready(jax.device_put(host, device)))
        del host
    placed: Any = jax.make_array_from_single_device_arrays(old.shape, old.sharding, parts, dtype=old.dtype)
    return placed if placed.format == old.format else jax.device_put(placed, old.format)


def _within(index: tuple[slice, ...], band: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of an array of this shape that select a band of one device's part.

    index: slices of the part. band: a result of `_bands`, counted from the part's first row.
    """
    if band is ...:
        return index
    first = index[0].indices(shape[0])[0]
    return slice(first + band.start, first + band.stop), *index[1:]

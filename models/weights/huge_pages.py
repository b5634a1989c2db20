"""Memory of the host in which weights of CPUs lie one behind the other, in pages of 2 MiB where Linux has them.

A step reads every weight. In pages of 4 KiB, in which XLA would place them, some of that time goes into looking up
addresses. Knows nothing of weights.
"""

from __future__ import annotations

import contextlib
import mmap

import jax
import numpy as np

_PIECE_BYTES = 64 << 20
_BAND_BYTES = 4 << 20
# XLA takes an array that begins at a multiple of this over as it is; all others it copies.
_ALIGNMENT = 64


class HugePages:
    """Pieces of memory, filled from their beginning. Each lives as long as an array in it; unused, it takes none."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def copy(self, array: np.ndarray) -> np.ndarray:
        """The array, of any shape, order and dtype, in huge pages: row-major, and where XLA takes it over as it is."""
        size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free if size <= len(self._free) else _piece(max(size, _PIECE_BYTES))
        # A matrix larger than a piece does not end the one that others have begun.
        self._free = max(self._free, free[size:], key=len) if free is not self._free else free[size:]
        placed = free[: array.nbytes].view(array.dtype).reshape(array.shape)
        if array.flags.c_contiguous or not array.size:
            placed[...] = array
            return placed
        # XLA turns a matrix around in blocks, NumPy number by number. In bands, so that it is not held twice.
        cpu, step = jax.local_devices(backend="cpu")[0], max(1, _BAND_BYTES * len(array) // array.nbytes)
        for begin in range(0, len(array), step):
            placed[begin : begin + step] = np.asarray(jax.device_put(array[begin : begin + step], cpu))
        return placed


def _piece(size: int) -> np.ndarray:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)

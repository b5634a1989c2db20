"""Host memory for weights of CPUs, allocated contiguously in pages of 2 MiB where Linux has them, which saves address
translation.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import jax
import numpy as np

_PIECE_BYTES = 64 << 20
_BAND_BYTES = 4 << 20
_SMALL_BYTES = 1 << 20
# XLA uses an array that begins at a multiple of this without a copy.
_ALIGNMENT = 64


class HugePages:
    """Allocator of host memory in pieces that are filled from their beginning. A piece is released when no array is in
    it any more; an unused one takes no memory. Only one thread may use it at a time.
    """

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array of zeros in huge pages, row-major, and aligned so that XLA uses it without a copy.

        It is in the current piece or, if that is too full, in a new one of 64 MiB or more. Raises OSError if no memory
        is left.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free if size <= len(self._free) else _piece(max(size, _PIECE_BYTES))
        # A matrix larger than a piece does not end the piece that is partly filled.
        self._free = max(self._free, free[size:], key=len) if free is not self._free else free[size:]
        return free[:num_bytes].view(dtype).reshape(shape)

    def copy(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of an array of any shape, order and dtype in huge pages, allocated by `zeros`. Raises OSError
        if no memory is left.
        """
        placed = self.zeros(array.shape, array.dtype)
        if array.flags.c_contiguous or array.nbytes <= _SMALL_BYTES:
            placed[...] = array
            return placed
        # XLA transposes a matrix in blocks, NumPy element by element, which is faster where a processor's cache holds
        # the matrix. Bands keep it from being in memory twice.
        cpu, step = jax.local_devices(backend="cpu")[0], max(1, _BAND_BYTES * len(array) // array.nbytes)
        for begin in range(0, len(array), step):
            placed[begin : begin + step] = np.asarray(jax.device_put(array[begin : begin + step], cpu))
        return placed


def _piece(size: int) -> np.ndarray:
    """Return `size` bytes of new memory, zeros, in huge pages if the kernel has them. Raises OSError if no memory is
    left.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)

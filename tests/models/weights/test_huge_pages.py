"""Where weights of CPUs lie: where XLA takes them over, in pages that Linux may make huge, no longer than used."""

from __future__ import annotations

import errno
import mmap
import weakref
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxengine.models.weights import huge_pages
from jaxengine.models.weights.huge_pages import HugePages
from tests.models.weights.test_load import CONFIG, load, random_tensors

DTYPES = (np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn, np.int32)


def test_arrays_are_copied_whole(monkeypatch):
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(huge_pages, "_BAND_BYTES", 1000)
    monkeypatch.setattr(huge_pages, "_SMALL_BYTES", 40)
    rng, memory = np.random.default_rng(0), HugePages()
    shapes = ((5, 7), (40, 60), (3,), (0, 4), (), (2, 3, 5), (100, 100), (9, 9))
    arrays = [rng.integers(-9, 9, shape).astype(dtype).T for shape in shapes for dtype in DTYPES]
    copies = [memory.copy(array) for array in arrays]
    for array, copy in zip(arrays, copies, strict=True):
        assert copy.dtype == array.dtype and copy.flags.c_contiguous
        np.testing.assert_array_equal(copy.astype(np.float32), array.astype(np.float32))
        assert array.size == 0 or jax.device_put(copy).unsafe_buffer_pointer() == copy.ctypes.data


def test_a_kernel_without_huge_pages_has_others(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    np.testing.assert_array_equal(HugePages().copy(np.arange(9)), np.arange(9))


def test_a_piece_goes_with_the_last_array_in_it(monkeypatch):
    monkeypatch.setattr(huge_pages, "_PIECE_BYTES", 4096)
    memory = HugePages()
    first, second, large, third = (memory.copy(np.ones(size, np.int8)) for size in (1000, 1000, 5000, 1000))
    assert first.base is second.base is third.base is not large.base
    pieces = [weakref.ref(first.base), weakref.ref(large.base)]
    del first, large, memory
    assert pieces[0]() is not None and pieces[1]() is None
    del second, third
    assert pieces[0]() is None


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages on request")
def test_loaded_weights_may_have_huge_pages():
    state = load(random_tensors(CONFIG))
    spans, start = [], (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:":
            spans += [start] if "hg" in rest else []
        elif "-" in first:
            start = tuple(int(end, 16) for end in first.split("-"))
    for weight in jax.tree.leaves(state):
        assert any(first <= weight.unsafe_buffer_pointer() < last for first, last in spans)

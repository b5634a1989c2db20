"""A stand-in for XLA that calls handlers of machine code, and arrays that no handler can leave unnoticed."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxengine.pallas_kernels.native import library

_CODES = {"float32": 11, "bfloat16": 16, "int8": 2, "uint8": 6}  # of XLA_FFI_DataType
_CONTEXT, _ERROR = 77, 88  # stand for pointers that handlers only pass on
_POINTER = ctypes.c_void_p
_FUNCTION, _TASK = ctypes.CFUNCTYPE(_POINTER, _POINTER), ctypes.CFUNCTYPE(None, _POINTER)


class StandIn:
    """XLA's side of the FFI: a table of functions, and a pool of `threads` threads.

    schedule: what becomes of a task. "now": it runs at once, on the thread that schedules it. "late": it waits for
    `finish`, when the handler has long returned. "thread": it runs on another thread. "error": it is refused.
    """

    def __init__(self, threads: int, schedule: str, *, counts: bool = True):
        """counts: whether the pool says how many threads it has; otherwise that is an error."""
        self._late: list[Any] = []
        self._threads: list[threading.Thread] = []
        self.errors = self.destroyed = 0
        abi = library.ffi_abi(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h")

        def number(arguments: int) -> int | None:
            fields = _fields(arguments)
            assert fields[2] == _CONTEXT
            if not counts:
                return self._error()
            _fields(fields[3])[0] = threads
            return None

        def take(arguments: int) -> int | None:
            fields = _fields(arguments)
            assert fields[2] == _CONTEXT
            task, job = _TASK(fields[3]), fields[4]
            if schedule == "error":
                return self._error()
            if schedule == "now":
                task(job)
            elif schedule == "late":
                self._late.append((task, job))
            else:
                self._threads.append(threading.Thread(target=task, args=(job,)))
                self._threads[-1].start()
            return None

        def destroy(arguments: int) -> None:
            assert _fields(arguments)[2] == _ERROR
            self.destroyed += 1

        functions = {"ThreadPool_Schedule": take, "ThreadPool_NumThreads": number, "Error_Destroy": destroy}
        self._functions = {f"XLA_FFI_{name}": _FUNCTION(function) for name, function in functions.items()}
        self._api = (ctypes.c_int64 * 200)()
        for name, function in self._functions.items():
            self._api[abi[name] // 8] = ctypes.cast(function, _POINTER).value

    def _error(self) -> int:
        self.errors += 1
        return _ERROR

    def call(self, address: int, arguments: Sequence[np.ndarray], result: np.ndarray, extension: int = 0) -> None:
        """Call a handler. extension: kind of an extension of the call's frame, 0 for none."""
        kept: list[Any] = []

        def array(numbers: Sequence[int | None]) -> int:
            kept.append((ctypes.c_int64 * len(numbers))(*numbers))
            return ctypes.addressof(kept[-1])

        def buffers(arrays: Sequence[np.ndarray]) -> int:
            return array(
                [array((48, 0, _CODES[str(own.dtype)], own.ctypes.data, 2, array(own.shape))) for own in arrays]
            )

        more = array((32, extension, 0, 0)) if extension else 0
        frame = (25 * 8, more, ctypes.addressof(self._api), _CONTEXT, 3)
        frame += (40, 0, len(arguments), 0, buffers(arguments)) + (40, 0, 1, 0, buffers([result]))
        assert _FUNCTION(address)(array(frame + (0,) * 10)) is None

    def finish(self) -> None:
        """Run the tasks that are left, and wait for the threads."""
        for task, job in self._late:
            task(job)
        for thread in self._threads:
            thread.join()
        assert self.destroyed == self.errors


class Fenced:
    """Arrays before and after which a page of memory cannot be read or written: a process that does is killed."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.mprotect.argtypes = [_POINTER, ctypes.c_size_t, ctypes.c_int]
        self._held: list[mmap.mmap] = []

    def copy(self, array: np.ndarray, *, at_end: bool) -> np.ndarray:
        """Return a copy that ends where a page does, however it is aligned then, or begins where one does."""
        body = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, body + 2 * mmap.PAGESIZE)
        self._held.append(memory)
        whole = np.frombuffer(memory, np.uint8)
        for fence in (0, body + mmap.PAGESIZE):
            assert self._libc.mprotect(whole.ctypes.data + fence, mmap.PAGESIZE, 0) == 0
        first = mmap.PAGESIZE + (body - array.nbytes if at_end else 0)
        copy = whole[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy


def _fields(address: int) -> Any:
    """The eight-byte fields of a structure."""
    return ctypes.cast(_POINTER(address), ctypes.POINTER(ctypes.c_int64))

"""Memory of an API process: a limit on it, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

# Parameter of mallopt, from glibc's malloc.h.
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Make the C library (glibc's `mallopt`) allocate every block of a MiB or more as its own memory mapping. Such a
    block grows without being copied, and its memory returns to the system when it is freed. Does nothing if the C
    library has no `mallopt`.

    Otherwise glibc raises this threshold up to 32 MiB once a larger block is freed, and then keeps request bodies in
    its heap.
    """
    if choose := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc only
        choose(_M_MMAP_THRESHOLD, 1 << 20)


def limit_memory(limit: int) -> None:
    """Limit this process's data (RLIMIT_DATA) to its present size plus `limit` bytes, or to the system's hard limit if
    that is lower. Does nothing if limit is 0, or on systems other than Linux, which do not report a process's size.
    """
    status = Path("/proc/self/status")
    if limit and sys.platform == "linux":
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmData:")]
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(line.split()[1]) * 1024 + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

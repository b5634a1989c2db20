"""Memory of an API process: a limit on it, and the return of freed memory to the system."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

# Parameter of mallopt, from glibc's malloc.h.
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Make the C library map blocks of a MiB and more one by one: they grow without being copied, and freed ones return
    to the system.

    Otherwise glibc raises that bound to 32 MiB once such a block is freed, and then keeps request bodies in its heap.
    """
    if choose := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc only
        choose(_M_MMAP_THRESHOLD, 1 << 20)


def limit_memory(limit: int) -> None:
    """Limit this process's data (RLIMIT_DATA) to `limit` bytes more than it has now; 0: no limit. A limit of the system
    that is lower stays.

    An excessive request is then answered with an error of its own, or ends this process, which is restarted, rather
    than the machine. Does nothing on systems other than Linux, which do not report a process's size.
    """
    status = Path("/proc/self/status")
    if limit and sys.platform == "linux":
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmData:")]
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(line.split()[1]) * 1024 + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

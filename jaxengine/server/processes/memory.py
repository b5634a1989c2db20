"""How much memory a process that speaks with clients may take, and that it gives back what it has freed."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

# Of mallopt, in glibc's malloc.h.
_M_MMAP_THRESHOLD = -3


def return_large_blocks() -> None:
    """Has blocks of a MiB and more mapped one by one: they grow without being copied, and go back when they are freed.

    glibc raises that bound to 32 MiB as soon as such a block is freed, and from then on keeps bodies in its heap.
    """
    if choose := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        choose(_M_MMAP_THRESHOLD, 1 << 20)


def limit_memory(limit: int) -> None:
    """Has the system refuse this process more than `limit` bytes beyond those it has; 0: no limit.

    A request that asks for too much is then answered with an error of its own, or ends this process, which is started
    again, and not the machine. Nothing where the system does not tell what a process has (others than Linux).
    """
    status = Path("/proc/self/status")
    if limit and sys.platform == "linux":
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmData:")]
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = int(line.split()[1]) * 1024 + limit
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))

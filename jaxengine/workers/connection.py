"""A worker process's own end: its limits, and the connection to the process that started it, with which it ends."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxengine.workers.frames import Frames, frame


class Connection:
    """What standard input of a process that `WorkerProcess` started is. Any thread may send."""

    def __init__(self, orders: Any, memory_bytes: int):
        """orders: the type of what it is told; memory_bytes: that it may map, beyond which it gets MemoryErrors."""
        # RLIMIT_FSIZE: it has nothing to write to a file.
        limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
        for limit, value in limits.items():
            with contextlib.suppress(ValueError, OSError):  # macOS does not limit memory
                resource.setrlimit(limit, (value, value))
        self._socket = socket.socket(fileno=sys.stdin.fileno())
        self._frames, self._sending = Frames(orders), threading.Lock()

    def receive(self) -> Iterator[Any]:
        """What it is told, one after the other; the process ends when nothing can come any more."""
        while data := self._socket.recv(1 << 20):
            yield from self._frames.feed(data)
        os._exit(0)

    def send(self, message: msgspec.Struct) -> None:
        """Says something."""
        with self._sending:
            self._socket.sendall(frame(message))

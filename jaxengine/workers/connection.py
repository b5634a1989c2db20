"""Worker's end of its connection to the parent. It limits the process, ignores signals, and exits when the parent is
gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from jaxengine.workers.frames import Frames, frame


class Connection:
    """Connection to the parent over the standard input of a process that `WorkerProcess` started. Any thread may send;
    one thread receives.
    """

    def __init__(self, orders: Any, memory_bytes: int):
        """Take over the process's standard input as the socket, limit the process's memory, forbid files and core
        dumps, and ignore SIGINT and SIGTERM from now on.

        orders: type of the messages to receive. memory_bytes: limit of mapped memory, beyond which allocations raise
        MemoryError; not enforced on systems without such limits.
        """
        # A service manager sends these to each process of the service; only the end of the connection ends a worker.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # A worker writes no files and no core dumps.
        limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
        for limit, value in limits.items():
            with contextlib.suppress(ValueError, OSError):  # macOS does not limit memory
                resource.setrlimit(limit, (value, value))
        self._socket = socket.socket(fileno=sys.stdin.fileno())
        self._frames, self._sending = Frames(orders), threading.Lock()

    def receive(self) -> Iterator[Any]:
        """Yield messages from the parent in order, waiting for each. Exits the process with status 0 when the
        connection closes. Raises msgspec.MsgspecError for invalid bytes.
        """
        while data := self._socket.recv(1 << 20):
            yield from self._frames.feed(data)
        os._exit(0)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the parent. Returns when the socket has accepted all of it. Raises OSError if the parent is
        gone.
        """
        with self._sending:
            self._socket.sendall(frame(message))

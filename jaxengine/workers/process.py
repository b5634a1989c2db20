"""Parent's end of a worker process, which may be killed at any time."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxengine.paths import HOME
from jaxengine.workers.frames import Frames, frame

# The worker imports the same sources as this process, whatever else is installed, and nothing from its folder (-P).
_START = "import sys; {home!r} in sys.path or sys.path.insert(0, {home!r}); from {module} import main; main()"


class WorkerProcess:
    """Worker process and the socket to it. Only `wait` blocks. The process is killed when this object is
    garbage-collected. Must be used by one thread at a time.

    Attributes:
      process: the subprocess.
      error: the reason, if known, why `receive` reported that the process has ended.
    """

    def __init__(self, module: str, answers: Any):
        """Start the process without waiting for it.

        module: full name of the module whose `main` the worker runs (see workers.connection). answers: type of the
        messages that the worker sends.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _START.format(home=str(HOME), module=module)]
            # In a separate process group, because a terminal's Ctrl-C is for the parent, which ends its workers.
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, process_group=0)
        ours.setblocking(False)
        self.error: Exception | None = None
        self._connection, self._frames, self._outgoing = ours, Frames(answers), bytearray()
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, self.process, ours, self._pid)

    def fileno(self) -> int:
        """Return the descriptor of the socket, which is readable when the worker has sent something or has ended."""
        return self._connection.fileno()

    @property
    def is_ours(self) -> bool:
        """Whether this process started the worker; False in a fork of it, which shares the socket and
        must not use it.
        """
        return os.getpid() == self._pid

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message and send as many queued bytes as the socket accepts now, without waiting. `receive` sends the
        rest.
        """
        self._outgoing += frame(message)
        self._flush()

    def wait(self, seconds: float) -> None:
        """Wait until a message can be received, the worker has ended, or more of the queued bytes can be sent, at most
        `seconds`. Receives and sends nothing itself: call `receive` afterwards, which does both.
        """
        wait_for_any([self], seconds)

    @property
    def has_more_to_send(self) -> bool:
        """Whether queued bytes have not been sent yet."""
        return bool(self._outgoing)

    def receive(self) -> tuple[list[Any], bool]:
        """Return (messages received since the last call, in order; whether the worker is alive), without waiting.

        Also sends queued bytes. A worker that has sent invalid bytes counts as ended. `error` is then set, if the
        reason is known.
        """
        messages: list[Any] = []
        try:
            while data := self._connection.recv(1 << 20):
                messages += self._frames.feed(data)
        except BlockingIOError:
            self._flush()
            return messages, True
        except (ConnectionResetError, msgspec.MsgspecError) as error:
            self.error = error
        return messages, False

    def kill(self) -> None:
        """Kill the worker, whatever it is doing, and close the connection."""
        self._end()

    def _flush(self) -> None:
        """Send as many queued bytes as the socket accepts now. Ignores a closed connection, which `receive` reports."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # `receive` reports its end
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]


def wait_for_any(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Wait until one of the workers has sent a message, has ended, or can take more of its queued bytes, at most
    `seconds`. Receives and sends nothing itself: call each worker's `receive` afterwards.
    """
    # Not select(), which does not support descriptors above 1023: a server has one for each connection.
    poll = select.poll()
    for each in processes:
        poll.register(each, select.POLLIN | (select.POLLOUT if each.has_more_to_send else 0))
    poll.poll(max(seconds, 0) * 1000)


def _end(process: subprocess.Popen[bytes], connection: socket.socket, pid: int) -> None:
    """Close the connection and kill the worker, unless this process is a fork of process `pid`, the worker's parent, in
    which case only close the connection. A daemon thread waits for the worker's end.
    """
    connection.close()
    if os.getpid() != pid:
        return
    process.kill()
    # Freeing gigabytes takes the system a while; a thread waits for it.
    reaper = threading.Thread(target=process.wait, name="reaper", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        reaper.start()

"""A process that may be killed at any time, as the one that started it sees it. Knows nothing of what it works on."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxengine._siblings import HOME
from jaxengine.workers.frames import Frames, frame

# The same sources as here, whatever else is installed, and no folder of the caller's to import from (-P).
_START = "import sys; {home!r} in sys.path or sys.path.insert(0, {home!r}); from {module} import main; main()"


class WorkerProcess:
    """A process at work, and the socket to it; nothing here waits unless told to. Ends when it is let go of.

    To be used by one thread at a time.

    Attributes:
      process: the process itself.
      error: why `receive` said that it has ended, where that is known.
    """

    def __init__(self, module: str, answers: Any):
        """module: its `main` is run there, see workers.connection; answers: the type of what it says."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _START.format(home=str(HOME), module=module)]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)
        ours.setblocking(False)
        self.error: Exception | None = None
        self._connection, self._frames, self._outgoing = ours, Frames(answers), bytearray()
        self._end = weakref.finalize(self, _end, self.process, ours)

    def fileno(self) -> int:
        """What becomes readable when it has said something."""
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Says something, now or in the next `wait` or `receive`."""
        self._outgoing += frame(message)
        self._flush()

    def wait(self, seconds: float) -> None:
        """Waits until something can be received or more can be sent; at most `seconds`."""
        wait_for_any([self], seconds)

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def receive(self) -> tuple[list[Any], bool]:
        """What it has said since the last call, and whether it is there still."""
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
        """Ends it, whatever it is at."""
        self._end()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # its end shows in `receive`
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]


def wait_for_any(processes: Sequence[WorkerProcess], seconds: float) -> None:
    """Waits until something can be received from one of them, or more can be sent to one; at most `seconds`."""
    select.select(processes, [each for each in processes if each.has_more_to_send], [], max(seconds, 0))


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    # Giving back gigabytes takes the system a while, for which nobody should wait.
    reaper = threading.Thread(target=process.wait, name="reaper", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is ending, and with it who would be told
        reaper.start()

"""The command as a process of its own: how it ends when Ctrl-C comes while XLA is at work.

Python acts on a signal between two of its instructions, and a compilation is one that may take minutes; an interpreter
that is torn down after an interrupted compilation may crash in what XLA leaves behind. So a watcher ends the process
where the main thread does not hear the signal, and an interrupted command ends without a teardown: there is nothing to
be saved. Knows nothing of what the commands do.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from jaxengine.commands.cli import main as run_command

# The status of a process that Ctrl-C ended, as shells have it.
INTERRUPTED = 130
# How long the main thread may take to act on Ctrl-C before it counts as out of reach.
_GRACE_SECONDS = 1.0


def main() -> NoReturn:
    """Runs the command of sys.argv and ends the process with its status."""
    _watch_interrupts()
    status = run_command()
    if status == INTERRUPTED:
        _leave(status)
    sys.exit(status)


def _watch_interrupts() -> None:
    """Has Ctrl-C end the process, should the main thread not get to act on it.

    The signal itself writes to the pipe, whatever the main thread is at. A command that handles Ctrl-C in its own way,
    as a server does, is left to it.
    """
    heard_at = -math.inf
    wake, woken = os.pipe()
    os.set_blocking(woken, False)

    def interrupt(_number: int, _frame: Any) -> None:
        nonlocal heard_at
        heard_at = time.monotonic()
        raise KeyboardInterrupt

    def watch() -> None:
        while number := os.read(wake, 1):
            came_at = time.monotonic()
            time.sleep(_GRACE_SECONDS)
            # Of several that come together, Python acts on one.
            unheard = heard_at < came_at - _GRACE_SECONDS
            if number[0] == signal.SIGINT and unheard and signal.getsignal(signal.SIGINT) is interrupt:
                _leave(INTERRUPTED)

    def lost(error: sys.UnraisableHookArgs) -> None:
        """An interrupt that came in a callback, out of which nothing can be raised."""
        if error.exc_type is KeyboardInterrupt:
            _leave(INTERRUPTED)
        sys.__unraisablehook__(error)

    # One who started this process without Ctrl-C, as a shell starts what runs in the background, wants it so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        sys.unraisablehook = lost
        threading.Thread(target=watch, name="interrupts", daemon=True).start()


def _leave(status: int) -> NoReturn:
    """Ends the process at once, but for what was printed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone
            stream.flush()
    os._exit(status)

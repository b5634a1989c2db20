"""Process entry of the command line, which decides how the process ends when Ctrl-C arrives while XLA is busy.

Python handles a signal between two of its instructions, and a compilation, which is one instruction, may take minutes.
An interpreter that is torn down after an interrupted compilation may crash in XLA. So a watcher thread ends the process
if the main thread does not react to the signal, and an interrupted command ends without a teardown.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

# Exit status after Ctrl-C, by the convention of shells.
INTERRUPTED = 130
# Time for the main thread to act on Ctrl-C before the watcher ends the process.
_GRACE_SECONDS = 1.0


def main() -> NoReturn:
    """Run the command of sys.argv and raise SystemExit with its status. After Ctrl-C (status 130) end the process
    without a teardown of the interpreter.
    """
    _watch_interrupts()
    try:
        status = run_command()
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == INTERRUPTED:
        _leave(status)
    sys.exit(status)


def run_command() -> int:
    """Run the command of sys.argv and return its status. Raises KeyboardInterrupt for Ctrl-C during the imports, which
    take a second or more.

    Garbage is not collected during these imports, and what they have made is left out of later collections.
    """
    gc.disable()
    try:
        from jaxengine.commands.cli import main as run
    finally:
        gc.freeze()
        gc.enable()
    return run()


def _watch_interrupts() -> None:
    """Start a thread that ends the process on Ctrl-C if the main thread does not react within _GRACE_SECONDS.

    Sets the handler of SIGINT, which raises KeyboardInterrupt, the wakeup file descriptor, a pipe that Python writes to
    at each signal whatever the main thread does, and sys.unraisablehook. Does nothing if SIGINT is ignored or has
    another handler than Python's default. If a command later installs its own handler, as a server does, the thread no
    longer ends the process.
    """
    heard_at = -math.inf
    wake, woken = os.pipe()
    os.set_blocking(woken, False)

    def interrupt(_number: int, _frame: Any) -> None:
        """Record the time in `heard_at` and raise KeyboardInterrupt in the main thread."""
        nonlocal heard_at
        heard_at = time.monotonic()
        raise KeyboardInterrupt

    def watch() -> None:
        """End the process _GRACE_SECONDS after a SIGINT that the main thread has not handled by then."""
        while number := os.read(wake, 1):
            came_at = time.monotonic()
            time.sleep(_GRACE_SECONDS)
            # Python handles several simultaneous signals once.
            unheard = heard_at < came_at - _GRACE_SECONDS
            if number[0] == signal.SIGINT and unheard and signal.getsignal(signal.SIGINT) is interrupt:
                _leave(INTERRUPTED)

    def lost(error: sys.UnraisableHookArgs) -> None:
        """End the process for an interrupt that arrived in a callback, from which no exception can propagate; report
        other errors as Python does.
        """
        if error.exc_type is KeyboardInterrupt:
            _leave(INTERRUPTED)
        sys.__unraisablehook__(error)

    # Shells start background jobs with SIGINT ignored; it stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        sys.unraisablehook = lost
        threading.Thread(target=watch, name="interrupts", daemon=True).start()


def _leave(status: int) -> NoReturn:
    """Flush output and logs, and end the process at once with an exit status."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader of the stream is gone
            stream.flush()
    os._exit(status)

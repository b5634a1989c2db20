"""SIGTERM and SIGINT while the main thread is in a call that may never return, such as a kernel that hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_GRACE_SECONDS = 1.0
_STATUS = 128 + signal.SIGTERM  # as shells have it
_NUMBERS = signal.SIGTERM, signal.SIGINT


@contextlib.contextmanager
def ends_heard(on_end: Callable[[], None]) -> Iterator[None]:
    """Context in which `on_end` is called, on a separate thread, when the process receives SIGTERM or SIGINT.

    If SIGTERM has its default action, it raises SystemExit in the main thread during the context; if the main thread
    has not left the context within a second, the process ends with the same status. A handler that the program has
    installed stays, as does its wakeup descriptor, which still receives the signals. Outside of the main thread, which
    alone can set handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    left = threading.Event()
    if is_default:
        signal.signal(signal.SIGTERM, _raise)
    earlier = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)

    def watch() -> None:
        """Forward signal numbers from the pipe to the earlier wakeup descriptor, call `on_end` for SIGTERM and SIGINT,
        and end the process if the main thread does not react to SIGTERM, until the pipe is closed.
        """
        while number := os.read(wake, 1):
            if earlier >= 0:
                with contextlib.suppress(OSError):
                    os.write(earlier, number)
            if number[0] in _NUMBERS:
                on_end()
            if number[0] == signal.SIGTERM and is_default and not left.wait(_GRACE_SECONDS):
                logging.shutdown()
                os._exit(_STATUS)

    watcher = threading.Thread(target=watch, name="ends", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
        if is_default:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(woken)
        watcher.join()
        os.close(wake)


def _raise(_number: int, _frame: Any) -> NoReturn:
    """Signal handler that raises SystemExit with the status of a process that SIGTERM ended, 143."""
    raise SystemExit(_STATUS)

"""A process that the supervisor started: its job, its orders, and its end when the supervisor is gone.

The job is the first line of standard input, orders are the further ones, and the end of input is the end of the
supervisor. What the process has to say goes through a pipe of its own. All of it is JSON, a line each.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from jaxengine.logs import log_to_stderr

_PR_SET_PDEATHSIG = 1
# The supervisor hears from a process's loop at least this often, and so many times within its hang timeout.
_ALIVE_SECONDS, _ALIVE_TIMES = 1.0, 4


def alive_seconds(hang_timeout: float) -> float:
    """How often a loop says that it has its turns; hang_timeout in seconds, 0: nobody counts them."""
    return min(_ALIVE_SECONDS, (hang_timeout or math.inf) / _ALIVE_TIMES)


class Child:
    """This process as the supervisor's; made first, so that it ends with the supervisor while it still imports.

    Attributes:
      job: what it was started with.
    """

    def __init__(self):
        orders = os.dup(0)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._orders = os.fdopen(orders, "rb")
        line = self._orders.readline()
        if not line:
            sys.exit(1)
        self.job: dict[str, Any] = json.loads(line)
        os.set_inheritable(self.job["status_fd"], False)
        os.set_blocking(self.job["status_fd"], False)
        # Only the supervisor's orders end this process; what it starts itself has the default again.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _ignore)
        log_to_stderr(self.job["name"])
        self._lock = threading.Lock()
        self._early: list[dict[str, Any]] = []
        self._handle = self._early.append
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def end_with_parent(self) -> None:
        """Has the kernel kill this process with the supervisor, where it can, however busy it is."""
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def follow(self, handle: Callable[[dict[str, Any]], None]) -> None:
        """Has `handle` called with each order, on a thread; those that came before, at once."""
        with self._lock:
            self._handle = handle
            for order in self._early:
                handle(order)

    def stopping(self) -> asyncio.Event:
        """An event of the running loop that is set when the supervisor has this process stop, its only other order
        here being "explain"."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def ordered(order: dict[str, Any]) -> None:
            if order["order"] == "explain":
                faulthandler.dump_traceback(all_threads=True)
            else:
                loop.call_soon_threadsafe(stop.set)

        self.follow(ordered)
        return stop

    def tell(self, event: str, **fields: Any) -> None:
        """Tells the supervisor. One that is stopped, and has much left to read already, does not hear of it."""
        with contextlib.suppress(BlockingIOError):
            try:
                os.write(self.job["status_fd"], json.dumps({"event": event, **fields}).encode() + b"\n")
            except BrokenPipeError:
                self._orphaned()

    def leave(self, status: int) -> NoReturn:
        """Ends the process at once."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _read(self) -> None:
        for line in self._orders:
            with self._lock:
                self._handle(json.loads(line))
        self._orphaned()

    def _orphaned(self) -> NoReturn:
        shutil.rmtree(self.job["run_dir"], ignore_errors=True)
        os._exit(1)


def _ignore(number: int, frame: Any) -> None:
    """The handler of signals that are the supervisor's to act on."""

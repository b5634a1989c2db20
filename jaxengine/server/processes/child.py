"""Child process of the supervisor: its job, its orders, and its end after the supervisor's end.

The job is the first line of standard input, and each further line is an order; the end of input means that the
supervisor has ended. Events of the process go through a separate pipe. All of them are lines of JSON.
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

from jaxengine.logs import log_as_json, log_to_stderr

_PR_SET_PDEATHSIG = 1
# A process's loop reports to the supervisor at least this often, and at least this many times within its hang timeout.
_ALIVE_SECONDS, _ALIVE_TIMES = 1.0, 4


def alive_seconds(hang_timeout: float) -> float:
    """Return the interval of a loop's "alive" events in seconds: a quarter of `hang_timeout`, at most 1. hang_timeout:
    in seconds; 0 if nobody checks, which gives 1.
    """
    return min(_ALIVE_SECONDS, (hang_timeout or math.inf) / _ALIVE_TIMES)


class Child:
    """This process, as a child of the supervisor. Create it first, so that the process ends with the supervisor even
    during imports.

    Attributes:
      job: arguments of the process.
    """

    def __init__(self):
        """Read the job from standard input, which is /dev/null from then on, or exit with status 1 if there is none.
        Ignore SIGINT and SIGTERM, log to stderr, as JSON if the job's log_format says so, and start the thread that
        reads orders.
        """
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
        # Only the supervisor's orders end this process; its own children have the default handlers again.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        log_to_stderr(self.job["name"])
        if self.job["server"]["log_format"] == "json":
            log_as_json(self.job["name"])
        self._lock = threading.Lock()
        self._early: list[dict[str, Any]] = []
        self._handle = self._early.append
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def end_with_parent(self) -> None:
        """Make the kernel kill this process when the supervisor ends, however busy the process is. Does nothing except
        on Linux.
        """
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def follow(self, handle: Callable[[dict[str, Any]], None]) -> None:
        """Call `handle` with each order, a JSON object, from now on, replacing an earlier handle. Orders that came
        before the first call of this method are passed to it before this method returns.

        Calls come from the thread that reads orders, except for those early ones, and do not overlap.
        """
        with self._lock:
            self._handle = handle
            early, self._early = self._early, []
            for order in early:
                handle(order)

    def stopping(self) -> asyncio.Event:
        """Return an event of the running loop that is set on the supervisor's order to stop or drain.

        On the only other order, "explain", the stacks of all threads are written to stderr. Replaces the handle that
        `follow` was given.
        """
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def ordered(order: dict[str, Any]) -> None:
            """Write the stacks of all threads for "explain", else set the event; called on the thread that reads
            orders.
            """
            if order["order"] == "explain":
                faulthandler.dump_traceback(all_threads=True)
            else:
                loop.call_soon_threadsafe(stop.set)

        self.follow(ordered)
        return stop

    def tell(self, event: str, **fields: Any) -> None:
        """Send an event to the supervisor without waiting; it is dropped if the pipe is full.

        fields: further values of the event, as JSON. Ends this process at once, with status 1, if the supervisor has
        ended.
        """
        with contextlib.suppress(BlockingIOError):
            try:
                os.write(self.job["status_fd"], json.dumps({"event": event, **fields}).encode() + b"\n")
            except BrokenPipeError:
                self._orphaned()

    def leave(self, status: int) -> NoReturn:
        """Flush logs and output, and end the process at once with this exit status, without Python's cleanup."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _read(self) -> None:
        """Pass the supervisor's orders to the handle until the supervisor has ended; then remove the run folder and end
        this process.
        """
        for line in self._orders:
            with self._lock:
                self._handle(json.loads(line))
        self._orphaned()

    def _orphaned(self) -> NoReturn:
        """Remove the run folder and end this process at once, with status 1."""
        shutil.rmtree(self.job["run_dir"], ignore_errors=True)
        os._exit(1)

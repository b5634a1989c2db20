"""A lock that threads which share one engine acquire in order of arrival.

threading.Lock may be reacquired by the thread that just released it. A thread that runs steps in a loop would then keep
out a thread whose answer is ready, or that wants to add a request.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any


class FairLock:
    """Lock that serves waiters in order; a context manager, not reentrant.

    In the main thread the first Ctrl-C, while locked or waiting for the lock, is deferred until the lock is released; a
    second one interrupts at once.
    """

    def __init__(self, check: Callable[[], None] = lambda: None):
        """Make an unlocked lock. check: called before the lock is taken or waited for; its errors propagate."""
        self._check = check
        self._guard = threading.Lock()
        self._is_taken = False
        # One lock per waiting thread, in order of arrival, released when it is that thread's turn.
        self._queue: deque[threading.Lock] = deque()
        self._ctrl_c: _CtrlC | None = None

    def __enter__(self) -> None:
        """Call `check`, then wait for the lock in order of arrival. Ctrl-C is deferred until `__exit__`.

        Raises the errors of `check`, and KeyboardInterrupt at a second Ctrl-C.
        """
        self._check()
        ctrl_c = _CtrlC.held()
        try:
            self._take()
        except BaseException:  # a second Ctrl-C
            if ctrl_c is not None:
                ctrl_c.let_go()
            raise
        self._ctrl_c = ctrl_c

    def __exit__(self, *_: object) -> None:
        """Pass the lock on to the first waiting thread, then raise a deferred Ctrl-C."""
        ctrl_c, self._ctrl_c = self._ctrl_c, None
        with self._guard:
            self._pass_on()
        if ctrl_c is not None:
            ctrl_c.let_go()

    def _take(self) -> None:
        """Acquire the lock after all threads that already wait. On an interruption, leave the queue and raise it."""
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        try:
            mine.acquire()
        except BaseException:  # Ctrl-C while waiting
            self._leave(mine)
            raise

    def _leave(self, mine: threading.Lock) -> None:
        """Remove this thread from the queue, or pass the lock on if it was passed to this thread meanwhile.

        mine: the queue entry that this thread waits for.
        """
        with self._guard:
            if mine in self._queue:
                self._queue.remove(mine)
            else:
                self._pass_on()

    def _pass_on(self) -> None:
        """Give the lock to the first waiting thread, or mark it free. The caller holds `_guard`."""
        if self._queue:
            self._queue.popleft().release()
        else:
            self._is_taken = False


class _CtrlC:
    """Deferral of Ctrl-C: the first SIGINT is remembered, further ones are passed to the earlier handler."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self._handler, self._waits = handler, False

    @classmethod
    def held(cls) -> _CtrlC | None:
        """Start to defer SIGINT; return the object whose `let_go` ends that.

        Returns None if it cannot be deferred: outside the main thread, or without a Python handler.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return None
        ctrl_c = cls(handler)
        signal.signal(signal.SIGINT, ctrl_c._hear)
        return ctrl_c

    def let_go(self) -> None:
        """Restore the earlier handler, and raise SIGINT if one was remembered."""
        signal.signal(signal.SIGINT, self._handler)
        if self._waits:
            signal.raise_signal(signal.SIGINT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: remember the first one; call the earlier handler for further ones."""
        if self._waits:
            self._handler(number, frame)
        self._waits = True

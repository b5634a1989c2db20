"""FairLock: the lock of an engine that several threads share, acquired in order of arrival.

A thread that has just released a threading.Lock may acquire it again at once. A thread that runs steps in a loop would
then keep out another one whose answer is ready, or that wants to add a request.
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

    While the main thread holds the lock or waits for it, the first Ctrl-C is deferred until it releases the lock; a
    second one interrupts it at once.
    """

    def __init__(self, check: Callable[[], None] = lambda: None, interrupted: Callable[[], None] = lambda: None):
        """Make an unlocked lock. check: called before each attempt to take the lock; its errors propagate. interrupted:
        called when a thread that holds the lock is interrupted, by KeyboardInterrupt or another exception that is no
        Exception, before the lock is released.
        """
        self._check, self._interrupted = check, interrupted
        self._guard = threading.Lock()
        self._is_taken = False
        # One locked Lock for each waiting thread, in order of arrival. It is released when it is that thread's turn.
        self._queue: deque[threading.Lock] = deque()
        self._ctrl_c: _CtrlC | None = None

    def __enter__(self) -> None:
        """Call `check`, then wait for the lock in order of arrival. Ctrl-C is deferred until `__exit__`.

        Raises the errors of `check`, and KeyboardInterrupt at a second Ctrl-C.
        """
        self._check()
        ctrl_c = _CtrlC.defer()
        try:
            self._take()
        except BaseException:  # a second Ctrl-C
            if ctrl_c is not None:
                ctrl_c.deliver()
            raise
        self._ctrl_c = ctrl_c

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Pass the lock on to the first waiting thread, then raise a deferred Ctrl-C. kind: type of the exception that
        ends the `with` block, None for none.
        """
        ctrl_c, self._ctrl_c = self._ctrl_c, None
        if kind is not None and not issubclass(kind, Exception):
            self._interrupted()
        with self._guard:
            self._pass_on()
        if ctrl_c is not None:
            ctrl_c.deliver()

    def _take(self) -> None:
        """Acquire the lock after all threads that already wait. If interrupted, leave the queue and re-raise."""
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        try:
            self._wait(mine)
        except BaseException:  # a second Ctrl-C
            self._leave(mine)
            raise

    def _wait(self, mine: threading.Lock) -> None:
        """Wait until it is this thread's turn. Of this class's methods only this one can be interrupted. mine: the
        queue entry that the thread waits for.
        """
        mine.acquire()

    def _leave(self, mine: threading.Lock) -> None:
        """Remove this thread from the queue. If it has just been given the lock, pass the lock on instead.

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
        """Remember nothing yet. handler: the earlier handler of SIGINT."""
        self._handler, self._is_pending = handler, False

    @classmethod
    def defer(cls) -> _CtrlC | None:
        """Start to defer SIGINT, and return the object whose `deliver` ends the deferral.

        Returns None if SIGINT cannot be deferred: outside the main thread, or if it has no Python handler.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return None
        ctrl_c = cls(handler)
        signal.signal(signal.SIGINT, ctrl_c._handle)
        return ctrl_c

    def deliver(self) -> None:
        """Restore the earlier handler, and raise SIGINT if one was remembered."""
        signal.signal(signal.SIGINT, self._handler)
        if self._is_pending:
            signal.raise_signal(signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Remember a SIGINT that is the first one, or that comes while the lock changes hands, which must not happen by
        half; call the earlier handler for others.
        """
        if self._is_pending and (frame is None or frame.f_code not in _CHANGES):
            self._handler(number, frame)
        self._is_pending = True


_LOCKING = FairLock.__enter__, FairLock.__exit__, FairLock._take, FairLock._leave, FairLock._pass_on
_CHANGES = frozenset(method.__code__ for method in (*_LOCKING, _CtrlC.defer, _CtrlC.deliver))

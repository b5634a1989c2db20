"""FairLock: the lock of an engine that several threads share, acquired in order of arrival.

A thread that has just released a threading.Lock may acquire it again at once, and keep others out.
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
    second one interrupts it at once. The same holds for SIGALRM, with which callers limit the time of a call.
    """

    def __init__(self, check: Callable[[], None] = lambda: None, interrupted: Callable[[], None] = lambda: None):
        """Make an unlocked lock. check: called before each attempt to take the lock; its errors propagate. interrupted:
        called when a thread that holds the lock is interrupted, by what the handler of a second signal raises or by
        another exception that is no Exception, before the lock is released.
        """
        self._check, self._interrupted = check, interrupted
        self._guard = threading.Lock()
        self._is_taken = False
        # One locked Lock for each waiting thread, in order of arrival. It is released when it is that thread's turn.
        self._queue: deque[threading.Lock] = deque()
        self._deferred: tuple[_Deferred, ...] = ()

    def __enter__(self) -> None:
        """Call `check`, then wait for the lock in order of arrival. Ctrl-C and SIGALRM are deferred until `__exit__`.

        Raises the errors of `check`, and KeyboardInterrupt at a second Ctrl-C, or what the handler of a second SIGALRM
        raises.
        """
        self._check()
        deferred = _defer()
        try:
            self._take()
        except BaseException:  # a second signal
            _deliver(deferred)
            raise
        self._deferred = deferred

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Pass the lock on to the first waiting thread, then raise a deferred signal. Calls `interrupted` first if a
        handler has raised, or if the block ends with an exception, of type `kind`, that is no Exception.
        """
        deferred, self._deferred = self._deferred, ()
        try:
            # A handler of SIGALRM usually raises TimeoutError, which is an Exception and may be caught in the block.
            if any(each.has_raised for each in deferred) or (kind is not None and not issubclass(kind, Exception)):
                self._interrupted()
        finally:  # even if yet another signal interrupts this
            with self._guard:
                self._pass_on()
            _deliver(deferred)

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
        except BaseException:  # a second signal
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


class _Deferred:
    """Deferral of one signal number: the first signal is remembered, further ones are passed to the earlier handler.

    Attributes:
      number: the signal.
      handler: its earlier handler.
      is_pending: whether a signal has been remembered.
      has_raised: whether the earlier handler has raised an exception.
    """

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]):
        """Remember nothing yet."""
        self.number, self.handler, self.is_pending, self.has_raised = number, handler, False, False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal if none is remembered yet, or if it comes while the lock changes hands, as `frame` shows,
        which must not be interrupted. Otherwise call the earlier handler and raise its exceptions.
        """
        if self.is_pending and (frame is None or frame.f_code not in _CHANGES):
            try:
                self.handler(number, frame)
            except BaseException:
                self.has_raised = True
                raise
        self.is_pending = True


def _defer() -> tuple[_Deferred, ...]:
    """Start to defer SIGINT and SIGALRM until `_deliver`, those that have a Python handler. Nothing is deferred, and ()
    returned, outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    deferred = tuple(_Deferred(number, handler) for number, handler in handlers.items() if callable(handler))
    for each in deferred:
        signal.signal(each.number, each.handle)
    return deferred


def _deliver(deferred: tuple[_Deferred, ...]) -> None:
    """Restore the earlier handlers, then raise the remembered signals, if any. A handler's exception ends this, but
    leaves no signal deferred.
    """
    try:
        for each in deferred:
            signal.signal(each.number, each.handler)
    except BaseException:  # of a handler that has been restored already
        for each in deferred:
            signal.signal(each.number, each.handler)
        raise
    for each in deferred:
        if each.is_pending:
            signal.raise_signal(each.number)


_LOCKING = FairLock.__enter__, FairLock.__exit__, FairLock._take, FairLock._leave, FairLock._pass_on
_CHANGES = frozenset(function.__code__ for function in (*_LOCKING, _defer, _deliver))

"""A lock for threads that share one engine: whoever has the turn uses it, and turns are given in order of arrival.

Python's own lock may be taken again and again by the thread that lets go of it, so that a thread which steps would keep
out one whose answer is there, or that has a request to add. Knows nothing of engines.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any


class Turns:
    """A context manager; the turn is not to be taken twice by one thread.

    In the main thread the first Ctrl-C in a turn, or while it waits for one, is heard when the turn ends; a second one
    at once.
    """

    def __init__(self):
        self._guard = threading.Lock()
        self._is_taken = False
        # Of each thread that waits, in order, a lock that is held until the turn is its own.
        self._line: deque[threading.Lock] = deque()
        self._ctrl_c: _CtrlC | None = None

    def __enter__(self) -> None:
        ctrl_c = _CtrlC.held()
        try:
            self._take()
        except BaseException:  # a second Ctrl-C
            if ctrl_c is not None:
                ctrl_c.let_go()
            raise
        self._ctrl_c = ctrl_c

    def __exit__(self, *_: object) -> None:
        ctrl_c, self._ctrl_c = self._ctrl_c, None
        with self._guard:
            self._pass_on()
        if ctrl_c is not None:
            ctrl_c.let_go()

    def _take(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._line.append(mine)
        try:
            mine.acquire()
        except BaseException:  # Ctrl-C while waiting
            self._leave(mine)
            raise

    def _leave(self, mine: threading.Lock) -> None:
        with self._guard:
            if mine in self._line:
                self._line.remove(mine)
            else:
                self._pass_on()

    def _pass_on(self) -> None:
        if self._line:
            self._line.popleft().release()
        else:
            self._is_taken = False


class _CtrlC:
    """A Ctrl-C that waits."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]):
        self._handler, self._waits = handler, False

    @classmethod
    def held(cls) -> _CtrlC | None:
        """From now on; None where none is heard: in other threads, and where Python does not handle it."""
        if threading.current_thread() is not threading.main_thread():
            return None
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            return None
        ctrl_c = cls(handler)
        signal.signal(signal.SIGINT, ctrl_c._hear)
        return ctrl_c

    def let_go(self) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._waits:
            signal.raise_signal(signal.SIGINT)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            self._handler(number, frame)
        self._waits = True

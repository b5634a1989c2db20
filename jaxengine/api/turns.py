"""A lock for threads that share one engine: whoever has the turn uses it, and turns are given in order of arrival.

Python's own lock may be taken again and again by the thread that lets go of it, so that a thread which steps would keep
out one whose answer is there, or that has a request to add. Knows nothing of engines.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A context manager; the turn is not to be taken twice by one thread."""

    def __init__(self):
        self._guard = threading.Lock()
        self._is_taken = False
        # Of each thread that waits, in order, a lock that is held until the turn is its own.
        self._line: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
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

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._pass_on()

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

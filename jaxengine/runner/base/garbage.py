"""Garbage collection while programs are traced and compiled."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# New objects after which the interpreter looks for garbage.
_MANY = 100_000

_lock = threading.Lock()
_usual: tuple[int, int, int] | None = None  # thresholds outside of all starts, while there are any
_num_starts = 0


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Context manager in which Python collects garbage only after _MANY new objects, or less often if it is set so
    already or not at all; the last of concurrent contexts to end restores the thresholds.
    """
    global _usual, _num_starts
    with _lock:
        _num_starts += 1
        if _usual is None:
            _usual = gc.get_threshold()
            if 0 < _usual[0] < _MANY:  # 0: there are no collections
                gc.set_threshold(_MANY, *_usual[1:])
    try:
        yield
    finally:
        with _lock:
            _num_starts -= 1
            if not _num_starts and _usual is not None:
                gc.set_threshold(*_usual)
                _usual = None

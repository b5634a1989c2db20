"""Engines and servers that files of tests share: made once, kept while they are in use, ended soon after.

A process of tests that kept all of them to its end would need several GiB, most of it for what no later test asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

MAX_KEPT = 3
MAX_IDLE_FILES = 6

_all: list[Kept] = []


class Kept:
    """Values by key. At the end of a file the ones used least recently are ended, so that few are left.

    `end(value)` ends one. `is_alive(value)`: whether a value can be given once more.
    """

    def __init__(self, end: Callable[[Any], object], is_alive: Callable[[Any], bool] = lambda value: True):
        self._end, self._is_alive = end, is_alive
        self._values: dict[Hashable, Any] = {}  # the most recently used one is the last
        self._idle: dict[Hashable, int] = {}  # files since the last use
        _all.append(self)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of `key`; makes it where there is none."""
        if key in self._values and not self._is_alive(self._values[key]):
            self._drop(key)
        value = self._values.pop(key) if key in self._values else make()
        self._values[key], self._idle[key] = value, 0
        return value

    def end_idle(self) -> bool:
        """End what is too old or too much; return whether there was anything."""
        keys = list(self._values)
        too_many = keys[: max(0, len(keys) - MAX_KEPT)]
        ended = [key for key in keys if self._idle[key] >= MAX_IDLE_FILES or key in too_many]
        for key in ended:
            self._drop(key)
        for key in self._values:
            self._idle[key] += 1
        return bool(ended)

    def end_all(self) -> None:
        for key in list(self._values):
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        del self._idle[key]
        self._end(self._values.pop(key))


def file_ended() -> bool:
    """End what no file has asked for lately, in every Kept; return whether there was anything."""
    num_ended = sum(kept.end_idle() for kept in _all)
    return num_ended > 0

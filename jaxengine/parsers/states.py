"""A parser that is in one state after the other, each a method that reads what comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxengine.parsers.events import Collector, Event


class StateParser:
    """The half of an OutputParser that all of these share.

    Attributes:
      _state: reads on in a text from a place, and returns where the next state goes on.
    """

    _state: Callable[[str, int], int]

    def __init__(self, new_id: Iterable[str]):
        self._out = Collector(new_id)

    def feed(self, text: str) -> list[Event]:
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._out.take()

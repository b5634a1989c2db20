"""Base of parsers that are state machines, with a method per state."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxengine.parsers.scan.events import Collector, Event
from jaxengine.parsers.scan.markers import Opening


class StateParser:
    """Common part of OutputParsers that are state machines.

    Attributes:
      _state: method of the current state; reads a text from a position and returns the new position.
      _closing: reader of the closing word, for the state `_after_call`.
    """

    _state: Callable[[str, int], int]
    _closing: Opening

    def __init__(self, new_id: Iterable[str]):
        """Begin without events. new_id: yields ids, of which each call takes one as it starts."""
        self._out = Collector(new_id)

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now."""
        self._read(text)
        return self._out.take()

    def _read(self, text: str) -> None:
        """Pass `text` (new, or held earlier) to the current state's method until all of it is read."""
        at = 0
        while at < len(text):
            at = self._state(text, at)

    def _content(self, text: str, at: int) -> int:
        """State outside of calls, which a subclass defines. Raises NotImplementedError."""
        raise NotImplementedError

    def _after_call(self, text: str, at: int) -> int:
        """Process text after a call, where the closing word may follow and is dropped; other text is content. Reads
        `text` from `at`; returns the index after what it read.
        """
        at, found = self._closing.read(text, at)
        if found is not None:
            self._state = self._content
        if found is False:
            self._content(self._closing.held, 0)  # the held text may be the beginning of another call
        return at

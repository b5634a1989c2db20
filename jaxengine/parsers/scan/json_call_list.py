"""Incremental reader of a JSON list of tool calls, [{"name": ..., "arguments": {...}}, ...]."""

from __future__ import annotations

from collections.abc import Callable

from jaxengine.parsers.scan.events import Collector
from jaxengine.parsers.scan.json_call import JsonCall, Progress
from jaxengine.parsers.scan.markers import Opening


class JsonCallList:
    """Reader of one list, from its opening bracket on. call: function that returns a reader of one object and gets
    `out`.

    Brackets and commas around calls are dropped. In a list without a call they are part of `held`.
    """

    def __init__(self, out: Collector, call: Callable[[Collector], JsonCall]):
        self._out = out
        self._new_call = call
        self._before: list[str] = []
        self._opening = Opening("[")
        self._call: JsonCall | None = None
        self._state = self._open_list

    @property
    def held(self) -> str:
        """Text read so far that is not known to belong to a call."""
        return "".join(self._before) + (self._opening.held if self._call is None else self._call.held)

    def read(self, text: str, at: int) -> tuple[int, Progress]:
        """Read `text` from the position `at`; return the position where it stopped, and the progress.

        Sends calls to `out`. DONE: the list is closed. A character with which it becomes BROKEN or REJECTED is not
        read, and the position is before it. REJECTED may come after calls; the text to keep as content is `held`.
        """
        progress = Progress.MORE
        while at < len(text) and progress is Progress.MORE:
            at, progress = self._state(text, at)
        return at, progress

    def _open_list(self, text: str, at: int) -> tuple[int, Progress]:
        """Process text before the opening bracket: white space or "[", else REJECTED. Reads `text` from the index `at`;
        returns (index after the last character read, progress).
        """
        at, found = self._opening.read(text, at)
        if found:
            self._before = [self._opening.held]
            self._opening, self._state = Opening("{"), self._open_object
        return at, Progress.REJECTED if found is False else Progress.MORE

    def _open_object(self, text: str, at: int) -> tuple[int, Progress]:
        """Process text before the brace of a call: white space or "{", else REJECTED. Reads `text` from the index `at`;
        returns (index after the last character read, progress).
        """
        at, found = self._opening.read(text, at)
        if found:
            self._before.append(self._opening.held[:-1])
            self._call = self._new_call(self._out)
            self._call.read("{", 0)
            self._state = self._object
        return at, Progress.REJECTED if found is False else Progress.MORE

    def _object(self, text: str, at: int) -> tuple[int, Progress]:
        """Pass text to the reader of the current object until it ends; BROKEN and REJECTED are its results. Reads
        `text` from the index `at`; returns (index after the last character read, progress).
        """
        assert self._call is not None
        at, progress = self._call.read(text, at)
        if not self._call.held:
            self._before = []
        if progress in (Progress.DONE, Progress.CUT):
            self._state, progress = self._between, Progress.MORE
        return at, progress

    def _between(self, text: str, at: int) -> tuple[int, Progress]:
        """Process one character after a call: a comma, the closing bracket (DONE) or white space; any other is REJECTED
        and not read. The character is `text[at]`; returns (new position, progress).
        """
        char = text[at]
        if char == "]":
            return at + 1, Progress.DONE
        if char == ",":
            self._opening, self._call, self._state = Opening("{"), None, self._open_object
        elif not char.isspace():
            return at, Progress.REJECTED
        return at + 1, Progress.MORE

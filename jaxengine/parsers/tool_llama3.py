"""Tool calls of Llama 3: an answer that is {"name": ..., "parameters": {...}}, or several with ; between them.

<|python_tag|> may come before; elsewhere in a text it begins calls as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxengine.parsers.events import Collector, Event
from jaxengine.parsers.json_call import JsonCall, Progress
from jaxengine.parsers.markers import Marker, Opening

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")


class Llama3ToolParser:
    def __init__(self, new_id: Iterable[str]):
        self._out = Collector(new_id)
        self._tag = Marker(_TAG)
        # What comes before the object that is read: white space, a tag, or a semicolon behind the last call.
        self._before = ""
        self._opening = Opening("{")
        self._separator: Opening | None = None
        self._call = JsonCall(self._out, _KEYS)
        self._state = self._before_object

    def feed(self, text: str) -> list[Event]:
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._out.take()

    def finish(self) -> list[Event]:
        if self._state == self._content:
            self._out.content(self._tag.take())
        elif self._state == self._before_object:
            self._out.content(self._before + self._opening.held)
        elif self._state == self._object:
            self._reject()
        elif self._separator is not None:
            self._out.content(self._separator.held)
        return self._out.finish()

    def _before_object(self, text: str, at: int) -> int:
        at, found = self._opening.read(text, at)
        if found:
            self._call = JsonCall(self._out, _KEYS)
            self._call.read("{", 0)
            self._state = self._object
        elif found is False:
            self._out.content(self._before + self._opening.held)
            self._state = self._content
        return at

    def _object(self, text: str, at: int) -> int:
        at, progress = self._call.read(text, at)
        if progress is Progress.REJECTED:
            self._reject()
            self._state = self._content
        elif progress is Progress.BROKEN:
            self._state = self._broken
        elif progress is not Progress.MORE:
            self._separator = Opening(";")
            self._state = self._after_object
        return at

    def _broken(self, text: str, at: int) -> int:
        """The arguments are no JSON any more, and nothing marks where they would end."""
        self._out.arguments(text[at:])
        return len(text)

    def _after_object(self, text: str, at: int) -> int:
        assert self._separator is not None
        at, found = self._separator.read(text, at)
        if found:
            self._expect_object(self._separator.held)
        elif found is False:
            self._out.content(self._separator.held)
            self._state = self._content
        return at

    def _content(self, text: str, at: int) -> int:
        plain, at, found = self._tag.read(text, at)
        self._out.content(plain)
        if found:
            self._expect_object(_TAG)
        return at

    def _expect_object(self, before: str) -> None:
        self._before, self._opening = before, Opening("{")
        self._state = self._before_object

    def _reject(self) -> None:
        if self._call.held:
            self._out.content(self._before + self._opening.held[:-1] + self._call.held)

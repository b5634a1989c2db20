"""Parsers of tool calls whose form was enforced by a grammar, independent of the model's own format.

tool_choice "required": a JSON list of {"name": ..., "parameters": {...}}. A named function: only its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxengine.parsers.events import Collector, Event
from jaxengine.parsers.json_call import Progress
from jaxengine.parsers.json_call_list import JsonCallList


class RequiredToolParser:
    def __init__(self, new_id: Iterable[str]):
        self._out = Collector(new_id)
        self._calls = JsonCallList(self._out, ("parameters",))
        self._progress = Progress.MORE

    def feed(self, text: str) -> list[Event]:
        at = 0
        if self._progress is Progress.MORE:
            at, self._progress = self._calls.read(text, 0)
            if self._progress is Progress.REJECTED:
                self._out.content(self._calls.held)
        if self._progress is Progress.BROKEN:
            self._out.arguments(text[at:])
        else:
            self._out.content(text[at:])
        return self._out.take()

    def finish(self) -> list[Event]:
        if self._progress is Progress.MORE:
            self._out.content(self._calls.held)
        return self._out.finish()


class NamedToolParser:
    def __init__(self, new_id: Iterable[str], name: str):
        self._out = Collector(new_id)
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        if text and self._name is not None:  # an output that ends within reasoning has no call
            self._out.start(self._name)
            self._name = None
        self._out.arguments(text)
        return self._out.take()

    def finish(self) -> list[Event]:
        return self._out.finish()

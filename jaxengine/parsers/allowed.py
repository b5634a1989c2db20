"""Parser for requests that let the model call some of the functions that it knows."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence

from jaxengine.parsers.scan.events import ArgumentsDelta, ContentDelta, Event, OutputParser, ToolCallStart


class AllowedCalls:
    """OutputParser with the calls of `parser` of functions in `names`; a call of another function becomes content, a
    JSON object with its name and its arguments.
    """

    def __init__(self, parser: OutputParser, names: Collection[str]):
        self._parser = parser
        self._names = names
        # Index of each call by that of `parser`.
        self._indices: dict[int, int] = {}
        self._is_in_other = self._is_without_arguments = False

    def feed(self, text: str) -> list[Event]:
        """Read a piece; return the events that are certain."""
        return [*self._read(self._parser.feed(text))]

    def finish(self) -> list[Event]:
        """End the output; return the remaining events."""
        return [*self._read(self._parser.finish()), *self._end_other()]

    def _read(self, events: Sequence[Event]) -> Iterator[Event]:
        """Yield the parser's events: calls of other functions as content, {"name": NAME, "arguments": ARGUMENTS}, and
        the others numbered from 0 without gaps.
        """
        for event in events:
            match event:
                case ArgumentsDelta(index, text) if index in self._indices:
                    yield ArgumentsDelta(self._indices[index], text)
                case ArgumentsDelta(_, text):
                    self._is_without_arguments = False
                    yield ContentDelta(text)
                case ToolCallStart(index, own_id, name) if name in self._names:
                    yield from self._end_other()
                    self._indices[index] = len(self._indices)
                    yield ToolCallStart(self._indices[index], own_id, name)
                case ToolCallStart(_, _, name):
                    yield from self._end_other()
                    self._is_in_other = self._is_without_arguments = True
                    yield ContentDelta(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
                case _:
                    yield from self._end_other()
                    yield event

    def _end_other(self) -> Iterator[Event]:
        """Yield the end of the object of another function's call if one is open; its arguments are {} if none came."""
        if self._is_in_other:
            self._is_in_other = False
            yield ContentDelta("{}}" if self._is_without_arguments else "}")

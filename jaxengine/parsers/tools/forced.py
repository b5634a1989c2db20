"""Parsers of tool calls whose form was enforced by a grammar, independent of the model's own format.

tool_choice "required": a JSON list of {"name": ..., "parameters": {...}}. A named function: only its arguments.

A text tool takes one text, in a form of its own, such as a patch. When its call is forced, the output is the text as it
is; with "required", a line {"name": ...} precedes it. For everyone after the parser, it is a function with the one
parameter TEXT.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from jaxengine.parsers.scan.events import Collector, Event
from jaxengine.parsers.scan.json_call import JsonCall, Progress
from jaxengine.parsers.scan.json_call_list import JsonCallList

TEXT = "input"
_BEGIN, _END = f'{{"{TEXT}": "', '"}'


def text_arguments(text: str) -> str:
    """Return the arguments of a call of a text tool, as JSON: {"input": text}."""
    return json.dumps({TEXT: text}, ensure_ascii=False)


class RequiredToolParser:
    """Parser of an output that is a JSON list of calls, {"name": ..., "parameters": {...}} each."""

    def __init__(self, new_id: Iterable[str]):
        self._out = Collector(new_id)
        self._calls = JsonCallList(self._out, partial(JsonCall, names=("parameters",), bare=True))
        self._progress = Progress.MORE

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now. Text after a list of calls is content,
        and so is all of an output that does not begin with one; text after invalid arguments belongs to them.
        """
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
        """End the output; return the events of text that was held back. Text of an incomplete list that belongs to no
        call is content.
        """
        if self._progress is Progress.MORE:
            self._out.content(self._calls.held)
        return self._out.finish()


class NamedToolParser:
    """Parser of an output that is the arguments of the function `name`."""

    def __init__(self, new_id: Iterable[str], name: str):
        self._out = Collector(new_id)
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return its events. The first non-empty text starts the call, and all text belongs
        to its arguments.
        """
        if text and self._name is not None:  # an output that ends within reasoning has no call
            self._out.start(self._name)
            self._name = None
        self._out.arguments(text)
        return self._out.take()

    def finish(self) -> list[Event]:
        """End the output; return the events that are left. An empty output has no call."""
        return self._out.finish()


class NamedTextParser:
    """Parser of an output that is the text of the text tool `name`: one call with the arguments {"input": text}."""

    def __init__(self, new_id: Iterable[str], name: str):
        self._out = Collector(new_id)
        self._name: str | None = name

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return its events. The first non-empty text starts the call, and all text is
        appended, escaped, to its argument.
        """
        if not text:
            return []
        if self._name is not None:
            self._out.start(self._name)
            self._out.arguments(_BEGIN)
            self._name = None
        self._out.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        return self._out.take()

    def finish(self) -> list[Event]:
        """End the output; return the remaining events. If the call was started, its arguments are closed."""
        if self._name is None:
            self._out.arguments(_END)
        return self._out.finish()


class RequiredTextParser:
    """Parser of an output that is either a list of calls, as RequiredToolParser reads, or a line {"name": ...} with the
    name of a text tool, followed by its text.
    """

    def __init__(self, new_id: Iterable[str]):
        self._ids = new_id
        self._parser: RequiredToolParser | NamedTextParser | None = None
        self._head = ""

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now. The first line is held until it shows
        which of the two forms the output has.
        """
        if self._parser is not None:
            return self._parser.feed(text)
        self._head += text
        line, ended, rest = self._head.partition("\n")
        if line and not line.startswith("{"):
            self._parser, rest = RequiredToolParser(self._ids), self._head
        elif ended:
            self._parser = self._opened(line)
            rest = rest if isinstance(self._parser, NamedTextParser) else self._head
        return [] if self._parser is None else self._parser.feed(rest)

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back. If the form is still unknown, the text is read
        as a list of calls.
        """
        if self._parser is None:
            self._parser = RequiredToolParser(self._ids)
            return self._parser.feed(self._head) + self._parser.finish()
        return self._parser.finish()

    def _opened(self, line: str) -> RequiredToolParser | NamedTextParser:
        """Return the parser of the output by its first line: of a text tool if the line is JSON with a string "name",
        else of a list of calls.
        """
        try:
            name: Any = json.loads(line)["name"]
        except (ValueError, KeyError, RecursionError):
            name = None
        return NamedTextParser(self._ids, name) if isinstance(name, str) else RequiredToolParser(self._ids)

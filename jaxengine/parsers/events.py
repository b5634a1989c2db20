"""What a parser says of a model's output, and how it collects it. Knows no format and no wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The model calls a tool. index: 0 for the first call of an output."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of call `index`: JSON as the model wrote it, not checked."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Reads one output of a model, in pieces of any size; what it says does not depend on where they are cut.

    Text that turns out not to be what it looked like (half a tool call, say) is content; no text is lost.
    """

    def feed(self, text: str) -> list[Event]:
        """What is certain now, neighbours of one kind joined."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, once the output has ended."""
        ...


class Collector:
    """Gathers events; counts the calls, and leaves out white space that only stands between them."""

    def __init__(self, new_id: Iterable[str]):
        self._ids = iter(new_id)
        self._pieces: list[tuple[type, int, list[str]]] = []
        self._num_calls = 0
        # White space at the start, or behind a call, until something shows whether it belongs to content.
        self._gap: list[str] | None = []

    def content(self, text: str) -> None:
        if self._gap is not None:
            self._gap.append(text)
            if not text or text.isspace():
                return
            text, self._gap = "".join(self._gap), None
        self._add(ContentDelta, 0, text)

    def start(self, name: str, own_id: str | None = None) -> None:
        """own_id: the model's own id of the call, where its chat template has results refer to that."""
        self._pieces.append((ToolCallStart, self._num_calls, [own_id or next(self._ids), name]))
        self._num_calls += 1
        self._gap = []

    def arguments(self, text: str) -> None:
        self._add(ArgumentsDelta, self._num_calls - 1, text)

    def take(self) -> list[Event]:
        """The events since the last time."""
        pieces, self._pieces = self._pieces, []
        return [_event(kind, index, texts) for kind, index, texts in pieces]

    def finish(self) -> list[Event]:
        """The last of them. An output that is nothing but white space is content."""
        if self._gap and not self._num_calls:
            self._add(ContentDelta, 0, "".join(self._gap))
        return self.take()

    def _add(self, kind: type, index: int, text: str) -> None:
        if not text:
            return
        if self._pieces and self._pieces[-1][:2] == (kind, index):
            self._pieces[-1][2].append(text)
        else:
            self._pieces.append((kind, index, [text]))


def _event(kind: type, index: int, texts: list[str]) -> Event:
    if kind is ToolCallStart:
        return ToolCallStart(index, *texts)
    text = "".join(texts)
    return ContentDelta(text) if kind is ContentDelta else ArgumentsDelta(index, text)


@dataclass(slots=True)
class ParsedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """A whole output. content and reasoning: None where there is none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)


def message_of(events: Iterable[Event]) -> ParsedMessage:
    """The message that events add up to."""
    content, reasoning = [], []
    calls: list[tuple[ToolCallStart, list[str]]] = []
    for event in events:
        match event:
            case ContentDelta(text):
                content.append(text)
            case ReasoningDelta(text):
                reasoning.append(text)
            case ToolCallStart():
                calls.append((event, []))
            case ArgumentsDelta(index, text):
                calls[index][1].append(text)
    return ParsedMessage(
        "".join(content) if content else None,
        "".join(reasoning) if reasoning else None,
        [ParsedCall(start.id, start.name, "".join(texts)) for start, texts in calls],
    )

"""Events of a parser, and their collection into messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of content: `text` of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of reasoning: `text` before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a tool call.

    Attributes:
      index: 0 for the first call of an output.
      id: identifies the call in the messages that answer it.
      name: of the function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece, `text`, of the arguments of call `index`: JSON as the model wrote it, unchecked."""

    index: int
    text: str


Event = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class OutputParser(Protocol):
    """Interface of a streaming parser of one output of a model. The text may be cut into pieces anywhere: the events,
    once adjacent pieces are joined, do not depend on it.

    No text is lost: text that turns out not to be a tool call or another part of the format becomes content.
    """

    def feed(self, text: str) -> list[Event]:
        """Read a piece; return the events that are certain, with adjacent ones of one kind merged."""
        ...

    def finish(self) -> list[Event]:
        """End the output; return events of text that was held back."""
        ...


class ReasoningParser(OutputParser, Protocol):
    """An OutputParser that separates reasoning from content, which may contain calls."""

    @property
    def late_ends(self) -> tuple[str, ...]:
        """End words of reasoning that may still arrive because a tool call ended the reasoning without one;
        () otherwise.
        """
        ...


class Collector:
    """Collector of events that numbers the calls and drops white space between calls."""

    def __init__(self, new_id: Iterable[str]):
        """Begin without events. new_id: yields ids, of which each call takes one as it starts."""
        self._ids = iter(new_id)
        self._pieces: list[tuple[type, int, list[str]]] = []
        self._num_calls = 0
        # White space at the start or after a call, until it is known whether content follows.
        self._gap: list[str] | None = []

    def content(self, text: str) -> None:
        """Add a piece of content. White space at the start of the output or after a call is held: the next other
        content is emitted with it, the next call drops it.
        """
        if self._gap is not None:
            self._gap.append(text)
            if not text or text.isspace():
                return
            text, self._gap = "".join(self._gap), None
        self._add(ContentDelta, 0, text)

    def start(self, name: str, own_id: str | None = None) -> None:
        """Start a call of the function `name`, and drop white space held before it. own_id: an id that the model wrote,
        for chat templates that refer to calls by it; None takes the next of `new_id`.
        """
        self._pieces.append((ToolCallStart, self._num_calls, [own_id or next(self._ids), name]))
        self._num_calls += 1
        self._gap = []

    def arguments(self, text: str) -> None:
        """Add a piece of the arguments, JSON, of the last call; "" adds nothing."""
        self._add(ArgumentsDelta, self._num_calls - 1, text)

    def take(self) -> list[Event]:
        """Return the events since the last call of this method, and forget them."""
        pieces, self._pieces = self._pieces, []
        return [_event(kind, index, texts) for kind, index, texts in pieces]

    def finish(self) -> list[Event]:
        """Return the remaining events. If the output has no call, held white space becomes content; white space after a
        call is dropped.
        """
        if self._gap and not self._num_calls:
            self._add(ContentDelta, 0, "".join(self._gap))
        return self.take()

    def _add(self, kind: type, index: int, text: str) -> None:
        """Append a piece of text of a kind of event, merged with the last piece if both are of the same kind and call.
        "" adds nothing.
        """
        if not text:
            return
        if self._pieces and self._pieces[-1][:2] == (kind, index):
            self._pieces[-1][2].append(text)
        else:
            self._pieces.append((kind, index, [text]))


def _event(kind: type, index: int, texts: list[str]) -> Event:
    """Return the event of a collected piece. texts: id and name for a ToolCallStart, else pieces of text, which are
    joined.
    """
    if kind is ToolCallStart:
        return ToolCallStart(index, *texts)
    text = "".join(texts)
    return ContentDelta(text) if kind is ContentDelta else ArgumentsDelta(index, text)


@dataclass(slots=True)
class ParsedCall:
    """A tool call of a complete output: its id, the function's name, and its arguments, JSON as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """Complete output, parsed.

    Attributes:
      content, reasoning: None if empty.
      tool_calls: in the order of the output.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedCall] = field(default_factory=list)


def message_of(events: Iterable[Event]) -> ParsedMessage:
    """Combine all events of one output, in order, into a message; content and reasoning are None without any.

    A call's start must precede its arguments; IndexError otherwise.
    """
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

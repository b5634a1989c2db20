"""Parser of outputs with both reasoning and tool calls: reasoning first, then tool calls in the rest."""

from __future__ import annotations

from jaxengine.parsers.scan.events import ContentDelta, Event, OutputParser, ReasoningDelta, ReasoningParser
from jaxengine.parsers.scan.markers import Marker


class MessageParser:
    """Combination of a reasoning parser and a tool parser. Either is None for a model that writes no reasoning, or
    calls no tools. is_never_empty: whether the reasoning is also the content of an output that has no other, and no
    call.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: OutputParser | None, is_never_empty: bool = False):
        self._reasoning = reasoning
        self._tools = tools
        self._late_end: LateEnd | None = None
        # Reasoning that may become the content; None if it does not.
        self._thoughts: list[str] | None = [] if is_never_empty else None

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now. Without parsers all text is
        content.
        """
        events: list[Event] = [ContentDelta(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.feed(text)
        return self._noted(self._call_tools(events))

    def finish(self) -> list[Event]:
        """End the output and both parsers; return the events of text that was held back."""
        events = self._noted(self._rest())
        return [*events, ContentDelta("".join(self._thoughts))] if self._thoughts else events

    def _noted(self, events: list[Event]) -> list[Event]:
        """Return the events, and note their reasoning until content other than white space, or a call, comes."""
        for event in events:
            if self._thoughts is not None and isinstance(event, ReasoningDelta):
                self._thoughts.append(event.text)
            elif not isinstance(event, ContentDelta | ReasoningDelta) or event.text.strip():
                self._thoughts = None
        return events

    def _rest(self) -> list[Event]:
        """End both parsers; return the events of text that was held back."""
        events = self._call_tools([] if self._reasoning is None else self._reasoning.finish())
        if self._tools is not None:
            events += self._without_late_end(self._tools.finish())
        if self._late_end is not None and (text := self._late_end.take()):
            events.append(ContentDelta(text))
        return events

    def _call_tools(self, events: list[Event]) -> list[Event]:
        """Return these events with their content replaced by the events that the tool parser makes of it; unchanged
        without a tool parser. Begins the search for a late end word if a call has ended the reasoning.
        """
        if self._reasoning is not None and self._reasoning.late_ends and self._late_end is None:
            self._late_end = LateEnd(self._reasoning.late_ends)
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                found += self._without_late_end(self._tools.feed(event.text))
            else:
                found.append(event)
        return found

    def _without_late_end(self, events: list[Event]) -> list[Event]:
        """Return the events with a late end word removed from content, if a call has ended the reasoning.

        Content that may begin the word, and white space that may go with it, are held back for a later call; the former
        only until an event that is not content.
        """
        if self._late_end is None:
            return events
        found: list[Event] = []
        for event in events:
            text = self._late_end.read(event.text) if isinstance(event, ContentDelta) else self._late_end.take()
            found += [ContentDelta(text)] if text else []
            found += [] if isinstance(event, ContentDelta) else [event]
        return found


class LateEnd:
    """Filter that removes a late end word: the first word that ends reasoning, in the content after a call that has
    ended the reasoning already.

    White space around the word is removed with it if nothing else precedes the word.
    """

    def __init__(self, words: tuple[str, ...]):
        self._end: Marker | None = Marker(*words)
        # White space before any other content; None after that.
        self._space: list[str] | None = []

    def read(self, text: str) -> str:
        """Read a piece of content; return the content that is certain by now, without the word.

        Text that may begin the word, and white space that may go with it, are held back.
        """
        if self._end is None:
            return self._released(text)
        plain, at, word = self._end.read(text, 0)
        plain = self._released(plain)
        if not word:
            return plain
        self._end = None
        if self._space is not None:
            self._space = []
        return plain + self._released(text[at:])

    def take(self) -> str:
        """Return text that was held back as a possible beginning of the word, and hold it no longer; white space before
        other content stays held back. "" after the word.
        """
        return "" if self._end is None else self._released(self._end.take())

    def _released(self, text: str) -> str:
        """Return the white space held back and `text` after it; only white space is held back, and "" returned, until
        other content follows.
        """
        if self._space is None:
            return text
        self._space.append(text)
        if not text or text.isspace():
            return ""
        text, self._space = "".join(self._space), None
        return text

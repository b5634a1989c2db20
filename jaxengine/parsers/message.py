"""Parser of complete outputs: reasoning first, then tool calls in the rest."""

from __future__ import annotations

from jaxengine.parsers.events import ContentDelta, Event, OutputParser


class MessageParser:
    """Combines a reasoning and a tool parser; None for a model that writes no reasoning, or calls no tools."""

    def __init__(self, reasoning: OutputParser | None, tools: OutputParser | None):
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = [ContentDelta(text)] if text else []
        if self._reasoning is not None:
            events = self._reasoning.feed(text)
        return self._call_tools(events)

    def finish(self) -> list[Event]:
        events = self._call_tools([] if self._reasoning is None else self._reasoning.finish())
        return events if self._tools is None else [*events, *self._tools.finish()]

    def _call_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._tools.feed(event.text) if isinstance(event, ContentDelta) else [event]
        return found

"""Splits reasoning from the answer: <think> ... </think> at the beginning of an output, or other words in their place.

The opening word may stand in the prompt already. Later ones are part of the answer.
"""

from __future__ import annotations

from jaxengine.parsers.events import ContentDelta, Event, ReasoningDelta
from jaxengine.parsers.markers import Marker, Opening


class ThinkParser:
    """inside: the output begins with reasoning, opening word or not."""

    def __init__(self, begin: str, end: str, inside: bool):
        self._inside = inside
        self._opening: Opening | None = Opening(begin)
        self._end = Marker(end)

    def feed(self, text: str) -> list[Event]:
        at = 0
        reasoning, content = [], []
        if self._opening is not None:
            at, found = self._opening.read(text, at)
            if found is None:
                return []
            if not found:
                # The beginning of the one word may be that of the other.
                text, at = self._opening.held + text[at:], 0
            self._inside, self._opening = self._inside or found, None
        if self._inside:
            plain, at, found = self._end.read(text, at)
            reasoning.append(plain)
            self._inside = not found
        if not self._inside:
            content.append(text[at:])
        return _events(reasoning, content)

    def finish(self) -> list[Event]:
        held = self._end.take() if self._opening is None else self._opening.held
        return _events([held], []) if self._inside else _events([], [held])


def _events(reasoning: list[str], content: list[str]) -> list[Event]:
    events = [ReasoningDelta("".join(reasoning)), ContentDelta("".join(content))]
    return [event for event in events if event.text]


def begins_inside(prompt: str, continued: str, begin: str, end: str, default: bool) -> bool:
    """Whether an output begins inside reasoning: the words before it say, or else the model's custom.

    prompt: what the output follows. continued: the part of an answer that the output goes on with.
    """
    if begin in continued or end in continued:
        return continued.rfind(begin) > continued.rfind(end)
    tail = prompt[-1000:].rstrip()
    return tail.endswith(begin) or (default and not tail.endswith(end))

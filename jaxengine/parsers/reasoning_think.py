"""Splits reasoning from the answer: <think> ... </think> at the beginning of an output, or other words in their place.

The opening word may stand in the prompt already. Later ones are part of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxengine.parsers.events import ContentDelta, Event, OutputParser, ReasoningDelta
from jaxengine.parsers.markers import Marker, Opening

# Of a prompt, where the words around reasoning are looked for.
_TAIL_CHARS = 1000


@dataclass(frozen=True)
class ThinkFormat:
    """A registry.ReasoningFormat.

    Attributes:
      begins, ends: the words around reasoning, and other ways to write them; a model opens with the first one.
      calls: words that end reasoning too and belong to what follows.
      closing_call: words around calls. Where an output ends with some, the reasoning ended before them, though the
        model forgot to say so. From the first such word on text waits for the end.
      answer: words around the answer, where it has some.
      always: an output begins with reasoning, whether or not prompt or output hold the opening word.
      shown: reasoning stays in the content, between <think> and the word that ends it.
      special_tokens: as registry.ReasoningFormat.
    """

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    calls: tuple[str, ...] = ()
    closing_call: tuple[str, str] | None = None
    answer: tuple[str, str] | None = None
    always: bool = False
    shown: bool = False
    special_tokens: bool = False

    holds_calls = False
    stop_words = ()

    def open(self, prompt: str, continued: str = "", *, calls: bool = True) -> OutputParser:
        """As registry.ReasoningFormat."""
        inside = bool(self._begins_inside(prompt, continued))
        if self.shown:
            # What an answer goes on with has the word already, or was never to have it.
            return ShownParser(self.begins[0] if inside and not continued else "")
        parser = ThinkParser(self if calls else replace(self, calls=(), closing_call=None), inside)
        return parser if self.answer is None else AnswerParser(parser, *self.answer)

    def waits_for(self, prompt: str, continued: str = "") -> dict[str, Any]:
        """As registry.ReasoningFormat."""
        inside = self._begins_inside(prompt, continued)
        if inside is False:
            return {}
        # Calls that end the reasoning are free as well: no answer comes behind them.
        return {"reasoning_end": self.ends, "reasoning_begin": None if inside else self.begins[0]}

    def _begins_inside(self, prompt: str, continued: str) -> bool | None:
        """Whether an output begins inside reasoning, by the words before it or else the model's custom.

        None: not, but it may open it.
        """
        for text, decides in ((continued, False), (prompt[-_TAIL_CHARS:].rstrip(), True)):
            begun = max(_end_of_last(text, word) for word in self.begins)
            ended = max(_end_of_last(text, word) for word in self.ends)
            # A prompt may speak of the words; what counts there is what it ends with.
            if begun != ended and (not decides or max(begun, ended) == len(text)):
                return begun > ended
        return True if self.always else False if continued else None


def _end_of_last(text: str, word: str) -> int:
    at = text.rfind(word)
    return -1 if at < 0 else at + len(word)


class ThinkParser:
    """inside: the output begins with reasoning, opening word or not."""

    def __init__(self, words: ThinkFormat, inside: bool):
        self._inside = inside
        self._kept = words.calls
        self._opening: Opening | None = Opening(*words.begins)
        self._call, self._call_end = words.closing_call or ("", "")
        self._end = Marker(*words.ends, *words.calls, *filter(None, (self._call,)))
        self._last_end = Marker(*words.ends, *words.calls)
        # From the first call in the reasoning on.
        self._waiting: list[str] | None = None

    def feed(self, text: str) -> list[Event]:
        at = 0
        reasoning, content = [], ""
        if self._opening is not None:
            at, found = self._opening.read(text, at)
            if found is None:
                return []
            if not found:
                # The beginning of the one word may be that of the other.
                text, at = self._opening.held + text[at:], 0
            self._inside, self._opening = self._inside or found, None
        while self._inside and at < len(text):
            plain, at, word = self._end.read(text, at)
            (reasoning if self._waiting is None else self._waiting).append(plain)
            if word and word == self._call:
                self._waiting, self._end = [word], self._last_end
            elif word:
                reasoning += self._waiting or ()
                self._inside, self._waiting, content = False, None, word if word in self._kept else ""
        if not self._inside:
            content += text[at:]
        return _events("".join(reasoning), content)

    def finish(self) -> list[Event]:
        held = self._end.take() if self._opening is None else self._opening.held
        if self._waiting is not None:
            held = "".join(self._waiting) + held
            at = self._closing_calls(held)
            return _events(held[:at], held[at:])
        return _events(held, "") if self._inside else _events("", held)

    def _closing_calls(self, text: str) -> int:
        """Where the calls begin that a text ends with, one behind the other; its length where it ends with none."""
        at, end = len(text), len(text.rstrip())
        while text.endswith(self._call_end, 0, end):
            last = end - len(self._call_end)
            begin = text.rfind(self._call, 0, last)
            inner = text[begin + len(self._call) : last]
            # A call is an object or a tag.
            if begin < 0 or self._call_end in inner or not inner.lstrip().startswith(("{", "<")):
                break
            at = end = begin
            while end and text[end - 1].isspace():
                end -= 1
        return at


class ShownParser:
    """Leaves reasoning in the content. before: the opening word where the prompt has it, so that it is there too."""

    def __init__(self, before: str):
        self._before = before

    def feed(self, text: str) -> list[Event]:
        before, self._before = self._before, ""
        return _events("", before + text)

    def finish(self) -> list[Event]:
        return self.feed("")


class AnswerParser:
    """Takes the words off that a model writes around its answer, with the line break inside of each.

    What is behind them is content too, white space aside.
    """

    def __init__(self, inner: OutputParser, begin: str, end: str):
        self._inner = inner
        self._opening = Opening(begin)
        self._end = Marker("\n" + end, end)
        self._space: list[str] = []
        self._state = self._before

    def feed(self, text: str) -> list[Event]:
        return self._unwrap(self._inner.feed(text))

    def finish(self) -> list[Event]:
        events = self._unwrap(self._inner.finish())
        held = self._opening.held if self._state == self._before else self._end.take()
        return events + _events("", held)

    def _unwrap(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                found += _events("", self._state(event.text))
            else:
                found.append(event)
        return found

    def _before(self, text: str) -> str:
        at, found = self._opening.read(text, 0)
        if found is None:
            return ""
        self._state = self._first if found else self._rest
        return self._first(text[at:]) if found else self._opening.held + text[at:]

    def _first(self, text: str) -> str:
        if not text:
            return ""
        self._state = self._inside
        return self._inside(text.removeprefix("\n"))

    def _inside(self, text: str) -> str:
        plain, at, word = self._end.read(text, 0)
        if not word:
            return plain
        self._state = self._behind
        return plain + self._behind(text[at:])

    def _behind(self, text: str) -> str:
        self._space.append(text)
        if not text or text.isspace():
            return ""
        self._state = self._rest
        return "".join(self._space)

    def _rest(self, text: str) -> str:
        return text


def _events(reasoning: str, content: str) -> list[Event]:
    events = [ReasoningDelta(reasoning), ContentDelta(content)]
    return [event for event in events if event.text]

"""Parser of reasoning between <think> ... </think>, or other words, at the beginning of an output.

The opening word may be in the prompt already. Later occurrences belong to the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxengine.parsers.events import ContentDelta, Event, OutputParser, ReasoningDelta
from jaxengine.parsers.markers import Marker, Opening

# Characters at the end of a prompt in which the words around reasoning are searched.
_TAIL_CHARS = 1000


@dataclass(frozen=True)
class ThinkFormat:
    """registry.ReasoningFormat of a model that encloses reasoning in fixed words.

    Attributes:
      begins, ends: words around reasoning, and alternative spellings; the model writes the first one.
      calls: words that end reasoning too, and belong to the following text.
      closing_call: words around calls. If the output ends with calls, the reasoning ended before them, even without an
        end word. From the first such word on text is held until the end of the output.
      answer: words around the answer, if there are any.
      always: an output begins with reasoning, with or without the opening word in prompt or output.
      shown: reasoning stays in the content, between <think> and the end word.
      special_tokens: see registry.ReasoningFormat.
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
        """Implements registry.ReasoningFormat.open."""
        inside = bool(self._begins_inside(prompt, continued))
        if self.shown:
            # The beginning of a continued answer has the word already, or should not have it.
            return ShownParser(self.begins[0] if inside and not continued else "")
        parser = ThinkParser(self if calls else replace(self, calls=(), closing_call=None), inside)
        return parser if self.answer is None else AnswerParser(parser, *self.answer)

    def waits_for(self, prompt: str, continued: str = "") -> dict[str, Any]:
        """Implements registry.ReasoningFormat.waits_for."""
        inside = self._begins_inside(prompt, continued)
        if inside is False:
            return {}
        # Calls that end the reasoning are not constrained either: no answer follows them.
        return {"reasoning_end": self.ends, "reasoning_begin": None if inside else self.begins[0]}

    def answers_after(self, prompt: str, continued: str = "", *, calls: bool = True) -> dict[str, Any] | None:
        """Implements registry.ReasoningFormat.answers_after. Even after an end word in the prompt, an output may begin
        with an opening word.
        """
        inside = self._begins_inside(prompt, continued)
        ends = (*self.ends, *(self.calls if calls else ()))
        return {"reasoning_end": ends, "reasoning_begin": None if inside else self.begins}

    def _begins_inside(self, prompt: str, continued: str) -> bool | None:
        """Whether an output begins inside reasoning, by the words before it or else by `always`.

        None: it does not, but may open reasoning.
        """
        for text, decides in ((continued, False), (prompt[-_TAIL_CHARS:].rstrip(), True)):
            begun = max(_end_of_last(text, word) for word in self.begins)
            ended = max(_end_of_last(text, word) for word in self.ends)
            # A prompt may mention the words; only the one at its end counts.
            if begun != ended and (not decides or max(begun, ended) == len(text)):
                return begun > ended
        return True if self.always else False if continued else None


def _end_of_last(text: str, word: str) -> int:
    at = text.rfind(word)
    return -1 if at < 0 else at + len(word)


class ThinkParser:
    """Splits one output into reasoning and content. inside: the output begins with reasoning, with or without opening
    word.
    """

    def __init__(self, words: ThinkFormat, inside: bool):
        self._inside = inside
        self._kept = words.calls
        self._opening: Opening | None = Opening(*words.begins)
        self._call, self._call_end = words.closing_call or ("", "")
        self._end = Marker(*words.ends, *words.calls, *filter(None, (self._call,)))
        self._last_end = Marker(*words.ends, *words.calls)
        # Text from the first call in the reasoning on.
        self._waiting: list[str] | None = None

    def feed(self, text: str) -> list[Event]:
        at = 0
        reasoning, content = [], ""
        if self._opening is not None:
            at, found = self._opening.read(text, at)
            if found is None:
                return []
            if not found:
                # The held text may also be the beginning of an end word.
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
        """Start of the calls, one after another, that end a text; its length if there are none."""
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
    """Leaves reasoning in the content. before: the opening word if the prompt has it, which is prepended to
    the output.
    """

    def __init__(self, before: str):
        self._before = before

    def feed(self, text: str) -> list[Event]:
        before, self._before = self._before, ""
        return _events("", before + text)

    def finish(self) -> list[Event]:
        return self.feed("")


class AnswerParser:
    """Removes the words around an answer, together with a line break inside each.

    Text after them is content too, unless it is white space.
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
        self._state = self._after_answer
        return plain + self._after_answer(text[at:])

    def _after_answer(self, text: str) -> str:
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

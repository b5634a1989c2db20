"""Parser of reasoning between <think> ... </think>, or other words, at the beginning of an output.

The opening word may be in the prompt already. Later occurrences belong to the answer.

A model may call a tool without the word that ends its reasoning. As in vLLM the beginning of a call ends the reasoning:
waiting for an end word would hold the call back until the output ends. Unlike in vLLM, where any opening word of a call
counts, it must be the beginning of a call of a function that the request has, so reasoning may mention calls. An end
word after the call is removed, see message.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxengine.parsers.scan.call_start import CallStarts
from jaxengine.parsers.scan.events import ContentDelta, Event, ReasoningDelta, ReasoningParser
from jaxengine.parsers.scan.markers import Marker, Opening

# Characters at the end of a prompt in which the words around reasoning are searched.
_TAIL_CHARS = 1000


@dataclass(frozen=True)
class ThinkFormat:
    """Implementation of reasoning_rows.ReasoningFormat for models that enclose reasoning in fixed words.

    Attributes:
      begins, ends: words before and after reasoning, with alternative spellings; the model writes the first one.
      label: text that may follow an opening word, and is not part of the reasoning; "" for none.
      calls: words before calls that reasoning never mentions: such a word ends it, whatever follows.
      answer: words before and words after the answer, alternatives of each in a tuple; None if there are none.
      dropped: words that the format writes around answers and calls, which are removed wherever they are in content.
      always: whether an output begins with reasoning, with or without the opening word in prompt or output.
      shown: whether reasoning stays in the content, between <think> and the end word.
      special_tokens: see reasoning_rows.ReasoningFormat.
    """

    begins: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    label: str = ""
    calls: tuple[str, ...] = ()
    answer: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    dropped: tuple[str, ...] = ()
    always: bool = False
    shown: bool = False
    special_tokens: bool = False

    holds_calls = False
    stop_words = ()

    def open(self, prompt: str, continued: str = "", *, calls: CallStarts | None = None) -> ReasoningParser:
        """Return a parser for one output that follows `prompt` and continues the answer `continued`, "" for a new
        answer: a ThinkParser, within a DroppingParser or an AnswerParser if the format has `dropped` or `answer`; with
        `shown` a ShownParser, which only adds the opening word where a new output begins inside reasoning.

        calls: calls that end reasoning; None: no call does.
        """
        inside = bool(self._begins_inside(prompt, continued))
        if self.shown:
            # The beginning of a continued answer already has the word if it should have it.
            return ShownParser(self.begins[0] if inside and not continued else "")
        parser = ThinkParser(self, inside, calls)
        if self.dropped:
            return DroppingParser(parser, self.dropped)
        return parser if self.answer is None else AnswerParser(parser, *self.answer)

    def waits_for(self, prompt: str, continued: str = "") -> dict[str, Any]:
        """Return the fields of structured_outputs for an output that follows `prompt` and continues the answer
        `continued`, "" for a new answer: reasoning_end, the end words, and reasoning_begin, the first opening word, or
        None if the output begins inside reasoning. {} if its reasoning has ended before it.
        """
        inside = self._begins_inside(prompt, continued)
        if inside is False:
            return {}
        # Calls that end the reasoning are not constrained either: no answer follows them.
        return {"reasoning_end": self.ends, "reasoning_begin": None if inside else self.begins[0]}

    def answers_after(self, prompt: str, continued: str = "", *, calls: bool = True) -> dict[str, Any] | None:
        """Return the fields of stop_after for an output that follows `prompt` and continues the answer `continued`, ""
        for a new answer: reasoning_end, the words that end reasoning, and reasoning_begin, the opening words, or None
        if the output begins inside reasoning.

        calls: whether a parser of tool calls follows, so that `calls` of the format end reasoning, too. Never None
        here: even after an end word in the prompt, an output may begin with an opening word.
        """
        inside = self._begins_inside(prompt, continued)
        ends = (*self.ends, *(self.calls if calls else ()))
        return {"reasoning_end": ends, "reasoning_begin": None if inside else self.begins}

    def limited_by(self, prompt: str, continued: str = "") -> dict[str, Any] | None:
        """Return the fields of thinking_words for an output that follows `prompt` and continues the answer `continued`,
        "" for a new answer: reasoning_end, the words that end reasoning, calls included; reasoning_begin, the first
        opening word, or None if the output begins inside reasoning; closing, the end word of the opening word. Never
        None here: reasoning may always be opened.
        """
        begin = None if self._begins_inside(prompt, continued) else self.begins[0]
        closing = self.ends[0] if begin else self._end_word(prompt, continued)
        return {"reasoning_end": (*self.ends, *self.calls), "reasoning_begin": begin, "closing": closing}

    def _end_word(self, prompt: str, continued: str) -> str:
        """Return the end word of the last opening word in `continued` or else at the end of `prompt`; the first end
        word if there is none.
        """
        pairs = list(zip(self.begins, self.ends, strict=False))
        opened, end = max(pairs, key=lambda pair: _end_of_last(continued, pair[0]))
        if opened in continued:
            return end
        before = self._tail(prompt)
        return next((end for opened, end in pairs if before.endswith(opened.rstrip())), self.ends[0])

    def _begins_inside(self, prompt: str, continued: str) -> bool | None:
        """Return whether an output begins inside reasoning, by the words before it or else by `always`. False if
        reasoning has ended before it, or if it continues an answer without reasoning; None if it does not begin inside
        but may open reasoning.

        prompt: text before the output, of which only a word at its end counts. continued: the beginning of the answer;
        "" for a new answer.
        """
        for text, decides in ((continued, False), (self._tail(prompt), True)):
            # The line break after a word at the end of a prompt has been stripped.
            begun = max(_end_of_last(text, word.rstrip()) for word in self.begins)
            ended = max(_end_of_last(text, word) for word in self.ends)
            # A prompt may mention the words; only the one at its end counts.
            if begun != ended and (not decides or max(begun, ended) == len(text)):
                return begun > ended
        return True if self.always else False if continued else None

    def _tail(self, prompt: str) -> str:
        """Return the last _TAIL_CHARS characters of a prompt, without white space and then the label at their end."""
        return prompt[-_TAIL_CHARS:].rstrip().removesuffix(self.label.rstrip())


def _end_of_last(text: str, word: str) -> int:
    """Return the position after the last occurrence of `word`; -1 without one."""
    at = text.rfind(word)
    return -1 if at < 0 else at + len(word)


class ThinkParser:
    """Splitter of one output into reasoning and content.

    words: the words around reasoning and before calls. inside: whether the output begins inside reasoning, with or
    without the opening word. calls: calls that end reasoning; None: no call does.

    Attributes:
      late_ends: end words that may still come after a call that has ended the reasoning; else ().
    """

    def __init__(self, words: ThinkFormat, inside: bool, calls: CallStarts | None):
        """Begin in the state before reasoning, with the words that open it and the words that end it or may begin a
        call. For the arguments see the class.
        """
        self._inside = inside
        self._kept = () if calls is None else words.calls
        self._starts = [each for each in (() if calls is None else calls.words) if each[0] not in self._kept]
        self._ends = words.ends
        # An end word before anything else says that there is no reasoning; inside it is a word of `_end`.
        self._opening = Opening(*words.begins, *(() if inside else words.ends))
        self._end = Marker(*words.ends, *self._kept, *dict.fromkeys(each[0] for each in self._starts))
        self._label = Opening(words.label) if words.label else None
        # A word that may begin a call, and the following text, which decides whether it does.
        self._word, self._call = "", Opening()
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._state = self._first
        self.late_ends: tuple[str, ...] = ()

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now."""
        self._read(text)
        return self._take()

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: as reasoning, or as content if no reasoning was
        opened.
        """
        if self._state == self._first:
            (self._reasoning if self._inside else self._content).append(self._opening.held)
        elif self._state == self._before_label and self._label:
            self._reasoning.append(self._label.held)
        elif self._state == self._thoughts:
            self._reasoning.append(self._end.take())
        elif self._state == self._after_word:
            self._reasoning += [self._word, self._call.held]
        return self._take()

    def _take(self) -> list[Event]:
        """Return the events of the text since the last call, reasoning first, and clear it."""
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return _events(reasoning, content)

    def _read(self, text: str) -> None:
        """Read all of a text, from the current state on."""
        at = 0
        while at < len(text):
            at = self._state(text, at)

    def _first(self, text: str, at: int) -> int:
        """State at the output's start, where reasoning may be opened, or denied by its end word; the word is dropped.
        Other text is reasoning if the output begins inside it, else content.

        Reads `text` from index `at`; returns the index after what it read.
        """
        at, found = self._opening.read(text, at)
        if found is not None:
            opens = self._inside or (found and not self._opening.held.endswith(self._ends))
            labelled = found and self._label is not None
            self._state = self._answer if not opens else self._before_label if labelled else self._thoughts
        if found is False:
            self._read(self._opening.held)  # it may also be the beginning of an end word
        return at

    def _before_label(self, text: str, at: int) -> int:
        """State after the opening word, where the label is dropped; other text is reasoning. Reads `text` from index
        `at`; returns the index after what it read.
        """
        assert self._label is not None
        at, found = self._label.read(text, at)
        if found is not None:
            self._state = self._thoughts
        if found is False:
            self._read(self._label.held)
        return at

    def _thoughts(self, text: str, at: int) -> int:
        """State inside reasoning, up to a word that ends it (the answer follows) or may begin a call. Reads `text` from
        index `at`; returns the index after what it read.
        """
        plain, at, word = self._end.read(text, at)
        self._reasoning.append(plain)
        if word in self._ends:
            self._state = self._answer
        elif word in self._kept:
            self._end_by_call(word)
        elif word:
            self._word, self._state = word, self._after_word
            self._call = Opening(*(each[1:] for each in self._starts if each[0] == word))
        return at

    def _after_word(self, text: str, at: int) -> int:
        """State after a word that ends the reasoning if a call of one of the functions begins with it, and else is
        reasoning itself. Reads `text` from index `at`; returns the index after what it read.
        """
        at, found = self._call.read(text, at)
        if found:
            self._end_by_call(self._word + self._call.held)
        elif found is False:
            self._reasoning.append(self._word)
            self._state = self._thoughts
            self._read(self._call.held)
        return at

    def _end_by_call(self, text: str) -> None:
        """End the reasoning by a call that begins with this text, which becomes content. Sets `late_ends`, since an end
        word may still come.
        """
        self._content.append(text)
        self.late_ends, self._state = self._ends, self._answer

    def _answer(self, text: str, at: int) -> int:
        """State after reasoning: all text from index `at` is content. Returns the length of the text."""
        self._content.append(text[at:])
        return len(text)


class ShownParser:
    """Parser that leaves reasoning in the content. before: text prepended to the output, the opening word if the prompt
    has it; "" for none.
    """

    late_ends = ()

    def __init__(self, before: str):
        self._before = before

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return it as content, the first piece with `before` prepended."""
        before, self._before = self._before, ""
        return _events("", before + text)

    def finish(self) -> list[Event]:
        """End the output; return `before` as content if no piece has been read, else []."""
        return self.feed("")


class DroppingParser:
    """Parser that removes some words from the content of another parser (`inner`), wherever they are. words: the
    words, none a prefix of another.
    """

    def __init__(self, inner: ReasoningParser, words: tuple[str, ...]):
        self._inner = inner
        self._word = Marker(*words)

    @property
    def late_ends(self) -> tuple[str, ...]:
        """Words that may still end reasoning after a call has ended it, by the inner parser; else ()."""
        return self._inner.late_ends

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now, without the words."""
        return self._without_words(self._inner.feed(text))

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back."""
        return self._without_words(self._inner.finish()) + _events("", self._word.take())

    def _without_words(self, events: list[Event]) -> list[Event]:
        """Return the events with the words removed from content; content that may begin a word is held back."""
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                text, at = [], 0
                while at < len(event.text):
                    plain, at, _ = self._word.read(event.text, at)
                    text.append(plain)
                found += _events("", "".join(text))
            else:
                found.append(event)
        return found


class AnswerParser:
    """Parser that removes the words around an answer from the content of another parser (`inner`), together with a line
    break after the word before it and one before the word after it.

    Text after them is content, too, unless it is white space. begins, ends: alternative words before and after the
    answer.
    """

    def __init__(self, inner: ReasoningParser, begins: tuple[str, ...], ends: tuple[str, ...]):
        self._inner = inner
        self._opening = Opening(*begins)
        self._end = Marker(*ends, *("\n" + end for end in ends))
        self._space: list[str] = []
        self._state = self._before

    @property
    def late_ends(self) -> tuple[str, ...]:
        """Words that may still end reasoning after a call has ended it, by the inner parser; else ()."""
        return self._inner.late_ends

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now, without the words around the
        answer.
        """
        return self._unwrap(self._inner.feed(text))

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back."""
        events = self._unwrap(self._inner.finish())
        held = self._opening.held if self._state == self._before else self._end.take()
        return events + _events("", held)

    def _unwrap(self, events: list[Event]) -> list[Event]:
        """Return the events with the words around the answer removed from content; content that may belong to such a
        word is held back.
        """
        found: list[Event] = []
        for event in events:
            if isinstance(event, ContentDelta):
                found += _events("", self._state(event.text))
            else:
                found.append(event)
        return found

    def _before(self, text: str) -> str:
        """State before the word that begins the answer. Returns the content that is certain; "" while the word may
        still come.
        """
        at, found = self._opening.read(text, 0)
        if found is None:
            return ""
        self._state = self._first if found else self._rest
        return self._first(text[at:]) if found else self._opening.held + text[at:]

    def _first(self, text: str) -> str:
        """State right after the word that begins the answer: drops a line break. Returns the content that is
        certain.
        """
        if not text:
            return ""
        self._state = self._inside
        return self._inside(text.removeprefix("\n"))

    def _inside(self, text: str) -> str:
        """State in the answer, up to the word that ends it. Returns the content that is certain."""
        plain, at, word = self._end.read(text, 0)
        if not word:
            return plain
        self._state = self._after_answer
        return plain + self._after_answer(text[at:])

    def _after_answer(self, text: str) -> str:
        """State after the answer: white space is held back, and dropped if nothing follows. Returns the content that is
        certain.
        """
        self._space.append(text)
        if not text or text.isspace():
            return ""
        self._state = self._rest
        return "".join(self._space)

    def _rest(self, text: str) -> str:
        """State in which all text is content, and returned unchanged."""
        return text


def _events(reasoning: str, content: str) -> list[Event]:
    """Return a ReasoningDelta and a ContentDelta of these texts, without those that are empty."""
    events = [ReasoningDelta(reasoning), ContentDelta(content)]
    return [event for event in events if event.text]

"""StopAfter: stop strings (`stop`) have no effect within reasoning, only in the answer after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.requests.params.stop_strings import StopStrings
from jaxengine.scheduler.base.errors import RequestError, refuse

_MAX_WORDS, _MAX_CHARS = 16, 256


@dataclass(frozen=True)
class StopAfter:
    """The words around reasoning, named as in StructuredOutputsParams. They are searched in the output's text, which
    contains words that are special tokens only with skip_special_tokens=False.

    Attributes:
      reasoning_end: text that ends the reasoning, or a list of alternatives, each a text or a list of consecutive
        texts. Stored as tuples of tuples.
      reasoning_begin: text that begins the reasoning, or a list of alternatives, stored as a tuple. If an output does
        not begin with one of them, after white space, all of it is the answer. None if every output begins with
        reasoning.

    Raises:
      RequestError: a value of another form, a list with none or more than 16 entries, a text that is empty or has more
        than 256 characters.
    """

    reasoning_end: str | Sequence[str | Sequence[str]]
    reasoning_begin: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        ends = tuple(_words("reasoning_end", each) for each in _listed("reasoning_end", self.reasoning_end))
        object.__setattr__(self, "reasoning_end", ends)
        if self.reasoning_begin is not None:
            object.__setattr__(self, "reasoning_begin", _words("reasoning_begin", self.reasoning_begin))


def stop_after(name: str, value: Any) -> StopAfter:
    """Return a StopAfter for a value of SamplingParams.stop_after: a StopAfter or a dict of its fields. Raises
    RequestError for other values. name: the field's name, for the error.
    """
    if isinstance(value, StopAfter):
        return value
    known = {field.name for field in fields(StopAfter)}
    if not isinstance(value, Mapping) or "reasoning_end" not in value or set(value) - known:
        allowed = "None or a dict with reasoning_end and optionally reasoning_begin"
        raise refuse(name, value, allowed)
    return StopAfter(**value)


def _listed(name: str, value: Any) -> Sequence[Any]:
    """Return a list or tuple of 1 to _MAX_WORDS entries unchanged, and a text in a tuple. The entries are not checked.
    Raises RequestError for other values. name: the field's name, for the error.
    """
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not 1 <= len(listed) <= _MAX_WORDS:
        raise _invalid(name, value)
    return listed


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple. Raises RequestError for other values, for more than _MAX_WORDS
    texts, and for texts that are empty or longer than _MAX_CHARS.
    """
    listed = _listed(name, value)
    if not all(isinstance(word, str) and 1 <= len(word) <= _MAX_CHARS for word in listed):
        raise _invalid(name, value)
    return tuple(listed)


def _invalid(name: str, value: Any) -> RequestError:
    """Return a RequestError, for the caller to raise, about the field `name` of stop_after."""
    allowed = f"a text of 1 to {_MAX_CHARS} characters, or a list of 1 to {_MAX_WORDS}"
    return refuse(f"stop_after.{name}", value, allowed)


class AnswerStops:
    """StopStrings that only apply to the answer after reasoning. A stop string may begin in the white space before the
    answer, but one that ends there is ignored.
    """

    def __init__(self, stops: StopStrings, after: StopAfter):
        self._stops = stops
        self._opening = None if after.reasoning_begin is None else Opening(*after.reasoning_begin)
        # Pieces of text for which it is not known yet whether they begin with the opening word.
        self._pieces: list[tuple[str, bool]] = []
        self._ends = [[Marker(word) for word in reversed(words)] for words in after.reasoning_end]
        self._read = self._in_reasoning if self._opening is None else self._at_opening

    @property
    def met(self) -> str | None:
        """The stop string that was found; None as long as none was."""
        return self._stops.met

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Read the next piece of text, and return the text that is settled: reasoning, and text of the answer that
        cannot be part of a stop string. counts: whether a stop string that ends in this piece counts.
        """
        return self._read(text, counts)

    def release(self) -> str:
        """End the input, and return the text that was held back. What could have become the opening word counts as
        answer.
        """
        return self._answer_from_beginning() + self._stops.release()

    def _at_opening(self, text: str, counts: bool) -> str:
        """Read text, and hold it back until it is known whether the output begins with the opening word. Return settled
        text. counts: whether stop strings that end in `text` count.
        """
        assert self._opening is not None
        at, found = self._opening.read(text, 0)
        if not found:
            self._pieces.append((text, counts))
            return "" if found is None else self._answer_from_beginning()
        before = "".join(piece for piece, _ in self._pieces)
        self._pieces, self._read = [], self._in_reasoning
        return before + text[:at] + self._in_reasoning(text[at:], counts)

    def _answer_from_beginning(self) -> str:
        """Treat the pieces that were held back as an answer without reasoning, and return their settled text."""
        pieces, self._pieces = self._pieces, []
        if self._read == self._at_opening:
            self._read = self._in_answer
        return "".join([self._stops.feed(text, counts=counts) for text, counts in pieces])

    def _in_reasoning(self, text: str, counts: bool) -> str:
        """Read text of the reasoning and search it for the words that end it; the next state is then `_before_answer`.
        Return settled text. counts: whether stop strings that end in `text` count if they are in the answer.
        """
        found = [at for words in self._ends if (at := _end(words, text)) is not None]
        if not found:
            return text
        self._read = self._before_answer
        return text[: min(found)] + self._before_answer(text[min(found) :], counts)

    def _before_answer(self, text: str, counts: bool) -> str:
        """Read the white space after the reasoning, in which no stop string may end, and the answer after it. Return
        settled text. counts: whether stop strings that end in the answer's part of `text` count.
        """
        answer = text.lstrip()
        space = self._stops.feed(text[: len(text) - len(answer)], counts=False)
        if not answer:
            return space
        self._read = self._in_answer
        return space + self._in_answer(answer, counts)

    def _in_answer(self, text: str, counts: bool) -> str:
        """Search text of the answer for stop strings, and return settled text."""
        return self._stops.feed(text, counts=counts)


def _end(words: list[Marker], text: str) -> int | None:
    """Search `text` for words that occur one after the other, given in reverse order. Return the index after the last
    one; None as long as one is missing. Words that have been found are removed from the list, so that the search can
    continue in the next text.
    """
    at = 0
    while words:
        _, at, found = words[-1].read(text, at)
        if not found:
            return None
        words.pop()
    return at

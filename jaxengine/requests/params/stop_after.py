"""Beginning of the answer after reasoning: stop strings (`stop`) inside the reasoning end nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.requests.params.stop_strings import StopStrings
from jaxengine.scheduler.base.errors import RequestError, show_value

_MAX_WORDS, _MAX_CHARS = 16, 256


@dataclass(frozen=True)
class StopAfter:
    """The words around reasoning, named as in StructuredOutputsParams. They are searched for in the output's text,
    which contains those that are special tokens only with skip_special_tokens=False.

    Attributes:
      reasoning_end: text that ends the reasoning, or a list of alternatives, each a text or a list of consecutive
        texts. Stored as tuples of tuples.
      reasoning_begin: text that begins the reasoning, or a list of alternatives. An output that does not begin with
        one of them, after white space, is an answer from its beginning. None: every output begins with reasoning.

    Raises:
      RequestError: a value of another form.
    """

    reasoning_end: str | Sequence[str | Sequence[str]]
    reasoning_begin: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        ends = tuple(_words("reasoning_end", each) for each in _listed("reasoning_end", self.reasoning_end))
        object.__setattr__(self, "reasoning_end", ends)
        if self.reasoning_begin is not None:
            object.__setattr__(self, "reasoning_begin", _words("reasoning_begin", self.reasoning_begin))


def stop_after(name: str, value: Any) -> StopAfter:
    """Return a value of SamplingParams.stop_after, a StopAfter or a dict of its fields, as a StopAfter. name: of the
    field, for the RequestError that other values raise.
    """
    if isinstance(value, StopAfter):
        return value
    known = {field.name for field in fields(StopAfter)}
    if not isinstance(value, Mapping) or "reasoning_end" not in value or set(value) - known:
        allowed = "None or a dict with reasoning_end and optionally reasoning_begin"
        raise RequestError(f"{name} must be {allowed}, got {show_value(value)}", param=name, value=value)
    return StopAfter(**value)


def _listed(name: str, value: Any) -> Sequence[Any]:
    """Return a list or tuple of 1 to _MAX_WORDS entries unchanged, and a text as a tuple of one. name: of the field,
    for the RequestError that other values raise. The entries are not checked.
    """
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not 1 <= len(listed) <= _MAX_WORDS:
        raise _refuse(name, value)
    return listed


def _words(name: str, value: Any) -> tuple[str, ...]:
    """Return a text, or a list of texts, as a tuple. Raises RequestError for other values, for more than _MAX_WORDS
    texts, and for texts that are empty or longer than _MAX_CHARS.
    """
    listed = _listed(name, value)
    if not all(isinstance(word, str) and 1 <= len(word) <= _MAX_CHARS for word in listed):
        raise _refuse(name, value)
    return tuple(listed)


def _refuse(name: str, value: Any) -> RequestError:
    """Return a RequestError, which the caller raises, about the field `name` of stop_after."""
    allowed = f"a text of 1 to {_MAX_CHARS} characters, or a list of 1 to {_MAX_WORDS}"
    return RequestError(
        f"stop_after.{name} must be {allowed}, got {show_value(value)}", param="stop_after", value=value
    )


class AnswerStops:
    """StopStrings that apply only to the answer after reasoning. A stop string that ends in the white space before the
    answer is ignored too, but one may begin there.
    """

    def __init__(self, stops: StopStrings, after: StopAfter):
        self._stops = stops
        self._opening = None if after.reasoning_begin is None else Opening(*after.reasoning_begin)
        # The pieces that may be the beginning of the opening word, until that is known.
        self._pieces: list[tuple[str, bool]] = []
        self._ends = [[Marker(word) for word in reversed(words)] for words in after.reasoning_end]
        self._read = self._in_reasoning if self._opening is None else self._at_opening

    @property
    def met(self) -> str | None:
        """The stop string that was found; None before."""
        return self._stops.met

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Read the next piece of text. Return the text that is settled: reasoning, and text of the answer that cannot
        be part of a stop string. counts=False: a stop string that ends in this piece is ignored.
        """
        return self._read(text, counts)

    def release(self) -> str:
        """End the input: return the held text, which is searched as an answer if it may have begun the opening word."""
        return self._answer_from_beginning() + self._stops.release()

    def _at_opening(self, text: str, counts: bool) -> str:
        """Read text until it is known whether the output begins with the opening word, and hold the pieces until then.
        Return settled text, "" before. counts: whether stop strings that end in `text` count.
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
        """Treat the held pieces as part of an answer without reasoning; return their settled text."""
        pieces, self._pieces = self._pieces, []
        if self._read == self._at_opening:
            self._read = self._in_answer
        return "".join([self._stops.feed(text, counts=counts) for text, counts in pieces])

    def _in_reasoning(self, text: str, counts: bool) -> str:
        """Read text of the reasoning, and search it for the words that end it, after which `_before_answer` is the next
        state. Return settled text. counts: whether stop strings that end in `text` count, once the answer begins.
        """
        found = [at for words in self._ends if (at := _end(words, text)) is not None]
        if not found:
            return text
        self._read = self._before_answer
        return text[: min(found)] + self._before_answer(text[min(found) :], counts)

    def _before_answer(self, text: str, counts: bool) -> str:
        """Read white space after the reasoning, in which no stop string ends, and the answer that follows. Return
        settled text.
        """
        answer = text.lstrip()
        space = self._stops.feed(text[: len(text) - len(answer)], counts=False)
        if not answer:
            return space
        self._read = self._in_answer
        return space + self._in_answer(answer, counts)

    def _in_answer(self, text: str, counts: bool) -> str:
        """Pass text of the answer to the search for stop strings; return settled text."""
        return self._stops.feed(text, counts=counts)


def _end(words: list[Marker], text: str) -> int | None:
    """Search `text` for consecutive words, which are in `words` in reverse order. Return the position after the last
    one; None while one is missing.

    Words that were found are removed from the list, so that the search continues with the next text.
    """
    at = 0
    while words:
        _, at, found = words[-1].read(text, at)
        if not found:
            return None
        words.pop()
    return at

"""Parser of tool calls as a Python list, [get_weather(city="Paris"), now()], of Llama 3.2, Llama 4 and ToolACE.

The list begins the output. Llama 4 may enclose it in words; Olmo 3 encloses calls in words, one per line without
brackets. A call is emitted when it is closed. Nothing is evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from itertools import islice, repeat

from jaxengine.parsers.scan.argument_forms import ArgumentForm, argument_forms
from jaxengine.parsers.scan.call_grammar import CallGrammar, literal
from jaxengine.parsers.scan.events import Collector, ContentDelta, Event
from jaxengine.parsers.scan.markers import Marker
from jaxengine.parsers.scan.python_scan import PythonScanner, Reading
from jaxengine.parsers.tools.nested_quotes import requoted


class _State(Enum):
    """Part of a call that the next character belongs to."""

    SEEK = auto()  # the word before calls, if there is one
    LIST = auto()
    CALL = auto()  # a call, or the end of the list after a comma
    NAME = auto()
    AFTER_NAME = auto()
    PARAMETER = auto()  # a parameter, or the end of the call
    PARAMETER_NAME = auto()
    EQUALS = auto()
    VALUE = auto()
    AFTER_VALUE = auto()
    AFTER_CALL = auto()
    END_WORD = auto()
    BROKEN = auto()  # after text that is no call, which may be one with nested quotes
    CONTENT = auto()


LLAMA4 = "<|python_start|>", "<|python_end|>"
LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
OLMO3 = "<function_calls>", "</function_calls>"


def grammar(calls: CallGrammar, words: tuple[str, str] = ("", ""), brackets: bool = True) -> Iterator[str]:
    """Yield Lark rules for calls, with the top rule `calls`. Arguments have their schema's order; values are JSON.

    words: before and after the calls, "" for none; brackets: the calls are a list, otherwise one a line. Raises
    ValueError for a name that is not a Python identifier, and for a schema with too many alternatives or levels;
    UnresolvedError for a reference that leads nowhere, and the errors of calls.json.
    """
    for name in calls.functions:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"the function {name!r} cannot be called in Python's notation")
    begin, end = (calls.word(word) if word else "" for word in words)
    inside = f'"[" {calls.listed("call", ", ")} "]"' if brackets else calls.listed("call", "\n")
    yield f"calls: {begin} {inside} {end}"
    forms = [(name, form) for name, schema in calls.functions.items() for form in argument_forms(schema)]
    names = (f"{literal(name + '(')} first_{at}_0 {literal(')')}" for at, (name, _) in enumerate(forms))
    yield f"call: {' | '.join(names)}"
    for at, (_, form) in enumerate(forms):
        yield from _keywords(calls, at, form)


def starts(name: str, words: tuple[str, str], brackets: bool = True) -> Iterator[tuple[str, ...]]:
    """Yield the one beginning of a call of the function `name` after words[0], with a bracket if `brackets`, as a word
    sequence for CallStarts.words.
    """
    yield (words[0], *(["["] if brackets else []), name, "(")


def _keywords(calls: CallGrammar, at: int, form: ArgumentForm) -> Iterator[str]:
    """Yield Lark rules for the keyword arguments of a call, by the form with the number `at`.

    The rule first_<at>_<n> holds the arguments from the n-th on if none precedes them, and rest_<at>_<n> those with a
    comma before them. Raises ValueError for a name that is not a Python identifier, UnresolvedError for a reference
    that leads nowhere, and the errors of calls.json.
    """
    for number, name in enumerate(form.places):
        if not name.isidentifier():
            raise ValueError(f"the parameter {name!r} cannot be named in Python's notation")
        left_out = name not in form.required
        this, later = f"{at}_{number}", f"{at}_{number + 1}"
        yield f"value_{this}: {calls.json(form.schema(name))}"
        yield f"first_{this}: {literal(name + '=')} value_{this} rest_{later}{f' | first_{later}' if left_out else ''}"
        yield f"rest_{this}: {literal(f', {name}=')} value_{this} rest_{later}{f' | rest_{later}' if left_out else ''}"
    yield f'first_{at}_{len(form.places)}: ""'
    yield f'rest_{at}_{len(form.places)}: ""'


class PythonicToolParser:
    """Parser of calls in Python's notation. words: before and after the calls; brackets: the calls are a list, which
    may begin an output without words; nested: whether strings between the words may hold their own quotation marks
    unescaped, if there is one way to read them.
    """

    def __init__(
        self,
        new_id: Iterable[str],
        words: tuple[str, str] = ("", ""),
        brackets: bool = True,
        nested: bool = False,
    ):
        self._out = Collector(new_id)
        self._words, self._end, self._nested = words, words[1], nested
        self._num_of_end = 0
        self._brackets = brackets
        self._outside = Marker(*words) if words[0] else None
        self._elsewhere = _State.CONTENT if self._outside is None else _State.SEEK
        self._first = _State.LIST if brackets else _State.CALL  # after the word before calls
        self._state = _State.LIST if brackets else _State.SEEK
        self._held: list[str] = []
        self._word: list[str] = []
        self._name = ""
        self._has_called = False
        self._json: list[str] = []
        self._value = PythonScanner()

    def feed(self, text: str) -> list[Event]:
        """Read a piece of the output; return the events that are certain by now. A call is emitted when it is closed;
        held text that turns out not to be a call becomes content.
        """
        self._feed(text)
        return self._out.take()

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back, as content; text between calls is dropped."""
        if self._state is not _State.AFTER_CALL:
            self._release()
        if self._outside is not None:
            self._out.content(self._outside.take())
        return self._out.finish()

    def _feed(self, text: str) -> None:
        """Read a piece of the output, and write its events to the collector. Text that turns out not to be a call is
        released as content, or collected if it may be one with nested quotes.
        """
        at = 0
        while at < len(text):
            if self._state is _State.CONTENT:
                self._out.content(text[at:])
                break
            if self._state in (_State.SEEK, _State.BROKEN):
                at = self._seek(text, at) if self._state is _State.SEEK else self._collect(text, at)
            else:
                self._held.append(text[at])
                at += 1
                if not self._read(text[at - 1]):
                    self._held.pop()  # it may begin the word before other calls
                    at -= 1
                    if self._nested and (self._has_called or self._held[:1] == [self._words[0]]):
                        self._state = _State.BROKEN
                    else:
                        self._release()

    def _seek(self, text: str, at: int) -> int:
        """Emit `text` from `at` on as content, up to the word before calls, which enters a list of calls. The word
        after calls is dropped if a call was read since the last word before calls, and content otherwise. Returns the
        position after what it read.
        """
        assert self._outside is not None
        plain, at, word = self._outside.read(text, at)
        self._out.content(plain)
        if word and word != self._end:
            self._held, self._has_called, self._state = [word], False, self._first
        elif word and not self._has_called:
            self._out.content(word)
        return at

    def _collect(self, text: str, at: int) -> int:
        """Hold text after the beginning of a list that is no call, up to the word after calls, where its quotes are
        repaired if they can be in one way; else, and at the word before other calls, it is content. Reads `text` from
        `at`; returns the index after what it read.
        """
        assert self._outside is not None
        plain, at, word = self._outside.read(text, at)
        self._held.append(plain)
        if not word:
            return at
        begin = not self._has_called  # the held text has the word before calls
        held, repaired = "".join(self._held[begin:]), None
        if word == self._end:
            readings = list(islice(filter(self._is_list, requoted(held)), 2))
            repaired = readings[0] if len(readings) == 1 else None
        if repaired is None:
            self._release()
            if word == self._end:
                self._out.content("" if self._has_called else word)
            else:
                self._held, self._has_called, self._state = [word], False, self._first
        else:
            self._held, self._state = [], self._first if begin else _State.AFTER_CALL
            self._feed(repaired + word)
        return at

    def _is_list(self, text: str) -> bool:
        """Return whether `text`, which follows the word before calls or a call, is all of the remaining calls."""
        parser = PythonicToolParser(repeat(""), self._words, self._brackets)
        before = "[f()" if self._brackets else "f()"
        events = parser.feed(f"{self._words[0]}{before if self._has_called else ''}{text}{self._end}")
        is_ended = parser._state is _State.SEEK
        return is_ended and not any(isinstance(event, ContentDelta) for event in events)

    def _read(self, char: str) -> bool:
        """Read the next character, `char`, in or after calls, and update the state. Return False if it is not allowed
        there, so that the held text is not a call.
        """
        match self._state:
            case _State.NAME | _State.PARAMETER_NAME:
                return self._read_word(char)
            case _State.VALUE:
                return self._read_value(char)
            case _State.END_WORD:
                return self._read_end(char)
            case _ if char.isspace():
                return True
            case _State.LIST:
                self._state = _State.CALL
                return char == "["
            case _State.CALL | _State.PARAMETER if char.isidentifier():
                self._word = [char]
                self._state = _State.NAME if self._state is _State.CALL else _State.PARAMETER_NAME
                return True
            case _State.AFTER_NAME:
                return self._open_call(char)
            case _State.EQUALS:
                return self._open_value(char)
            case _State.PARAMETER | _State.AFTER_VALUE if char == ")":
                self._end_call()
                return True
            case _State.AFTER_VALUE:
                self._state = _State.PARAMETER
                return char == ","
            case _State.AFTER_CALL if char == ",":
                self._state = _State.CALL
                return True
            case _State.AFTER_CALL if not self._brackets:
                if char.isidentifier():
                    self._word, self._state = [char], _State.NAME
                    return True
                self._num_of_end, self._state = 0, _State.END_WORD
                return self._read_end(char)
            case _State.CALL | _State.AFTER_CALL if self._brackets:
                # After the last call; "[]" alone calls nothing.
                return char == "]" and self._has_called and self._close()
        return False

    def _read_end(self, char: str) -> bool:
        """Read a character of the word after calls; return False if it does not continue that word."""
        if char != self._end[self._num_of_end]:
            return False
        self._num_of_end += 1
        return self._num_of_end < len(self._end) or self._close()

    def _close(self) -> bool:
        """End the calls, drop the held text, and enter the state for text outside of calls. Returns True."""
        self._held, self._state = [], self._elsewhere
        return True

    def _read_word(self, char: str) -> bool:
        """Read a character of a function's or parameter's name, or the first one after it. Returns False if that is not
        allowed there.
        """
        if char.isidentifier() or char.isdigit() or (char == "." and self._state is _State.NAME):
            self._word.append(char)
            return True
        name = "".join(self._word)
        if self._state is _State.NAME:
            self._name, self._state = name, _State.AFTER_NAME
        else:
            self._json += [", " if len(self._json) > 1 else "", json.dumps(name, ensure_ascii=False), ": "]
            self._state = _State.EQUALS
        return self._read(char)

    def _open_call(self, char: str) -> bool:
        """Begin the arguments of a call; return whether the character is "("."""
        self._json, self._state = ["{"], _State.PARAMETER
        return char == "("

    def _open_value(self, char: str) -> bool:
        """Begin a value; return whether the character is "="."""
        self._value, self._state = PythonScanner(), _State.VALUE
        return char == "="

    def _read_value(self, char: str) -> bool:
        """Read a character of a value, or the first one after it. Returns False if it is not allowed there."""
        reading = self._value.read(char)
        if reading in (Reading.MORE, Reading.WRONG):
            return reading is Reading.MORE
        self._json += self._value.json
        self._state = _State.AFTER_VALUE
        return reading is Reading.DONE or self._read(char)

    def _end_call(self) -> None:
        """Send the call and its arguments, and drop the held text."""
        self._out.start(self._name)
        self._out.arguments("".join(self._json) + "}")
        self._held, self._state, self._has_called = [], _State.AFTER_CALL, True

    def _release(self) -> None:
        """Emit the held text, which is not a call, as content, and enter the state for text outside of calls."""
        self._out.content("".join(self._held))
        self._held, self._state = [], self._elsewhere

"""Parser of Gemma's tool calls: Gemma 4 and FunctionGemma.

  <|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1,2.5],rain:true}<tool_call|>

Strings stand between two quotation words. The closing word may be missing, and text may surround calls. As the format
tells strings from other values, a value has the type that it is written as, unless the function's schema says another:
a string "5" of an integer parameter is a number, a bare 5 of a string parameter a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxengine.parsers.scan.argument_forms import ArgumentForm, argument_forms
from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema, literal
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.parameter_json import ParameterJson
from jaxengine.parsers.scan.quoted_value import QuotedValue
from jaxengine.parsers.scan.states import StateParser

_MAX_NAME = 256
_NAME = re.compile(r"[^\s{}()<>:,\"]+")
_STRING = frozenset(("string",))
_NO_STRING = frozenset(("object", "array", "boolean", "integer", "number", "null"))


@dataclass(frozen=True)
class GemmaWords:
    """Marker words of a format: `begin` and `end` enclose a call, `quote` encloses a string."""

    begin: str
    end: str
    quote: str


GEMMA4 = GemmaWords("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaWords("<start_function_call>", "<end_function_call>", "<escape>")


def grammar(calls: CallGrammar, words: GemmaWords) -> Iterator[str]:
    """Yield Lark rules for calls, with the top rule `calls`. words: the format's. Arguments have the order of their
    schema; objects and arrays in them are JSON.

    A string is only constrained if its schema lists values. Raises ValueError for a schema with too many alternatives
    or levels, UnresolvedError for a reference that leads nowhere, and the errors of calls.json.
    """
    yield f"calls: {'call+' if calls.many else 'call'}"
    forms = [(name, form) for name, schema in calls.functions.items() for form in argument_forms(schema)]
    heads = (f"{literal(f'call:{name}{{')} first_{at}_0 {literal('}')}" for at, (name, _) in enumerate(forms))
    yield f"call: {calls.word(words.begin)} ({' | '.join(heads)}) {calls.word(words.end)}"
    for at, (_, form) in enumerate(forms):
        yield from _members(calls, words, at, form)
    if calls.token_id(words.quote) is None:
        yield f"text[suffix={literal(words.quote)}]: /(?s:.*)/"
    else:
        yield f"text: /(?s:.*)/ {calls.word(words.quote)}"


def _members(calls: CallGrammar, words: GemmaWords, at: int, form: ArgumentForm) -> Iterator[str]:
    """Yield Lark rules for the arguments of a call, by the form with the number `at`.

    The rule first_<at>_<n> holds the arguments from the n-th on if none precedes them, and rest_<at>_<n> those with a
    comma before them. Raises UnresolvedError, and the errors of calls.json.
    """
    quote = calls.word(words.quote)
    for number, name in enumerate(form.places):
        this, later = f"{at}_{number}", f"{at}_{number + 1}"
        left_out = name not in form.required
        texts, types = form.texts(name), form.types(name)
        if texts:
            yield f"value_{this}: {quote} ({' | '.join(map(literal, texts))}) {quote}"
        elif "string" in types:
            yield f"value_{this}: {quote} text"
        else:
            yield f"value_{this}: {calls.json(form.schema(name))}"
        yield f"first_{this}: {literal(name + ':')} value_{this} rest_{later}{f' | first_{later}' if left_out else ''}"
        yield f"rest_{this}: {literal(f',{name}:')} value_{this} rest_{later}{f' | rest_{later}' if left_out else ''}"
    yield f'first_{at}_{len(form.places)}: ""'
    yield f'rest_{at}_{len(form.places)}: ""'


def starts(name: str, words: GemmaWords) -> Iterator[tuple[str, ...]]:
    """Yield the one beginning of a call of the function `name`, as a word sequence for CallStarts.words."""
    yield (words.begin, "call:", name, "{")


class GemmaToolParser(StateParser):
    """Parser of the calls of one output of Gemma. functions: schemas of arguments, by function name. words: the
    format's.
    """

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema], words: GemmaWords):
        super().__init__(new_id)
        self._functions, self._words = functions, words
        self._outside = Marker(words.begin)
        # The text as written, while it is not known to be a call.
        self._held: list[str] = []
        self._call, self._brace, self._room = Opening(), Marker("{"), 0
        self._arguments: ParameterJson | None = None
        # Text of a parameter's name, or of a value without quotation words.
        self._word: list[str] = []
        self._name = ""
        self._name_end, self._plain_end = Marker(":", "}"), Marker(",", "}")
        self._string_end, self._quote, self._closing = Marker(words.quote), Opening(), Opening()
        self._nested = QuotedValue(words.quote)
        self._state = self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the part of a call's arguments that
        is read. Open arguments are not closed.
        """
        arguments = self._arguments
        if self._state == self._content:
            self._out.content(self._outside.take())
        elif self._state == self._before_name:
            self._out.content(self._words.begin + self._call.held)
        elif self._state == self._in_call_name:
            self._out.content("".join(self._held) + self._brace.take())
        elif self._state == self._after_call:
            self._out.content(self._closing.held)
        elif arguments is not None and self._state == self._in_string:
            arguments.add(self._string_end.take())
            arguments.cut_value()
        elif arguments is not None and self._state == self._before_value:
            arguments.cut_name(self._name, is_complete=True)
        elif arguments is not None and self._state == self._in_plain:
            arguments.add("".join(self._word).strip())
            arguments.cut_value()
        elif arguments is not None and self._state == self._in_nested:
            arguments.begin(self._name, _NO_STRING)
            arguments.add("".join(self._nested.json))
            arguments.cut_value()
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        """Emit content up to the opening word of a call, and skip that word. Reads `text` from `at`; returns the index
        after what it read.
        """
        plain, at, word = self._outside.read(text, at)
        self._out.content(plain)
        if word:
            self._call, self._state = Opening("call:", ":"), self._before_name
        return at

    def _before_name(self, text: str, at: int) -> int:
        """Process text before a function's name: "call:" or a colon. Other text is content, with the opening word.
        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._call.read(text, at)
        if found is not None:
            self._held, self._room = [self._words.begin, self._call.held], _MAX_NAME
            self._state = self._in_call_name
        if found is False:
            self._reject("")
        return at

    def _in_call_name(self, text: str, at: int) -> int:
        """Process a function's name, up to its brace, which starts the call; text that is not a name, or is longer than
        _MAX_NAME, is content. Reads `text` from `at`; returns the index after what it read.
        """
        plain, read, word = self._brace.read(text[at : at + self._room], 0)
        self._held.append(plain)
        self._room -= read
        if not word and self._room:
            return at + read
        name = "".join(self._held[2:]).strip()
        if word and _NAME.fullmatch(name) and name.isprintable():
            self._out.start(name)
            self._arguments = ParameterJson(self._out, self._functions.get(name), verbatim=True)
            self._held, self._word, self._state = [], [], self._in_name
        else:
            self._reject(word)
        return at + read

    def _reject(self, text: str) -> None:
        """Emit the opening word as content, and read the held text and `text`, which are no call, again as content that
        may contain calls.
        """
        begin, held = self._held[0], "".join(self._held[1:]) + text
        self._out.content(begin)
        self._held, self._state = [], self._content
        self._read(held)

    def _in_name(self, text: str, at: int) -> int:
        """Process a parameter's name, up to the colon after it, or the end of the call, which closes the arguments.
        Text before a comma is dropped. Reads `text` from `at`; returns the index after what it read.
        """
        assert self._arguments is not None
        plain, at, word = self._name_end.read(text, at)
        self._word.append(plain)
        if word == "}":
            self._arguments.end()
            self._arguments, self._closing, self._state = None, Opening(self._words.end), self._after_call
        elif word:
            name = "".join(self._word).rpartition(",")[2].strip()
            quote = self._words.quote if name.startswith(self._words.quote) else '"'
            self._name = name.removeprefix(quote).removesuffix(quote)
            self._quote, self._state = Opening(self._words.quote, "{", "["), self._before_value
        return at

    def _before_value(self, text: str, at: int) -> int:
        """Process the beginning of a value: a quotation word, a bracket, or the first character of a bare value. Reads
        `text` from `at`; returns the index after what it read.
        """
        assert self._arguments is not None
        at, found = self._quote.read(text, at)
        if found is None:
            return at
        held = self._quote.held.strip()
        types = self._arguments.declared_types(self._name)
        if not found:
            self._word, self._state = [], self._in_plain
            self._arguments.begin(self._name, types or _NO_STRING)
            self._read(held)
        elif held == self._words.quote:
            self._state = self._in_string
            self._arguments.begin(self._name, _STRING if types is None or "string" in types else types)
        else:
            self._nested, self._state = QuotedValue(self._words.quote), self._in_nested
            self._nested.read(held, 0)
        return at

    def _in_string(self, text: str, at: int) -> int:
        """Process a string, up to the quotation word after it. Reads `text` from `at`; returns the index after what it
        read.
        """
        assert self._arguments is not None
        plain, at, word = self._string_end.read(text, at)
        self._arguments.add(plain)
        if word:
            self._end_value()
        return at

    def _in_plain(self, text: str, at: int) -> int:
        """Process a value without quotation words, up to a comma or the end of the call. Reads `text` from `at`;
        returns the index after what it read.
        """
        assert self._arguments is not None
        plain, at, word = self._plain_end.read(text, at)
        self._word.append(plain)
        if word:
            self._arguments.add("".join(self._word).strip())
            self._end_value()
            self._read(word)
        return at

    def _in_nested(self, text: str, at: int) -> int:
        """Process an object or array; when complete, it is emitted as JSON. Reads `text` from `at`; returns the index
        after what it read.
        """
        assert self._arguments is not None
        at, is_complete = self._nested.read(text, at)
        if is_complete:
            self._arguments.begin(self._name, _NO_STRING)
            self._arguments.add("".join(self._nested.json))
            self._end_value()
        return at

    def _end_value(self) -> None:
        """End the value of a parameter, and expect the next name. Text before the next comma or the end of the call is
        dropped.
        """
        assert self._arguments is not None
        self._arguments.end_value(closed=True)
        self._word, self._state = [], self._in_name

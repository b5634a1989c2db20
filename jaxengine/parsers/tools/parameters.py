"""Parser of tool calls with plain-text arguments: Qwen3-Coder, Seed-OSS, MiniMax M2, GLM-4.5, DeepSeek V3.2, Kimi K3.

  <tool_call>
  <function=f>
  <parameter=city>
  Paris
  </parameter>
  </function>
  </tool_call>

The function's schema determines the type of a text, and parameter_json writes it. A section may hold several
calls, its words may be missing, and other text may be anywhere outside.

A value may contain the words of the format. Its own closing word ends it if the next parameter, the end of the call or
the end of the output follows. The closing word may be missing: then the next parameter that the function has ends it,
or the end of the call or of the section, if the next call or the end of the output follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from jaxengine.parsers.scan.argument_forms import ArgumentForm, argument_forms
from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema, literal
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.parameter_json import ParameterJson
from jaxengine.parsers.scan.states import StateParser
from jaxengine.parsers.tools.parameter_words import ParameterWords

_MAX_NAME = 256
# Types by the text after a parameter's name, for formats that state there whether its value is a string.
_STRING = frozenset(("string",))
_NO_STRING = frozenset(("object", "array", "boolean", "integer", "number", "null"))
_NAME = re.compile(r"[^\s<>{}\"]+")
# Attribute of a call that its template writes after the name.
_INDEX = '" index="'


def grammar(calls: CallGrammar, words: ParameterWords) -> Iterator[str]:
    """Yield Lark rules for calls, with the top rule `calls`. words: the format's. Arguments have the order of their
    schema.

    A string is only constrained if its schema lists values. Raises ValueError for a schema with too many alternatives
    or levels, UnresolvedError for a reference that leads nowhere, and the errors of calls.json.
    """
    line = literal("\n") if words.lines else ""
    forms = [(name, form) for name, schema in calls.functions.items() for form in argument_forms(schema)]
    one = f"({' | '.join(f'call_{at}' for at in range(len(forms)))})"
    inside = f"{one} ({line} {one})*" if calls.many else one
    if words.section is None:
        yield f"calls: {inside}"
    else:
        opening, closing = map(calls.word, words.section)
        gap = "" if words.attributes else '"\\n"'
        yield f"calls: {opening} {gap} {inside} {gap} {closing}"
    for at, (name, form) in enumerate(forms):
        # As one word, so that no name ends where a longer one goes on.
        named = (
            calls.word(name + words.call[1])
            if not words.attributes
            else (f"{literal(words.written(name) + _INDEX)} /[0-9]+/ {calls.word(words.call[1])}")
        )
        parts = [calls.word(words.call[0]), named, line]
        for number, parameter in enumerate(form.places):
            rule = f"parameter_{at}_{number}"
            parts.append(rule if parameter in form.required else f"{rule}?")
            yield from _parameter(calls, words, form, parameter, rule)
        yield f"call_{at}: {' '.join(parts)} {calls.word(words.call[2])}"
    end = words.parameter[2]
    if calls.token_id(end) is None:
        yield f"text[suffix={literal(end)}]: /(?s:.*)/"
    else:
        yield f"text: /(?s:.*)/ {calls.word(end)}"


def _parameter(calls: CallGrammar, words: ParameterWords, form: ArgumentForm, name: str, rule: str) -> Iterator[str]:
    """Yield Lark rules for the parameter `name` of a form, with the top rule `rule`: its words and a value, which is
    one of the texts that its schema lists, any text for a string, else JSON. Raises UnresolvedError, and the errors of
    calls.json.
    """
    begin, middle, end = map(calls.word, words.parameter)
    types, texts = form.types(name), form.texts(name)
    line = literal("\n") if words.lines else ""
    said = f"({' | '.join(literal(words.says + each) for each in words.said(types))})" if words.says else ""
    value = calls.word(words.value) if words.value else ""
    head = f"{begin} {literal(words.written(name))} {said} {middle} {value} {line}"
    if texts:
        yield f"{rule}: {head} ({' | '.join(literal(words.written_value(each)) for each in texts)}) {line} {end} {line}"
    elif "string" in types:
        yield f"{rule}: {head} text {line}"
    else:
        yield f"{rule}: {head} {rule}_value {line} {end} {line}"
        yield f"{rule}_value: {calls.json(form.schema(name))}"


def starts(name: str, words: ParameterWords) -> Iterator[tuple[str, ...]]:
    """Yield the beginnings of calls of the function `name`, with and without a section's word, as word sequences for
    CallStarts.words.
    """
    begin, middle, end = words.call
    # Attributes may follow the name.
    for after in (middle[:1],) if words.attributes else (middle,) if middle else (words.parameter[0], end):
        yield (begin, words.written(name), after)
        if words.section:
            yield (words.section[0], begin, words.written(name), after)


class ParameterToolParser(StateParser):
    """Parser of calls with plain-text arguments. functions: schemas of arguments, by function name; words: the
    format's.
    """

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema], words: ParameterWords):
        super().__init__(new_id)
        self._functions = functions
        self._words = words
        sections = (*(words.section or ()), *words.others)
        self._outside = Marker(words.call[0], *sections, *words.dropped)
        self._next = Opening(words.call[0])
        self._call_name = Marker(*([words.call[1]] if words.call[1] else [words.parameter[0], words.call[2]]))
        self._inside = Opening()
        self._name = Marker(words.parameter[1])
        self._before_value = Opening(words.value)
        # Of the current value, whose quotes decide.
        self._value_end = Marker(words.parameter[2])
        # The word that may end a value, and the text after it that decides.
        self._end_word, self._after_end = "", Opening()
        # The text as written, while it is not known to be a call.
        self._held = ""
        self._in_section = False
        self._word: list[str] = []
        self._room = 0
        self._arguments: ParameterJson | None = None
        self._state = self._content

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the arguments of a call as far as
        they came.
        """
        self._flush()
        return self._out.finish()

    def _flush(self) -> None:
        """Write the text that the current state holds back, as content or to the arguments of the call. They are closed
        if the text ends between parameters or after a word that may end a value, else left open.

        A word that begins another parameter does not end the value.
        """
        arguments = self._arguments
        if self._state == self._content:
            self._out.content(self._outside.take())
        elif self._state == self._section:
            self._out.content(self._held + self._next.held)
        elif self._state == self._after_call:
            self._out.content(self._next.held)
        elif self._state == self._in_call_name:
            self._out.content(self._held + "".join(self._word) + self._call_name.take())
        elif arguments is None:
            return
        elif self._state == self._between:
            arguments.end()
            self._out.content(self._inside.held)
        elif self._state in (self._in_name, self._to_value):
            arguments.cut_name(self._name_and_types()[0], self._state == self._to_value)
        elif self._state == self._after_value and self._end_word != self._words.parameter[0]:
            arguments.end_value(self._end_word in (self._words.parameter[2], self._words.quoted_end))
            arguments.end()
            self._out.content(self._after_end.held)
        else:
            is_open = self._state == self._in_value
            arguments.add(self._value_end.take() if is_open else self._end_word + self._after_end.held)
            arguments.cut_value()

    def _content(self, text: str, at: int) -> int:
        """Process text outside of calls and sections: content, until a word of the format. A call's opening word begins
        the function's name, a section's (or another spelling of it) waits for a call. A section's closing word is
        dropped if a call has opened a section, which it ends, and content otherwise. Words around an answer,
        `words.dropped`, are always dropped.

        Reads `text` from `at` to the end of the first word; returns the index after what it read. Text that may begin a
        word is held back.
        """
        plain, at, word = self._outside.read(text, at)
        self._out.content(plain)
        if word == self._words.call[0]:
            self._begin_call(word)
        elif self._words.section and word in (self._words.section[0], *self._words.others):
            self._held, self._next, self._state = word, Opening(self._words.call[0]), self._section
        elif word and word not in self._words.dropped:
            self._out.content("" if self._in_section else word)
            self._in_section = False
        return at

    def _section(self, text: str, at: int) -> int:
        """Process text after the word that begins a section. Unless a call follows, that word is content.

        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._next.read(text, at)
        if found:
            self._begin_call(self._held + self._next.held)
        elif found is False:
            self._out.content(self._held)
            self._state = self._content
            self._content(self._next.held, 0)
        return at

    def _begin_call(self, held: str) -> None:
        """Enter a function's name. held: the text before it, which is content if no call follows."""
        self._held, self._word, self._room, self._state = held, [], _MAX_NAME, self._in_call_name

    def _in_call_name(self, text: str, at: int) -> int:
        """Process a function's name, which starts the call when it ends; text that is not a name, or is longer than
        _MAX_NAME, is content. Reads `text` from `at`; returns the index after what it read.
        """
        plain, read, word = self._call_name.read(text[at : at + self._room], 0)
        self._word.append(plain)
        self._room -= read
        if not word and self._room:
            return at + read
        written = "".join(self._word)
        name = self._words.read(written.strip())
        if word and _NAME.fullmatch(name) and name.isprintable():
            self._out.start(name)
            self._in_section = True
            self._open_call(name, word)
        else:
            self._out.content(self._held + written + word)
            self._state = self._content
            self._content(self._call_name.take(), 0)
        return at + read

    def _open_call(self, name: str, word: str) -> None:
        """Enter the arguments of a call of the function `name`. word: the word that ended the name."""
        self._arguments = ParameterJson(self._out, self._functions.get(name), self._words.verbatim)
        self._next_part(word)

    def _leave_call(self) -> None:
        """Enter the state after a call's closing word: that of content or, in a format with sections, one in which the
        next call or the section's end may follow.
        """
        self._state = self._content
        if self._words.section:
            self._next, self._state = Opening(self._words.call[0], self._words.section[1]), self._after_call

    def _end_call(self) -> None:
        """Close the call's arguments, and return to the state outside of calls."""
        assert self._arguments is not None
        self._arguments.end()
        self._arguments, self._state = None, self._content

    def _next_part(self, word: str) -> None:
        """Enter the state inside a call that follows `word`.

        word: the word before a parameter's name, or the closing word of the call, which ends it; after any other word,
        and after "", one of these two must follow.
        """
        if word == self._words.parameter[0]:
            self._word, self._state = [], self._in_name
        elif word == self._words.call[2]:
            self._end_call()
            self._leave_call()
        else:
            self._inside, self._state = Opening(self._words.parameter[0], self._words.call[2]), self._between

    def _after_call(self, text: str, at: int) -> int:
        """Process text after a call. White space before the next call, or before the end of the section, is dropped;
        before other text it is content, too.

        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._next.read(text, at)
        if found is not None:
            self._state = self._content
        if found is False:
            self._content(self._next.held, 0)
        elif found:
            self._content(self._next.held.lstrip(), 0)
        return at

    def _between(self, text: str, at: int) -> int:
        """Process text before a parameter or the end of the call. Other text ends the call too, and is content.

        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._inside.read(text, at)
        if found:
            self._next_part(self._inside.held.lstrip())
        elif found is False:  # neither: the call ends here
            self._end_call()
            self._content(self._inside.held, 0)
        return at

    def _in_name(self, text: str, at: int) -> int:
        """Process a parameter's name, up to the word that ends it. Reads `text` from `at`; returns the index after what
        it read.
        """
        plain, at, word = self._name.read(text, at)
        self._word.append(plain)
        if word:
            before = self._words.value or (self._words.quotes or ("",))[0]
            self._before_value = Opening(before)
            self._state = self._to_value if before else self._in_value
            if self._state == self._in_value:
                self._begin_value()
        return at

    def _to_value(self, text: str, at: int) -> int:
        """Process text between a parameter's name and the word before its value. Without that word the value begins
        anyway.

        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._before_value.read(text, at)
        if found is None:
            return at
        self._begin_value(quoted=found and self._words.quotes is not None)
        if not found:
            self._read(self._before_value.held)
        return at

    def _begin_value(self, quoted: bool = False) -> None:
        """Begin the value of the parameter whose name was read last. quoted: whether it stands in quotes; line
        breaks around it are then part of it, and character references are not read.
        """
        assert self._arguments is not None
        references = self._words.references and not quoted
        self._arguments.begin(*self._name_and_types(), verbatim=quoted, references=references)
        self._value_end = Marker(*([self._words.quoted_end] if quoted else self._words.value_ends))
        self._state = self._in_value

    def _name_and_types(self) -> tuple[str, frozenset[str] | None]:
        """Return the name of the current parameter, and the JSON types that the format states for its value; None if it
        states none, or if the function's schema contradicts it: no string where it has a string only, or a string where
        it has none.
        """
        if not self._words.says:
            return "".join(self._word).strip(), None
        name, _, said = "".join(self._word).strip().partition(self._words.says)
        name = self._words.read(name.partition('"')[0])
        stated = {"": None, "true": _STRING, "string": _STRING}.get(said, _NO_STRING)
        declared = self._arguments.declared_types(name) if self._arguments else None
        agrees = declared is None or ("string" in declared if stated == _STRING else declared != _STRING)
        return name, stated if agrees else None

    def _in_value(self, text: str, at: int) -> int:
        """Process a value, up to a word that may end it; the beginning of a parameter does so if the function's
        parameters are unknown. Reads `text` from `at`; returns the index after what it read.
        """
        assert self._arguments is not None
        plain, at, word = self._value_end.read(text, at)
        self._arguments.add(plain)
        if word:
            names = self._arguments.may_be_next
            following = self._words.may_follow(word, names or ())
            self._end_word, self._after_end, self._state = word, Opening(*following), self._after_value
            if word == self._words.parameter[0] and names is None:
                self._turn_from_value()
        return at

    def _after_value(self, text: str, at: int) -> int:
        """Process text after a word that ends the value if one of `may_follow` comes next, and is part of the value
        otherwise.

        Reads `text` from `at`; returns the index after what it read.
        """
        assert self._arguments is not None
        at, found = self._after_end.read(text, at)
        if found:
            self._turn_from_value()
        elif found is False:
            self._state = self._in_value
            self._arguments.add(self._end_word)
            self._read(self._after_end.held)
        return at

    def _turn_from_value(self) -> None:
        """End the value with the word in `_end_word`, enter the next state, and read the text that was held after that
        word.
        """
        assert self._arguments is not None
        is_closed = self._end_word in (self._words.parameter[2], self._words.quoted_end)
        self._arguments.end_value(is_closed)
        if self._end_word == (self._words.section or ("", ""))[1]:
            self._end_call()
            self._in_section = False
        else:
            self._next_part("" if is_closed else self._end_word)
        self._read(self._after_end.held)

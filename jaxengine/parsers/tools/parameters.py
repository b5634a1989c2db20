"""Parser of tool calls with plain-text arguments: Qwen3-Coder, Seed-OSS, MiniMax M2, GLM-4.5, DeepSeek V3.2 and V4.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema, literal
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.markers import Marker, Opening
from jaxengine.parsers.scan.states import StateParser
from jaxengine.parsers.tools.argument_forms import ArgumentForm, argument_forms
from jaxengine.parsers.tools.parameter_json import ParameterJson

_MAX_NAME = 256
# Types by the text after a parameter's name, for formats that state there whether its value is a string.
_STRING = frozenset(("string",))
_NO_STRING = frozenset(("object", "array", "boolean", "integer", "number", "null"))
_NAME = re.compile(r"[^\s<>{}\"]+")
_SAYS_STRING = '" string="'


@dataclass(frozen=True)
class ParameterWords:
    """Marker words of a format.

    Attributes:
      section: words around calls; None if there are none. others: alternative spellings of the first one.
      call, parameter: words before the name, between name and content, and after the content. A call's second word may
        be "" if the next word ends its name.
      value: word before a value, if the name has its own closing word.
      lines: words and values are on separate lines.
      says_string: a parameter's name is followed by whether its value is a string.
      verbatim: a line break at the beginning of a value is part of it; otherwise it belongs to the format, as does one
        at the end of the same value.
    """

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    section: tuple[str, str] | None = None
    value: str = ""
    lines: bool = False
    says_string: bool = False
    verbatim: bool = False
    others: tuple[str, ...] = ()

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Words that may end a value: a parameter's closing word, a call's, the word that begins a parameter, and a
        section's closing word.
        """
        return (self.parameter[2], self.call[2], self.parameter[0], *(self.section or ())[1:])

    def may_follow(self, end: str, names: Iterable[str]) -> Sequence[str | tuple[str, ...]]:
        """Return the words, or sequences of words, of which one must follow `end` for `end` to end a value. The end of
        the output may follow too.

        end: one of `value_ends`. names: parameters that may be next.
        """
        if end == self.parameter[0]:
            after = (_SAYS_STRING,) if self.says_string else (self.parameter[1], *filter(None, [self.value]))
            return [(name, *after) for name in names]
        if end == self.parameter[2]:
            return [self.parameter[0], self.call[2], *(self.section or ())[1:]]
        begins = [self.call[0], *(self.section or ())[:1]]
        return [*begins, *(self.section or ())[1:]] if end == self.call[2] else begins


_FUNCTION = ("<function=", ">", "</function>")
_PARAMETER = ("<parameter=", ">", "</parameter>")
QWEN3_CODER = ParameterWords(_FUNCTION, _PARAMETER, ("<tool_call>", "</tool_call>"), lines=True)
SEED_OSS = ParameterWords(_FUNCTION, _PARAMETER, ("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX_M2 = ParameterWords(
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    verbatim=True,
)
DEEPSEEK_V32 = ParameterWords(
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>"),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    says_string=True,
    verbatim=True,
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    others=("<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
)
DEEPSEEK_V41 = replace(
    DEEPSEEK_V32,
    call=('<｜DSML｜ invoke name="', '">', "</｜DSML｜ invoke>"),
    parameter=('<｜DSML｜ parameter name="', '">', "</｜DSML｜ parameter>"),
    section=("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
)
MIMO = replace(QWEN3_CODER, lines=False, verbatim=True)
DOTS = replace(MINIMAX_M2, section=("<dots_function_call>", "</dots_function_call>"))
GLM45 = ParameterWords(
    ("<tool_call>", "", "</tool_call>"),
    ("<arg_key>", "</arg_key>", "</arg_value>"),
    value="<arg_value>",
    verbatim=True,
)
STEP3 = ParameterWords(
    ('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">', "</steptml:invoke><｜tool_call_end｜>"),
    ('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
)
K2_HORIZON = ParameterWords(
    ("<ifm|tool_call>", "", "</ifm|tool_call>"),
    ("<ifm|arg_key>", "</ifm|arg_key>", "</ifm|arg_value>"),
    ("<ifm|tool_calls>", "</ifm|tool_calls>"),
    value="<ifm|arg_value>",
    verbatim=True,
)
HY_V3 = replace(GLM45, call=("<tool_call>", "<tool_sep>", "</tool_call>"), section=("<tool_calls>", "</tool_calls>"))


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
        yield f'calls: {opening} "\\n" {inside} "\\n" {closing}'
    for at, (name, form) in enumerate(forms):
        parts = [calls.word(words.call[0]), literal(name + words.call[1]), line]
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
    """Yield Lark rules for the parameter `name` of a form, with the top rule `rule`. Raises UnresolvedError, and the
    errors of calls.json.
    """
    begin, middle, end = map(calls.word, words.parameter)
    types, texts = form.types(name), form.texts(name)
    line = literal("\n") if words.lines else ""
    said = literal(f"{_SAYS_STRING}{'true' if 'string' in types else 'false'}") if words.says_string else ""
    head = f"{begin} {literal(name)} {said} {middle} {calls.word(words.value) if words.value else ''} {line}"
    if texts:
        yield f"{rule}: {head} ({' | '.join(map(literal, texts))}) {line} {end} {line}"
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
    for after in (middle,) if middle else (words.parameter[0], end):
        yield (begin, name, after)
        if words.section:
            yield (words.section[0], begin, name, after)


class ParameterToolParser(StateParser):
    """Parser of calls with plain-text arguments. functions: schemas of arguments, by function name; words: the
    format's.
    """

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema], words: ParameterWords):
        super().__init__(new_id)
        self._functions = functions
        self._words = words
        sections = (*(words.section or ()), *words.others)
        self._outside = Marker(words.call[0], *sections)
        self._next = Opening(words.call[0])
        self._call_name = Marker(*([words.call[1]] if words.call[1] else [words.parameter[0], words.call[2]]))
        self._inside = Opening()
        self._name = Marker(words.parameter[1])
        self._before_value = Opening(words.value)
        self._value_end = Marker(*words.value_ends)
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
        if self._state == self._content:
            self._out.content(self._outside.take())
        elif self._state == self._section:
            self._out.content(self._held + self._next.held)
        elif self._state == self._after_call:
            self._out.content(self._next.held)
        elif self._state == self._in_call_name:
            self._out.content(self._held + "".join(self._word) + self._call_name.take())
        elif self._arguments is not None:
            self._cut_call(self._arguments)
        return self._out.finish()

    def _cut_call(self, arguments: ParameterJson) -> None:
        """Emit the arguments of a call in which the output ends: closed if the output ends between parameters or after
        a word that may end a value, else left open.

        A word that begins another parameter does not end the value.
        """
        if self._state == self._between:
            arguments.end()
            self._out.content(self._inside.held)
        elif self._state in (self._in_name, self._to_value):
            arguments.cut_name(self._name_and_types()[0], self._state == self._to_value)
        elif self._state == self._after_value and self._end_word != self._words.parameter[0]:
            arguments.end_value(self._end_word == self._words.parameter[2])
            arguments.end()
            self._out.content(self._after_end.held)
        else:
            is_open = self._state == self._in_value
            arguments.add(self._value_end.take() if is_open else self._end_word + self._after_end.held)
            arguments.cut_value()

    def _content(self, text: str, at: int) -> int:
        """Process text outside of calls and sections: content, until an opening word. A section's closing word is
        dropped if a section is open, and content otherwise. Reads `text` from the index `at`; returns the index after
        the last character read.
        """
        plain, at, word = self._outside.read(text, at)
        self._out.content(plain)
        if word == self._words.call[0]:
            self._begin_call(word)
        elif self._words.section and word in (self._words.section[0], *self._words.others):
            self._held, self._next, self._state = word, Opening(self._words.call[0]), self._section
        elif word and self._in_section:
            self._in_section = False
        elif word:
            self._out.content(word)
        return at

    def _section(self, text: str, at: int) -> int:
        """Process text after the word that begins a section. Unless a call follows, that word is content.

        Reads `text` from the index `at`; returns the index after the last character read.
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
        _MAX_NAME, is content. Reads `text` from the index `at`; returns the index after the last character read.
        """
        plain, read, word = self._call_name.read(text[at : at + self._room], 0)
        self._word.append(plain)
        self._room -= read
        if not word and self._room:
            return at + read
        written = "".join(self._word)
        name = written.strip()
        if word and _NAME.fullmatch(name) and name.isprintable():
            self._out.start(name)
            self._arguments = ParameterJson(self._out, self._functions.get(name), self._words.verbatim)
            self._in_section = True
            self._next_part(word)
        else:
            self._out.content(self._held + written + word)
            self._state = self._content
            self._content(self._call_name.take(), 0)
        return at + read

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
            if self._words.section:
                self._next, self._state = Opening(self._words.call[0], self._words.section[1]), self._after_call
        else:
            self._inside, self._state = Opening(self._words.parameter[0], self._words.call[2]), self._between

    def _after_call(self, text: str, at: int) -> int:
        """Process text after a call. White space before the next call, or before the end of the section, is dropped;
        before other text it is content, too.

        Reads `text` from the index `at`; returns the index after the last character read.
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

        Reads `text` from the index `at`; returns the index after the last character read.
        """
        at, found = self._inside.read(text, at)
        if found:
            self._next_part(self._inside.held.lstrip())
        elif found is False:  # neither: the call ends here
            self._end_call()
            self._content(self._inside.held, 0)
        return at

    def _in_name(self, text: str, at: int) -> int:
        """Process a parameter's name, up to the word that ends it. Reads `text` from the index `at`; returns the index
        after the last character read.
        """
        plain, at, word = self._name.read(text, at)
        self._word.append(plain)
        if word:
            self._before_value = Opening(self._words.value)
            self._state = self._to_value if self._words.value else self._in_value
            if self._state == self._in_value:
                self._begin_value()
        return at

    def _to_value(self, text: str, at: int) -> int:
        """Process text between a parameter's name and the word before its value. Without that word the value begins
        anyway.

        Reads `text` from the index `at`; returns the index after the last character read.
        """
        at, found = self._before_value.read(text, at)
        if found is None:
            return at
        self._begin_value()
        if not found:
            self._read(self._before_value.held)
        return at

    def _begin_value(self) -> None:
        """Begin the value of the parameter whose name was read last."""
        assert self._arguments is not None
        self._arguments.begin(*self._name_and_types())
        self._state = self._in_value

    def _name_and_types(self) -> tuple[str, frozenset[str] | None]:
        """Return the name of the current parameter, and the JSON types that the format states for its value; None if it
        states none, or if the function's schema contradicts it: no string where it has a string only, or a string where
        it has none.
        """
        name, _, says_string = "".join(self._word).strip().partition(_SAYS_STRING)
        if not self._words.says_string:
            return "".join(self._word).strip(), None
        name = name.partition('"')[0]
        stated = {"": None, "true": _STRING}.get(says_string, _NO_STRING)
        declared = self._arguments.declared_types(name) if self._arguments else None
        agrees = declared is None or ("string" in declared if stated == _STRING else declared != _STRING)
        return name, stated if agrees else None

    def _in_value(self, text: str, at: int) -> int:
        """Process a value, up to a word that may end it. Reads `text` from the index `at`; returns the index after the
        last character read.
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

        Reads `text` from the index `at`; returns the index after the last character read.
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
        is_closed = self._end_word == self._words.parameter[2]
        self._arguments.end_value(is_closed)
        if self._end_word == (self._words.section or ("", ""))[1]:
            self._end_call()
            self._in_section = False
        else:
            self._next_part("" if is_closed else self._end_word)
        self._read(self._after_end.held)

"""Parser of tool calls with plain-text arguments: Qwen3-Coder, Seed-OSS, MiniMax M2, GLM-4.5, DeepSeek V3.2.

  <tool_call>
  <function=f>
  <parameter=city>
  Paris
  </parameter>
  </function>
  </tool_call>

The function's schema determines the type of a text (typed_text). A string is emitted as it arrives, other values when
complete. A section may hold several calls, its words may be missing, and other text may be anywhere outside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxengine.parsers.argument_forms import ArgumentForm, argument_forms
from jaxengine.parsers.call_grammar import CallGrammar, Schema, literal
from jaxengine.parsers.events import Event
from jaxengine.parsers.markers import Marker, Opening
from jaxengine.parsers.states import StateParser
from jaxengine.parsers.typed_text import as_json, types_of
from jaxengine.schema_references import SchemaDocument

_MAX_NAME = 256
# Types by the text after a parameter's name, for formats that state there whether its value is a string.
_STRING = frozenset(("string",))
_NO_STRING = frozenset(("object", "array", "boolean", "integer", "number", "null"))
_NAME = re.compile(r"[^\s<>{}\"]+")
_SAYS_STRING = '" string="'


@dataclass(frozen=True)
class ParameterWords:
    """The words of a format.

    Attributes:
      section: words around calls; None if there are none.
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


_FUNCTION = ("<function=", ">", "</function>")
_PARAMETER = ("<parameter=", ">", "</parameter>")
QWEN3_CODER = ParameterWords(_FUNCTION, _PARAMETER, ("<tool_call>", "</tool_call>"), lines=True)
SEED_OSS = ParameterWords(_FUNCTION, _PARAMETER, ("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX_M2 = ParameterWords(
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)
DEEPSEEK_V32 = ParameterWords(
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>"),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    says_string=True,
    verbatim=True,
)
GLM45 = ParameterWords(
    ("<tool_call>", "", "</tool_call>"),
    ("<arg_key>", "</arg_key>", "</arg_value>"),
    value="<arg_value>",
    verbatim=True,
)


def grammar(calls: CallGrammar, words: ParameterWords) -> Iterator[str]:
    """Yields rules, with the top rule `calls`. Arguments have the order of their schema.

    A string is only constrained if its schema lists values.
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


class ParameterToolParser(StateParser):
    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema], words: ParameterWords):
        super().__init__(new_id)
        self._functions = functions
        self._words = words
        sections = words.section or ()
        self._outside = Marker(words.call[0], *sections)
        self._next = Opening(words.call[0])
        self._call_name = Marker(*([words.call[1]] if words.call[1] else [words.parameter[0], words.call[2]]))
        self._inside = self._new_inside()
        self._name = Marker(words.parameter[1])
        self._before_value = Opening(words.value)
        self._value_end = Marker(words.parameter[2], words.call[2])
        # The text as written, while it is not known to be a call.
        self._held = ""
        self._in_section = False
        self._word: list[str] = []
        self._room = 0
        self._schema = SchemaDocument(None)
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._begins = self._own_line = False
        self._state = self._content

    def finish(self) -> list[Event]:
        if self._state == self._content:
            self._out.content(self._outside.take())
        elif self._state == self._section:
            self._out.content(self._held + self._next.held)
        elif self._state == self._after_call:
            self._out.content(self._next.held)
        elif self._state == self._in_call_name:
            self._out.content(self._held + "".join(self._word) + self._call_name.take())
        elif self._state == self._between:
            self._out.arguments("}")
            self._out.content(self._inside.held)
        elif self._state == self._in_name:
            self._out.arguments(self._name_json().removesuffix('"'))
        elif self._state == self._to_value:
            self._out.arguments(self._name_json())
        elif self._state == self._in_value:
            self._add(self._value_end.take())
            self._out.arguments(self._without_line("".join(self._value)) if self._types != _STRING else "")
        return self._out.finish()

    def _content(self, text: str, at: int) -> int:
        plain, at, word = self._outside.read(text, at)
        self._out.content(plain)
        if word == self._words.call[0]:
            self._begin_call(word)
        elif self._words.section and word == self._words.section[0]:
            self._held, self._next, self._state = word, Opening(self._words.call[0]), self._section
        elif word and self._in_section:
            self._in_section = False
        elif word:
            self._out.content(word)
        return at

    def _section(self, text: str, at: int) -> int:
        """State after the word that begins a section."""
        at, found = self._next.read(text, at)
        if found:
            self._begin_call(self._held + self._next.held)
        elif found is False:
            self._out.content(self._held)
            self._state = self._content
            self._content(self._next.held, 0)
        return at

    def _begin_call(self, held: str) -> None:
        self._held, self._word, self._room, self._state = held, [], _MAX_NAME, self._in_call_name

    def _in_call_name(self, text: str, at: int) -> int:
        plain, read, word = self._call_name.read(text[at : at + self._room], 0)
        self._word.append(plain)
        self._room -= read
        if not word and self._room:
            return at + read
        written = "".join(self._word)
        name = written.strip()
        if word and _NAME.fullmatch(name) and name.isprintable():
            self._out.start(name)
            self._out.arguments("{")
            self._schema = SchemaDocument(self._functions.get(name))
            self._num_parameters, self._in_section = 0, True
            self._next_part(word)
        else:
            self._out.content(self._held + written + word)
            self._state = self._content
            self._content(self._call_name.take(), 0)
        return at + read

    def _new_inside(self) -> Opening:
        return Opening(self._words.parameter[0], self._words.call[2])

    def _next_part(self, word: str) -> None:
        """Selects the state inside a call, after one of its words."""
        if word == self._words.parameter[0]:
            self._word, self._state = [], self._in_name
        elif word == self._words.call[2]:
            self._out.arguments("}")
            self._state = self._content
            if self._words.section:
                self._next, self._state = Opening(self._words.call[0], self._words.section[1]), self._after_call
        else:
            self._inside, self._state = self._new_inside(), self._between

    def _after_call(self, text: str, at: int) -> int:
        """State after a call. White space before the next call, or before the end of the section, is dropped."""
        at, found = self._next.read(text, at)
        if found is not None:
            self._state = self._content
        if found is False:
            self._content(self._next.held, 0)
        elif found:
            self._content(self._next.held.lstrip(), 0)
        return at

    def _between(self, text: str, at: int) -> int:
        """State before a parameter or the end of the call."""
        at, found = self._inside.read(text, at)
        if found:
            self._next_part(self._inside.held.lstrip())
        elif found is False:  # neither: the call ends here
            self._out.arguments("}")
            self._state = self._content
            self._content(self._inside.held, 0)
        return at

    def _in_name(self, text: str, at: int) -> int:
        plain, at, word = self._name.read(text, at)
        self._word.append(plain)
        if word:
            self._before_value = Opening(self._words.value)
            self._state = self._to_value if self._words.value else self._in_value
            if self._state == self._in_value:
                self._begin_value()
        return at

    def _to_value(self, text: str, at: int) -> int:
        """State between a name and its value."""
        at, found = self._before_value.read(text, at)
        if found is None:
            return at
        self._begin_value()
        if not found:
            self._in_value(self._before_value.held, 0)
        return at

    def _begin_value(self) -> None:
        name, _, says_string = "".join(self._word).strip().partition(_SAYS_STRING)
        self._types = types_of(self._schema, name)
        if self._words.says_string and says_string:
            self._types = _STRING if says_string == "true" else _NO_STRING
        self._out.arguments(f"{self._name_json()}: ")
        self._num_parameters += 1
        if self._types == _STRING:
            self._out.arguments('"')
        self._value, self._begins, self._own_line, self._state = [], True, False, self._in_value

    def _name_json(self) -> str:
        name = "".join(self._word).strip()
        name = name.partition('"')[0] if self._words.says_string else name
        return f"{', ' if self._num_parameters else ''}{json.dumps(name, ensure_ascii=False)}"

    def _in_value(self, text: str, at: int) -> int:
        plain, at, word = self._value_end.read(text, at)
        self._add(plain)
        if word:
            held = self._without_line("".join(self._value))
            self._out.arguments(_escaped(held) + '"' if self._types == _STRING else as_json(held, self._types))
            self._next_part(word if word == self._words.call[2] else "")
        return at

    def _add(self, text: str) -> None:
        """Adds text to the current value; emits it if the value is a string."""
        if not text:
            return
        if self._begins:
            self._begins, self._own_line = False, text.startswith("\n") and not self._words.verbatim
            text = text[self._own_line :]
        self._value.append(text)
        if self._types == _STRING:
            said = "".join(self._value)
            now = self._without_line(said)
            self._out.arguments(_escaped(now))
            self._value = [said[len(now) :]]

    def _without_line(self, text: str) -> str:
        """Removes the line break at the end of a value if it belongs to the format."""
        return text.removesuffix("\n") if self._own_line else text


def _escaped(text: str) -> str:
    """Escapes text for use within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

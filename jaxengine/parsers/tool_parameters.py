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

A value may contain the words of the format. Its own closing word ends it if the next parameter, the end of the call or
the end of the output follows. The closing word may be missing: then the next parameter that the function has ends it,
or the end of the call or of the section, if the next call or the end of the output follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxengine.parsers.call_grammar import CallGrammar, Schema, definitions, literal
from jaxengine.parsers.events import Event
from jaxengine.parsers.markers import Marker, Opening
from jaxengine.parsers.states import StateParser
from jaxengine.parsers.typed_text import as_json, types_of

_MAX_NAME = 256
# Types by the text after a parameter's name, for formats that state there whether its value is a string.
_STRING = frozenset(("string",))
_OBJECT = frozenset(("object",))
_NO_STRING = frozenset(("object", "array", "boolean", "integer", "number", "null"))
_NAME = re.compile(r"[^\s<>{}\"]+")
_SAYS_STRING = '" string="'
# Parameters in which a model may put all arguments as an object, although the function has no parameter of that name.
_WRAPPERS = ("arguments", "input")


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

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The words that may end a value."""
        return (self.parameter[2], self.call[2], self.parameter[0], *(self.section or ())[1:])

    def may_follow(self, end: str, names: Iterable[str]) -> Sequence[str | tuple[str, ...]]:
        """Returns what must follow one of `value_ends` that does end a value; [] if anything may.

        names: the parameters that may be next, empty if unknown.
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
    one = f"({' | '.join(f'call_{at}' for at in range(len(calls.functions)))})"
    inside = f"{one} ({line} {one})*" if calls.many else one
    if words.section is None:
        yield f"calls: {inside}"
    else:
        opening, closing = map(calls.word, words.section)
        yield f'calls: {opening} "\\n" {inside} "\\n" {closing}'
    for at, (name, schema) in enumerate(calls.functions.items()):
        properties = dict(schema.get("properties") or {})
        parts = [calls.word(words.call[0]), literal(name + words.call[1]), line]
        for number, parameter in enumerate(properties):
            rule = f"parameter_{at}_{number}"
            parts.append(rule if parameter in schema.get("required", ()) else f"{rule}?")
            yield from _parameter(calls, words, schema, parameter, rule)
        yield f"call_{at}: {' '.join(parts)} {calls.word(words.call[2])}"
    end = words.parameter[2]
    if calls.token_id(end) is None:
        yield f"text[suffix={literal(end)}]: /(?s:.*)/"
    else:
        yield f"text: /(?s:.*)/ {calls.word(end)}"


def _parameter(calls: CallGrammar, words: ParameterWords, function: Schema, name: str, rule: str) -> Iterator[str]:
    begin, middle, end = map(calls.word, words.parameter)
    types, schema = types_of(function, name), function["properties"][name]
    line = literal("\n") if words.lines else ""
    said = literal(f"{_SAYS_STRING}{'true' if 'string' in types else 'false'}") if words.says_string else ""
    head = f"{begin} {literal(name)} {said} {middle} {calls.word(words.value) if words.value else ''} {line}"
    listed = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(listed, list) and listed and all(isinstance(each, str) and each for each in listed):
        yield f"{rule}: {head} ({' | '.join(map(literal, listed))}) {line} {end} {line}"
    elif "string" in types:
        yield f"{rule}: {head} text {line}"
    else:
        yield f"{rule}: {head} {rule}_value {line} {end} {line}"
        yield f"{rule}_value: {calls.json({**schema, **definitions(function)})}"


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
        self._value_end = Marker(*words.value_ends)
        # The word that may end a value, and the text after it that decides.
        self._end_word, self._after_end = "", Opening()
        # The text as written, while it is not known to be a call.
        self._held = ""
        self._in_section = False
        self._word: list[str] = []
        self._room = 0
        self._schema: Schema | None = None
        self._names: set[str] = set()
        # The value of a parameter that may be a wrapper around all arguments; None if there is none.
        self._wrapped: str | None = None
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._begins = self._own_line = self._is_wrapper = False
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
            self._end_arguments()
            self._out.content(self._inside.held)
        elif self._state == self._in_name:
            self._spell_wrapped()
            self._out.arguments(self._name_json().removesuffix('"'))
        elif self._state == self._to_value:
            self._spell_wrapped()
            self._out.arguments(self._name_json())
        elif self._state in (self._in_value, self._after_value):
            self._cut_value()
        return self._out.finish()

    def _cut_value(self) -> None:
        """Ends an output that ends in a value, or after a word that may end one."""
        if self._state == self._after_value and self._end_word != self._words.parameter[0]:
            self._end_value()
            self._end_arguments()
            self._out.content(self._after_end.held)
            return
        self._add(self._end_word + self._after_end.held if self._state == self._after_value else self._value_end.take())
        text = _without_breaks("".join(self._value), self._own_line)
        if self._is_wrapper:
            (name,) = self._names
            self._out.arguments(f"{json.dumps(name)}: ")
        self._out.arguments(_escaped(text) if self._is_streamed else text)

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
            self._schema, self._names, self._in_section = self._functions.get(name), set(), True
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
            self._end_arguments()
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
            self._end_arguments()
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
            self._replay(self._before_value.held)
        return at

    def _begin_value(self) -> None:
        self._spell_wrapped()
        name, _, says_string = "".join(self._word).strip().partition(_SAYS_STRING)
        self._types = types_of(self._schema, name)
        if self._words.says_string and says_string:
            self._types = _STRING if says_string == "true" else _NO_STRING
        properties = self._properties()
        self._is_wrapper = name in _WRAPPERS and bool(properties) and name not in properties and not self._names
        if not self._is_wrapper:
            self._out.arguments(f"{self._name_json()}: " + ('"' if self._is_streamed else ""))
        self._names.add(name)
        self._value, self._begins, self._own_line, self._state = [], True, False, self._in_value

    @property
    def _is_streamed(self) -> bool:
        return self._types == _STRING and not self._is_wrapper

    def _properties(self) -> Schema:
        properties = (self._schema or {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _name_json(self) -> str:
        name = "".join(self._word).strip()
        name = name.partition('"')[0] if self._words.says_string else name
        return f"{', ' if self._names else ''}{json.dumps(name, ensure_ascii=False)}"

    def _in_value(self, text: str, at: int) -> int:
        plain, at, word = self._value_end.read(text, at)
        self._add(plain)
        if not word:
            return at
        following = self._words.may_follow(word, self._properties().keys() - self._names)
        self._end_word, self._after_end, self._state = word, Opening(*following), self._after_value
        if word == self._words.parameter[0] and not self._properties():
            self._turn_from_value()
        return at

    def _after_value(self, text: str, at: int) -> int:
        """State after a word that ends the value if something certain follows, and is part of the value otherwise."""
        at, found = self._after_end.read(text, at)
        if found:
            self._turn_from_value()
        elif found is False:
            self._state = self._in_value
            self._add(self._end_word)
            self._replay(self._after_end.held)
        return at

    def _turn_from_value(self) -> None:
        """Ends the value and reads on after its end."""
        self._end_value()
        if self._end_word == (self._words.section or ("", ""))[1]:
            self._end_arguments()
            self._in_section, self._state = False, self._content
        else:
            self._next_part(self._end_word if self._end_word != self._words.parameter[2] else "")
        self._replay(self._after_end.held)

    def _end_value(self) -> None:
        # Where the closing word is missing, the line break after it follows the value.
        missing = self._end_word != self._words.parameter[2]
        held = _without_breaks("".join(self._value), self._own_line + missing)
        if self._is_wrapper:
            self._wrapped = held
        else:
            self._out.arguments(_escaped(held) + '"' if self._is_streamed else as_json(held, self._types))

    def _end_arguments(self) -> None:
        """Ends the arguments of a call. A wrapper that is the only one stands for what it contains."""
        if self._wrapped is not None:
            inner = as_json(self._wrapped.strip(), _OBJECT)
            if inner.startswith("{") and json.loads(inner).keys() <= self._properties().keys():
                self._wrapped = None
                self._out.arguments(inner[1:-1])
        self._spell_wrapped()
        self._out.arguments("}")

    def _spell_wrapped(self) -> None:
        """Emits the value of a parameter that turned out to be no wrapper."""
        if self._wrapped is not None:
            (name,) = self._names
            self._out.arguments(f"{json.dumps(name)}: {as_json(self._wrapped, self._types)}")
            self._wrapped = None

    def _replay(self, text: str) -> None:
        """Reads text that was held."""
        at = 0
        while at < len(text):
            at = self._state(text, at)

    def _add(self, text: str) -> None:
        """Adds text to the current value; emits it if the value is a string, except for line breaks at its end that may
        belong to the format.
        """
        if not text:
            return
        if self._begins:
            self._begins, self._own_line = False, text.startswith("\n") and not self._words.verbatim
            text = text[self._own_line :]
        self._value.append(text)
        if self._is_streamed:
            said = "".join(self._value)
            now = _without_breaks(said, 2)
            self._out.arguments(_escaped(now))
            self._value = [said[len(now) :]]


def _without_breaks(text: str, most: int) -> str:
    """Removes up to `most` line breaks from the end of a text."""
    for _ in range(most):
        text = text.removesuffix("\n")
    return text


def _escaped(text: str) -> str:
    """Escapes text for use within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

"""Writer of the arguments of one call as JSON, from parameters whose values are plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Set as AbstractSet

from jaxengine.parsers.scan.call_grammar import Schema
from jaxengine.parsers.scan.events import Collector
from jaxengine.parsers.scan.typed_text import as_json, types_of
from jaxengine.schema_references import SchemaDocument, mapping

_STRING = frozenset(("string",))
_OBJECT = frozenset(("object",))
# Parameters in which a model may put all arguments as an object, although the function has no parameter of that name.
_WRAPPERS = ("arguments", "input", "properties")
# References to characters in XML, and the beginning of one at the end of a text.
_REFERENCE = re.compile(r"&(?:(lt|gt|amp|quot|apos)|#([0-9]{1,7})|#x([0-9A-Fa-f]{1,6}));")
_OPEN_REFERENCE = re.compile(r"&#?[0-9A-Za-z]{0,8}$")
_ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


class ParameterJson:
    """Writer of arguments to `out`. A string is written as it arrives, any other value when it is complete.

    schema: of the function's arguments, None if unknown. verbatim: a line break at the beginning of a value is part of
    it; otherwise it belongs to the format, as does one at the end of the same value.
    """

    def __init__(self, out: Collector, schema: Schema | None, verbatim: bool):
        """Store the names of the schema's parameters, none without a schema, and write the opening brace to `out`."""
        self._out = out
        self._schema = SchemaDocument(schema)
        rules = self._schema.applicable(self._schema.root)
        self._properties = {name for each in rules for name in mapping(each.schema, "properties")}
        self._verbatim = verbatim
        self._names: set[str] = set()
        # The value of a parameter that may be a wrapper around all arguments; None if there is none.
        self._wrapped: str | None = None
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._begins = self._own_line = self._is_wrapper = self._has_references = False
        out.arguments("{")

    @property
    def may_be_next(self) -> AbstractSet[str] | None:
        """Names of the function's parameters that have not come yet; None if its parameters are unknown."""
        return self._properties - self._names if self._properties else None

    def declared_types(self, name: str) -> frozenset[str] | None:
        """Return the JSON types that the function's schema has for the parameter `name`; None if it has no such
        parameter.
        """
        return types_of(self._schema, name) if name in self._properties else None

    def begin(
        self, name: str, types: frozenset[str] | None, *, verbatim: bool = False, references: bool = False
    ) -> None:
        """Begin the parameter `name`: write its name, unless it may be a wrapper around all arguments. types: JSON
        types that its value may have; None takes the schema's. verbatim: whether line breaks around this value are part
        of it, whatever the format's rule. references: whether XML's references, such as &lt;, stand for characters in
        this value.
        """
        self._spell_wrapped()
        self._types = types_of(self._schema, name) if types is None else types
        is_only = bool(self._properties) and name not in self._properties and not self._names
        self._is_wrapper = is_only and name in _WRAPPERS
        if not self._is_wrapper:
            self._out.arguments(f"{self._name_json(name)}: " + ('"' if self._is_streamed else ""))
        self._names.add(name)
        self._value, self._begins, self._own_line = [], not verbatim, False
        self._has_references = references

    def add(self, text: str) -> None:
        """Add text to the value, and write it if the value is a streamed string. Up to two line breaks at its end,
        which may belong to the format, are held, and so is the beginning of a reference.
        """
        if not text:
            return
        if self._begins:
            self._begins, self._own_line = False, text.startswith("\n") and not self._verbatim
            text = text[self._own_line :]
        self._value.append(text)
        if self._is_streamed:
            said = "".join(self._value)
            now = _without_breaks(said, 2)
            if self._has_references and (begun := _OPEN_REFERENCE.search(now)):
                now = now[: begun.start()]
            self._out.arguments(_escaped(self._text(now)))
            self._value = [said[len(now) :]]

    def end_value(self, closed: bool) -> None:
        """End the value, and write what is held of it; the value of a wrapper is kept for `end`.

        closed: the closing word of the value has come. If that word is missing, one more line break at the end of the
        text, which the format has after the word, is not part of the value.
        """
        held = _without_breaks("".join(self._value), self._own_line + (not closed))
        if self._is_wrapper:
            self._wrapped = held
        else:
            self._out.arguments(_escaped(self._text(held)) + '"' if self._is_streamed else self._json(held))

    def end(self) -> None:
        """End the arguments with the closing brace.

        If the only parameter is a wrapper (one of _WRAPPERS, which the function lacks) and its value is an object
        of parameters of the function, that object is emitted in its place.
        """
        if self._wrapped is not None:
            inner = self._json(self._wrapped, _OBJECT)
            if inner.startswith("{") and json.loads(inner).keys() <= self._properties:
                self._wrapped = None
                self._out.arguments(inner[1:-1])
        self._spell_wrapped()
        self._out.arguments("}")

    def cut_name(self, name: str, is_complete: bool) -> None:
        """Write an incomplete call whose output ends in or after a parameter's name. is_complete: whether the name is
        complete and gets its closing quote. The object stays open.
        """
        self._spell_wrapped()
        self._out.arguments(self._name_json(name) if is_complete else self._name_json(name).removesuffix('"'))

    def cut_value(self) -> None:
        """Write the held text of a value in which the output ends, a wrapper's after its name; the value and the object
        stay open. Only a streamed string is escaped.
        """
        text = _without_breaks("".join(self._value), self._own_line)
        if self._is_wrapper:
            self._out.arguments(f"{json.dumps(*self._names)}: ")
        self._out.arguments(_escaped(self._text(text)) if self._is_streamed else text)

    @property
    def _is_streamed(self) -> bool:
        """Whether the value is a string, which is written as it arrives."""
        return self._types == _STRING and not self._is_wrapper

    def _text(self, text: str) -> str:
        """Return the text that `text` stands for: itself, with characters in place of references if it may have any."""
        return with_characters(text) if self._has_references else text

    def _json(self, text: str, types: frozenset[str] | None = None) -> str:
        """Return a complete value as JSON of one of `types`; None: those of the parameter. If characters in place of
        references make it a string that it was not before, the references stay.
        """
        types = types or self._types
        plain = as_json(text, types)
        read = as_json(self._text(text), types) if self._has_references else plain
        return plain if read.startswith('"') and not plain.startswith('"') else read

    def _name_json(self, name: str) -> str:
        """Return a parameter's name as a JSON key, after a comma unless it is the first."""
        return f"{', ' if self._names else ''}{json.dumps(name, ensure_ascii=False)}"

    def _spell_wrapped(self) -> None:
        """Write the held wrapper parameter as an ordinary parameter with its value; nothing if none is held."""
        if self._wrapped is not None:
            self._out.arguments(f"{json.dumps(*self._names)}: {self._json(self._wrapped)}")
            self._wrapped = None


def with_characters(text: str) -> str:
    """Return `text` with characters in place of XML's references: &lt; &gt; &amp; &quot; &apos; and a code point in
    decimal or hexadecimal digits, &#60; or &#x3C;. One of no character, or without its semicolon, stays as it is.
    """
    return _REFERENCE.sub(_character, text)


def _character(reference: re.Match[str]) -> str:
    """Return the character of a reference; the reference itself if its code is 0, a surrogate or beyond Unicode."""
    name, decimal, hexadecimal = reference.groups()
    if name:
        return _ENTITIES[name]
    code = int(decimal) if decimal else int(hexadecimal, 16)
    is_character = 0 < code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_character else reference.group()


def _without_breaks(text: str, most: int) -> str:
    """Remove up to `most` line breaks from the end of a text."""
    for _ in range(most):
        text = text.removesuffix("\n")
    return text


def _escaped(text: str) -> str:
    """Escape text for use within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

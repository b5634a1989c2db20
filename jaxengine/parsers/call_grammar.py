"""Grammars of tool calls as models write them, in Lark's notation as llguidance reads it.

Owns what the formats' grammars have in common; each format's own lines stand beside its parser. Knows nothing of
requests, and of a vocabulary only which words are tokens of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schema = Mapping[str, Any]
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True)
class CallGrammar:
    """What the calls of one request may be.

    Attributes:
      functions: JSON schemas of arguments, by the functions' names.
      many: one answer may have several calls.
      token_id: the id of a word that is one added token of the vocabulary, else None. Such a token is no text to a
        grammar.
      json: a rule's body for values of a schema.
    """

    functions: Mapping[str, Schema]
    many: bool
    token_id: Callable[[str], int | None]
    json: Callable[[Schema], str]

    def word(self, text: str) -> str:
        """A marker, which is a token where the vocabulary has one of that text."""
        token_id = self.token_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def listed(self, rule: str, separator: str) -> str:
        """One of `rule`, or several with `separator` between them."""
        return f"{rule} ({literal(separator)} {rule})*" if self.many else rule

    def arguments(self) -> Iterator[str]:
        """Rules arguments_0, arguments_1, ... for the arguments as JSON, in the order of `functions`."""
        for number, schema in enumerate(self.functions.values()):
            yield f"arguments_{number}: {self.json(schema)}"

    def objects(self, key: str) -> str:
        """Alternatives {"name": ..., key: ...} over the rules of `arguments`."""
        begins = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ' for name in self.functions]
        return " | ".join(f'{literal(begin)} arguments_{at} "}}"' for at, begin in enumerate(begins))


def call_schema(name: str, key: str, schema: Schema) -> dict[str, Any]:
    """The schema of {"name": name, key: arguments}, by the arguments' schema, whose definitions move to the root."""
    rest = {word: value for word, value in schema.items() if word not in _DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: rest},
        "required": ["name", key],
        "additionalProperties": False,
        **definitions(schema),
    }


def definitions(schema: Schema) -> dict[str, Any]:
    """What references of the schema point into; they count from its root."""
    return {word: schema[word] for word in _DEFINITIONS if word in schema}


def literal(text: str) -> str:
    """The text itself, in Lark's notation."""
    return json.dumps(text, ensure_ascii=False)

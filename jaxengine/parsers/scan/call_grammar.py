"""Grammars of tool calls in the formats of models, in the Lark syntax of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.marker_words import marker_parts

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class CallGrammar:
    """Calls that a request allows, and grammar terms for them.

    Attributes:
      functions: JSON schemas of arguments, by function name.
      many: whether an answer may contain several calls.
      token_id: returns the id of a word that is a single added token of the vocabulary, else None. A grammar cannot
        match such a token as text.
      json: returns the body of a rule for values of a schema; may raise RequestError for a schema that cannot be used.
    """

    functions: Mapping[str, Schema]
    many: bool
    token_id: Callable[[str], int | None]
    json: Callable[[Schema], str]

    def word(self, text: str) -> str:
        """Return the grammar term for a marker: a token if the vocabulary has one of this text, several terms if words
        in it are tokens, otherwise a literal.
        """
        token_ids = [(part, self.token_id(part)) for part in (text, *marker_parts(text))]
        if token_ids[0][1] is None and any(token_id is not None for _, token_id in token_ids[1:]):
            return " ".join(map(self.word, (part for part, _ in token_ids[1:])))
        return literal(text) if token_ids[0][1] is None else f"<[{token_ids[0][1]}]>"

    def listed(self, rule: str, separator: str) -> str:
        """Return the grammar term for one `rule`, or for one or more separated by `separator` if `many`."""
        return f"{rule} ({literal(separator)} {rule})*" if self.many else rule

    def arguments(self) -> Iterator[str]:
        """Yield rules arguments_0, arguments_1, ... for the arguments as JSON, in the order of `functions`.

        Raises RequestError for a schema that cannot be used.
        """
        for number, schema in enumerate(self.functions.values()):
            yield f"arguments_{number}: {self.json(schema)}"

    def objects(self, key: str) -> str:
        """Return grammar alternatives {"name": ..., key: ...}, one for each function, which refer to the rules of
        `arguments`.
        """
        begins = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ' for name in self.functions]
        return " | ".join(f'{literal(begin)} arguments_{at} "}}"' for at, begin in enumerate(begins))


def call_schema(name: str, key: str, arguments: Any) -> dict[str, Any]:
    """Return the JSON schema of {"name": name, key: arguments}. arguments: schema of the arguments."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def literal(text: str) -> str:
    """Return a text as a Lark literal, in double quotes."""
    return json.dumps(text, ensure_ascii=False)

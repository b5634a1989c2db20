"""Converts plain-text arguments to JSON by the schema of their parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxengine.parsers.call_grammar import Schema, definitions
from jaxengine.parsers.python_scan import PythonScanner, Reading

_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_COMBINING = ("anyOf", "oneOf", "allOf")
# Limit of subschemas per parameter: schemas refer to each other, and to themselves.
_MAX_SCHEMAS = 256


def types_of(function: Schema | None, name: str) -> frozenset[str]:
    """The JSON types that a parameter of a function may have; only "string" if its schema gives none.

    function: schema of the arguments, None if unknown.
    """
    function = function or {}
    properties = function.get("properties")
    defined = definitions(function)
    waiting: list[Any] = [properties.get(name)] if isinstance(properties, Mapping) else []
    found: set[str] = set()
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            break
        schema = waiting.pop()
        if isinstance(schema, Mapping):
            found |= _own_types(schema)
            waiting += [each for word in _COMBINING for each in _list(schema.get(word))]
            waiting.append(_referred(schema.get("$ref"), defined))
    return frozenset(found) or frozenset(("string",))


def _own_types(schema: Schema) -> set[str]:
    kind = schema.get("type")
    found = {each for each in (*_list(kind), kind) if isinstance(each, str)}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return found or {_TYPES.get(type(value), "null") for value in values}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: Any, defined: Schema) -> Any:
    """Resolves a reference "#/$defs/name"; None for other references."""
    parts = reference.split("/") if isinstance(reference, str) else []
    if len(parts) != 3 or parts[0] != "#":
        return None
    named = defined.get(parts[1])
    return named.get(parts[2]) if isinstance(named, Mapping) else None


def as_json(text: str, types: frozenset[str]) -> str:
    """Converts text to JSON of one of the types: unchanged if it is such JSON already, otherwise as a string.

    Values in Python's notation are converted too.
    """
    if types != {"string"}:
        for written in (text.strip(), _from_python(text.strip())):
            if written and _is_of(written, types):
                return written
    return json.dumps(text, ensure_ascii=False)


def _is_of(text: str, types: frozenset[str]) -> bool:
    try:
        # The values of numbers do not matter, and may exceed Python's limit of digits.
        value = json.loads(text, parse_int=lambda _: 0, parse_float=_number, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    kind = _TYPES.get(type(value), "null")
    return kind in types - {"string"} or (kind == "integer" and "number" in types)


def _number(text: str) -> int | float:
    """Parses a number; 1.0 is an integer in JSON Schema."""
    return 0 if float(text).is_integer() else 0.5


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _from_python(text: str) -> str:
    scanner = PythonScanner()
    for at, char in enumerate(text):
        reading = scanner.read(char)
        if reading is not Reading.MORE:
            return "".join(scanner.json) if reading is Reading.DONE and at == len(text) - 1 else ""
    # A name or number ends with the next character.
    return "".join(scanner.json) if scanner.read(" ") is Reading.BEFORE else ""

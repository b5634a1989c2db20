"""Conversion of plain-text arguments to JSON by the schema of their parameter."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jaxengine.parsers.scan.call_grammar import Schema
from jaxengine.parsers.scan.python_scan import PythonScanner, Reading
from jaxengine.schema_references import Place, SchemaDocument, mapping

_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
# Names that tools' schemas have for these types, in lower case: Python's, OpenAPI's and those of databases.
_TYPE_NAMES = {
    **dict.fromkeys(("object", "dict", "map", "struct"), "object"),
    **dict.fromkeys(("array", "list", "tuple", "set"), "array"),
    **dict.fromkeys(("string", "str", "text", "char", "varchar"), "string"),
    **dict.fromkeys(("boolean", "bool"), "boolean"),
    **dict.fromkeys(("integer", "int", "int32", "int64", "long", "short", "uint"), "integer"),
    **dict.fromkeys(("number", "float", "double", "float32", "float64", "decimal"), "number"),
    **dict.fromkeys(("null", "none", "nonetype"), "null"),
}


def types_of(document: SchemaDocument, name: str) -> frozenset[str]:
    """Return the JSON types that the parameter `name` of a function may have; only "string" if its schema names none.

    document: the schema of the arguments. A parameter that it does not list has the types of additionalProperties.
    """
    rules = list(document.applicable(document.root))
    places = [each.inside(named[name]) for each in rules if name in (named := mapping(each.schema, "properties"))]
    others = "additionalProperties"
    return types_at(document, places or [each.inside(each.schema[others]) for each in rules if others in each.schema])


def types_at(document: SchemaDocument, places: Iterable[Place]) -> frozenset[str]:
    """Return the union of the JSON types that the schemas at `places` name; only "string" if they name none. document:
    resolves their references.
    """
    found: set[str] = set()
    for place in places:
        for each in document.applicable(place):
            found |= _own_types(each.schema)
    return frozenset(found) or frozenset(("string",))


def _own_types(schema: Schema) -> set[str]:
    """Return the JSON types that a schema itself names by "type", where names such as "int" or "dict" count too, or
    otherwise the types of its "enum" and "const" values; empty if it has none of these.
    """
    kind = schema.get("type")
    found = {_TYPE_NAMES.get(each.lower(), each) for each in (*_list(kind), kind) if isinstance(each, str)}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    return found or {_TYPES.get(type(value), "null") for value in values}


def _list(value: Any) -> list[Any]:
    """Return `value` if it is a list, else []."""
    return value if isinstance(value, list) else []


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert text to JSON of one of the JSON types `types`.

    The stripped text is returned if it is JSON of such a type other than string, and a Python literal of such a type is
    converted. Otherwise, or if `types` is {"string"}, the result is the text, unstripped, as a JSON string.
    """
    if types != {"string"}:
        for written in (text.strip(), _from_python(text.strip())):
            if written and _is_of(written, types):
                return written
    return json.dumps(text, ensure_ascii=False)


def _is_of(text: str, types: frozenset[str]) -> bool:
    """Return whether a text is JSON of one of `types` other than string. An integer also counts as "number", and 1.0 as
    "integer".
    """
    try:
        # The values of numbers do not matter, and may exceed Python's limit of digits.
        value = json.loads(
            text,
            parse_int=lambda _: 0,
            parse_float=lambda text: 0 if float(text).is_integer() else 0.5,  # 1.0 is an integer in JSON Schema
            parse_constant=int,
        )
    except (ValueError, RecursionError):
        return False
    kind = _TYPES.get(type(value), "null")
    return kind in types - {"string"} or (kind == "integer" and "number" in types)


def _from_python(text: str) -> str:
    """Return the JSON of a text that is a single Python literal without white space at its ends; "" for other texts."""
    scanner = PythonScanner()
    for at, char in enumerate(text):
        reading = scanner.read(char)
        if reading is not Reading.MORE:
            return "".join(scanner.json) if reading is Reading.DONE and at == len(text) - 1 else ""
    # A name or number ends with the next character.
    return "".join(scanner.json) if scanner.read(" ") is Reading.BEFORE else ""

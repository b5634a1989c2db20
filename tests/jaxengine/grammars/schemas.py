"""Sixty JSON schemas, as varied as what people send; bounded, so that a model of random weights gets through."""

from __future__ import annotations

from typing import Any

TEXT = {"type": "string", "maxLength": 8}
SMALL = {"type": "integer", "minimum": 0, "maximum": 20}
FLAG = {"type": "boolean"}


def record(required: Any = True, /, **properties: Any) -> dict[str, Any]:
    """An object with these properties only; all of them required, or those named."""
    names = list(properties) if required is True else list(required)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def listing(items: Any, least: int = 0, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(**rules: Any) -> dict[str, Any]:
    return {"type": "string", **rules}


def number(kind: str = "integer", **rules: Any) -> dict[str, Any]:
    return {"type": kind, **rules}


SCHEMAS: dict[str, dict[str, Any]] = {
    # Objects.
    "person": record(name=TEXT, age=number(minimum=0, maximum=120)),
    "empty object": record(),
    "optional": record(["id"], id=SMALL, note=TEXT),
    "all optional": record([], a=SMALL, b=FLAG),
    "nested": record(user=record(name=TEXT, address=record(city=TEXT, zip=text(pattern="^[0-9]{5}$")))),
    "five levels": record(a=record(b=record(c=record(d=record(e=FLAG))))),
    "odd names": record(**{"a b": SMALL, 'quo"te': FLAG, "é": SMALL, "": FLAG, "x/y": SMALL}),
    "many flags": record(**{f"flag_{index}": FLAG for index in range(8)}),
    "no types": {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False, "type": "object"},
    "null property": record(nothing={"type": "null"}, flag=FLAG),
    # Arrays.
    "integers": listing(SMALL),
    "at least two": listing(SMALL, 2, 4),
    "exactly three": listing(FLAG, 3, 3),
    "texts": listing(TEXT, 1, 3),
    "objects": listing(record(x=SMALL, y=SMALL), 1, 2),
    "matrix": listing(listing(SMALL, 2, 2), 2, 2),
    "empty array": listing(SMALL, 0, 0),
    "tuple": {
        "type": "array",
        "prefixItems": [SMALL, TEXT, FLAG],
        "items": False,
        "minItems": 3,
        "maxItems": 3,
    },
    "tuple and rest": {"type": "array", "prefixItems": [TEXT], "items": SMALL, "minItems": 1, "maxItems": 3},
    "array in object": record(tags=listing(TEXT, 0, 2), scores=listing(SMALL, 1, 2)),
    # Enumerations.
    "enum": {"enum": ["red", "green", "blue"]},
    "mixed enum": {"enum": ["a", 1, None, True, 2.5]},
    "enum of structures": {"enum": [{"a": 1}, [1, 2], "x"]},
    "const": {"const": "only this"},
    "const object": {"const": {"k": [1, "two"]}},
    "long enum": {"enum": [f"value {index}" for index in range(300)]},
    "enum property": record(color={"enum": ["red", "blue"]}, size={"enum": [1, 2, 3]}),
    "unicode enum": {"enum": ["ü", "日本", "🙂", 'say "x"', "line\nbreak"]},
    # Texts.
    "text": TEXT,
    "length": text(minLength=3, maxLength=6),
    "fixed length": text(minLength=4, maxLength=4),
    "pattern": text(pattern="^[A-Z]{2}-[0-9]{3}$"),
    "alternatives": text(pattern="^(cat|dog|bird)s?$"),
    "hex color": text(pattern="^#[0-9a-f]{6}$"),
    "version": text(pattern=r"^v\d{1,2}\.\d{1,2}\.\d{1,2}$"),
    "date": text(format="date"),
    "time": text(format="time"),
    "date-time": text(format="date-time"),
    "uuid": text(format="uuid"),
    "ipv4": text(format="ipv4"),
    # Numbers.
    "integer": SMALL,
    "negative": number(minimum=-50, maximum=-10),
    "exclusive": number(exclusiveMinimum=3, exclusiveMaximum=9),
    "one sided": number(minimum=5, maximum=10**6),
    "float": number("number", minimum=0, maximum=1),
    "float range": number("number", minimum=-2.5, maximum=2.5),
    "even": number(multipleOf=2, minimum=0, maximum=40),
    "numbers": record(a=number("number", minimum=1, maximum=2), b=number(minimum=-1, maximum=1)),
    "boolean": FLAG,
    "null": {"type": "null"},
    # Unions and references.
    "types": {"type": ["boolean", "null"]},
    "nullable": record(value={"anyOf": [SMALL, {"type": "null"}]}),
    "any of": {"anyOf": [record(a=SMALL), record(b=FLAG)]},
    "one of kinds": {"oneOf": [record(kind={"const": "x"}, x=SMALL), record(kind={"const": "y"}, y=FLAG)]},
    "union in array": listing({"anyOf": [FLAG, TEXT, {"type": "null"}]}, 1, 3),
    "reference": {"$defs": {"point": record(x=SMALL, y=SMALL)}, **record(a={"$ref": "#/$defs/point"})},
    "reference twice": {
        "$defs": {"p": listing(SMALL, 1, 2)},
        **record(left={"$ref": "#/$defs/p"}, right={"$ref": "#/$defs/p"}),
    },
    "definitions": {"definitions": {"flag": FLAG}, **listing({"$ref": "#/definitions/flag"})},
    "all of": {"allOf": [record([], a=SMALL, b=FLAG), {"type": "object", "required": ["a", "b"]}]},
    "tool call": record(
        name={"enum": ["get_weather", "get_time"]},
        arguments=record(["city"], city=TEXT, unit={"enum": ["C", "F"]}, days=number(minimum=1, maximum=7)),
    ),
}

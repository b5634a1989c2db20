"""Types of text arguments: which JSON a parser writes for a text, by the schema of its parameter."""

from __future__ import annotations

import itertools
import json

import pytest

from jaxengine.parsers.registry import TOOL_PARSERS
from jaxengine.parsers.scan.events import message_of
from tests.tables import each_row

OBJECT, INTEGER = {"type": "object", "properties": {"x": {"type": "integer"}}}, {"type": "integer"}
WRITTEN = '{"x": 1}'
ENDS = {"properties": {"start": OBJECT, "a": {"$ref": "#/properties/start"}}}
CIRCLE = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/b"}, INTEGER]}, "b": {"$ref": "#/properties/a"}}}
IN_PARTS = {"allOf": [{"properties": {"b": {"type": "string"}}}, {"$ref": "#/$defs/A"}], "$defs": {"A": ENDS}}
EITHER = {"oneOf": [{"properties": {"b": INTEGER}}, {"anyOf": [{"properties": {"a": INTEGER}}]}]}
ESCAPED = {
    "properties": {"a": {"$ref": "#/$defs/x~1y~0z%20%C3%BC/items/1"}},
    "$defs": {"x/y~z ü": {"items": [{}, INTEGER]}},
}
ANCHORS = {"$id": "http://host/a", "properties": {"a": {"$ref": "a#n"}}, "$defs": {"b": {"$anchor": "n", **INTEGER}}}
NOWHERE = {"properties": {"a": {"$ref": "#/$defs/nowhere"}, "b": {"$id": "http://["}}, "$ref": "http://host/b"}


@each_row(
    ("schema", "text", "value"),
    [
        (ENDS, WRITTEN, {"x": 1}),
        ({"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"a": OBJECT}}}}, WRITTEN, {"x": 1}),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"properties": {"a": INTEGER}}}}, "3", 3),
        ({**IN_PARTS, "properties": {"start": OBJECT}}, WRITTEN, {"x": 1}),
        (EITHER, "3", 3),
        ({"if": {}, "then": {"properties": {"a": INTEGER}}}, "3", 3),
        (CIRCLE, "3", 3),
        ({"$ref": "#"}, "3", "3"),
        (ESCAPED, "3", 3),
        (ANCHORS, "3", 3),
        (NOWHERE, "3", "3"),
        ({"additionalProperties": INTEGER}, "3", 3),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": INTEGER}, "3", "3"),
        ({"properties": {"a": {"default": {"$ref": "#/properties/b"}}, "b": INTEGER}}, "3", "3"),
        *(({"properties": {"a": {"type": kind}}}, "3", 3) for kind in ("int", "INTEGER", "float", "double", ["int"])),
        *(({"properties": {"a": {"type": kind}}}, "True", True) for kind in ("bool", "Boolean")),
        *(({"properties": {"a": {"type": kind}}}, WRITTEN, {"x": 1}) for kind in ("dict", "OBJECT")),
        *(({"properties": {"a": {"type": kind}}}, "[1]", [1]) for kind in ("list", "tuple", "Array")),
        *(({"properties": {"a": {"type": kind}}}, "3", "3") for kind in ("str", "text", "dict", "list", "unknown")),
    ],
)
def test_a_text_has_the_type_of_its_schema(schema, text, value):
    parser = TOOL_PARSERS["seed_oss"].open({"f": schema})
    written = f"<seed:tool_call><function=f><parameter=a>{text}</parameter></function></seed:tool_call>"
    (call,) = message_of([*parser.feed(written), *parser.finish()]).tool_calls
    assert json.loads(call.arguments) == {"a": value}


GLM = "<tool_call>f<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"
QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
MINIMAX = '<minimax:tool_call><invoke name="f"><parameter name="a">{}</parameter></invoke></minimax:tool_call>'
CALLS = {"qwen3_coder": QWEN, "qwen3_xml": QWEN, "minimax_m2": MINIMAX, "glm45": GLM, "glm47": GLM}


@pytest.mark.parametrize("kind", CALLS)
def test_every_typed_format_follows_references(kind):
    for schema, pieces in itertools.product(
        (ENDS, IN_PARTS | {"properties": {"start": OBJECT}}), (list, lambda x: [x])
    ):
        parser = TOOL_PARSERS[kind].open({"f": schema})
        events = [event for piece in pieces(CALLS[kind].format(WRITTEN)) for event in parser.feed(piece)]
        (call,) = message_of([*events, *parser.finish()]).tool_calls
        assert json.loads(call.arguments) == {"a": {"x": 1}}

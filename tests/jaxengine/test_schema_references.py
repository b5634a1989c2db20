"""References of JSON schemas: where they point to, and what a schema is that was moved."""

from __future__ import annotations

import itertools

import pytest

from jaxengine.schema_references import Place, SchemaDocument, UnresolvedError, moved, self_contained
from tests.tables import each_row

A, B = {"type": "integer"}, {"type": "boolean"}
DOCUMENT = {
    "$id": "http://host/folder/root.json#",
    "properties": {"a/b": A, "a~b": A, "a b": A, "ü%": A, "": A, "list": {"anyOf": [B, A]}, "$ref": A},
    "$defs": {
        "own": {"$id": "own.json", "$defs": {"in": A}, "items": {"$anchor": "there", **A}},
        "named": {"$anchor": "here", **A},
        "old": {"$id": "#old", **A},
        "dynamic": {"$dynamicAnchor": "moving", **A},
        "default": {"default": {"$anchor": "data"}},
    },
    "x-more": {"deep": [B, {"not": A}]},
}


@each_row(
    "reference",
    [
        *("#/properties/a~1b", "#/properties/a~0b", "#/properties/a%20b", "#/properties/a b", "#/properties/"),
        *("#/properties/%C3%BC%25", "#/properties/ü%25", "#/properties/a%7E1b", "#/properties/%24ref"),
        *("#/properties/list/anyOf/1", "#/x-more/deep/1/not", "#/$defs/own/$defs/in", "#here", "#old", "#moving"),
        *("own.json#/$defs/in", "own.json#there", "http://host/folder/own.json#/items", "/folder/own.json#there"),
        *("root.json#here", "http://host/folder/root.json#/properties/a~1b"),
    ],
)
def test_a_reference_has_a_target(reference):
    assert SchemaDocument(DOCUMENT).resolve(reference).schema["type"] == "integer"


@each_row(
    "reference",
    [
        *("#/nowhere", "#/properties/list/anyOf/2", "#/properties/list/anyOf/-1", "#/properties/list/anyOf/²"),
        *("#there", "#data", "other.json", "http://[", "#/$id/0", "#/properties/list/anyOf/", 3, None, {"a": 1}),
    ],
)
def test_a_reference_to_nowhere_is_named(reference):
    with pytest.raises(UnresolvedError, match="reference"):
        SchemaDocument(DOCUMENT).resolve(reference)


def test_the_root_is_a_target():
    for reference in ("#", "", "root.json", "http://host/folder/root.json#"):
        assert SchemaDocument(DOCUMENT).resolve(reference).schema is DOCUMENT
    own = SchemaDocument(DOCUMENT).resolve("own.json")
    assert SchemaDocument(DOCUMENT).resolve("#", own.base).schema is DOCUMENT["$defs"]["own"]


def test_a_moved_schema_takes_its_targets_along():
    """Circles end, alike targets are one definition, and nothing else comes along."""
    root = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "end": {"$ref": "#/properties/start", "description": "d"},
            "start": {"items": {"$ref": "#/definitions/loop"}},
        },
        "definitions": {"loop": {"allOf": [{"$ref": "#/definitions/loop"}]}, "unused": {"$ref": "http://host/else"}},
    }
    definitions = {"0": {"type": "string"}}
    document = SchemaDocument(root)
    copy = moved(document.root, document, definitions)
    start, loop = {"items": {"$ref": "#/$defs/3"}}, {"allOf": [{"$ref": "#/$defs/3"}]}
    properties = {
        "next": {"anyOf": [{"$ref": "#/$defs/1"}, {"type": "null"}]},
        "end": {"$ref": "#/$defs/2", "description": "d"},
        "start": start,
    }
    assert copy == {"properties": properties}
    assert definitions == {"0": {"type": "string"}, "1": copy, "2": start, "3": loop}
    assert root["properties"]["end"]["$ref"] == "#/properties/start"


def test_data_is_moved_as_it_is():
    data = {"$ref": "#/x", "$defs": {"$id": "a"}, "properties": {"a": {"$ref": "#/y"}}}
    schema = {"const": data, "enum": [data], "default": data, "examples": [data], "x-more": data}
    named = {"properties": {"$ref": A, "const": {"$ref": "#/x-more/$defs"}, "$id": A, "$defs": B}, "required": ["$ref"]}
    document = SchemaDocument({**schema, **named, "x-more": {"$defs": A}})
    copy = self_contained(document, document.root)
    assert copy["properties"] == {"$ref": A, "const": {"$ref": "#/$defs/0"}, "$id": A, "$defs": B}
    assert copy["$defs"] == {"0": A} and copy["required"] == ["$ref"]
    assert {word: copy[word] for word in ("const", "enum", "default", "examples")} == {
        word: schema[word] for word in ("const", "enum", "default", "examples")
    }


def test_a_moved_schema_has_no_uris_and_anchors():
    document = SchemaDocument(
        {"items": {"$ref": "own.json#there"}, "prefixItems": [{"$dynamicRef": "#moving"}]} | DOCUMENT
    )
    copy = self_contained(document, document.root)
    assert copy["prefixItems"] == [{"$ref": "#/$defs/0"}] and copy["items"] == {"$ref": "#/$defs/1"}
    assert copy["$defs"] == {"0": A, "1": A} and "$id" not in copy


def test_what_cannot_be_moved_is_named():
    for wrong in ({"$ref": "#/nowhere"}, {"$ref": "http://host/a"}, {"$ref": "#/required"}, {"$ref": 3}):
        document = SchemaDocument({"required": ["a"], "items": [{"not": wrong}]})
        with pytest.raises(UnresolvedError, match="reference"):
            self_contained(document, document.root)


def test_what_applies_ends():
    """Circles, and schemas that multiply by references, are walked once."""
    levels = {str(at): {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(200)}
    document = SchemaDocument({"$defs": {**levels, "200": {"$ref": "#/$defs/0", "type": "array"}}, "$ref": "#/$defs/0"})
    found = list(itertools.islice(document.applicable(document.root), 1000))
    assert len(found) <= 256
    assert [each.schema for each in SchemaDocument(A).applicable(Place({"$ref": "#/nowhere"}))] == [
        {"$ref": "#/nowhere"}
    ]

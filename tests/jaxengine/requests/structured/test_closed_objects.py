"""Objects that list their properties are closed where that is safe: jsonschema says the same of both schemas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxengine.requests.structured.closed_objects import forbid_additional_properties, lists_all
from tests.tables import each_row

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
CAT: dict[str, Any] = {"properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind"]}
DOG: dict[str, Any] = {"properties": {"kind": {"const": "dog"}, "tricks": {"type": "integer"}}, "required": ["kind"]}
END = {"additionalProperties": False}


def closed(schema: Any) -> Any:
    return json.loads(forbid_additional_properties(json.dumps(schema)))


def refer(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


@each_row(
    ("given", "expected"),
    [
        (A, A | END),
        ({"properties": {"a": A}}, {"properties": {"a": A | END}, **END}),
        ({"type": "array", "items": A}, {"type": "array", "items": A | END}),
        ({"prefixItems": [A, {}], "items": B}, {"prefixItems": [A | END, {}], "items": B | END}),
        ({"additionalProperties": A}, {"additionalProperties": A | END}),
        ({"patternProperties": {"^x": A}}, {"patternProperties": {"^x": A | END}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [A | END, {"type": "null"}]}),
        ({"allOf": [A], "title": "t", "default": {}}, {"allOf": [A | END], "title": "t", "default": {}}),
        ({"$defs": {"A": A}, **refer("A")}, {"$defs": {"A": A | END}, **refer("A")}),
        ({"oneOf": [CAT, DOG]}, {"oneOf": [CAT | END, DOG | END]}),
        (
            {"$defs": {"C": CAT, "D": DOG}, "oneOf": [refer("C"), refer("D")]},
            {"$defs": {"C": CAT | END, "D": DOG | END}, "oneOf": [refer("C"), refer("D")]},
        ),
        (
            {"properties": {"next": {"$ref": "#"}, "a~/b": B}},
            {"properties": {"next": {"$ref": "#"}, "a~/b": B | END}, **END},
        ),
        (  # a definition that nobody refers to is nobody's
            {"$defs": {"A": A}, "properties": {"n": {"type": "integer"}}},
            {"$defs": {"A": A}, "properties": {"n": {"type": "integer"}}, **END},
        ),
        (  # names of properties are no keywords
            {"properties": {"allOf": B, "$ref": {"type": "string"}, "properties": A}},
            {"properties": {"allOf": B | END, "$ref": {"type": "string"}, "properties": A | END}, **END},
        ),
    ],
)
def test_an_object_that_lists_its_properties_is_closed(given, expected):
    assert closed(given) == expected
    assert closed(expected) == expected


OPEN = [
    True,
    {},
    {"type": "object"},
    {"type": "object", "properties": {}},
    A | {"additionalProperties": True},
    A | {"additionalProperties": {"type": "string"}},
    A | {"unevaluatedProperties": False},
    {**A, "required": ["a", "z"]},
    {**A, "required": "a"},
    {**B, "minProperties": 2},
    {**B, "dependentRequired": {"b": ["z"]}},
    {**B, "enum": [{"b": 1, "z": 2}]},
    {"allOf": [A, B]},
    {"allOf": [A], **B},
    {"anyOf": [A, B], "required": ["z"]},
    {"anyOf": [{"required": ["b"]}, {"required": ["z"]}], **B},
    {"$defs": {"A": A}, **refer("A"), **B},
    {"$defs": {"A": A}, "allOf": [refer("A"), B]},
    {"if": A, "then": B},
    {"not": A},
    {"not": {"anyOf": [A]}},
    {"oneOf": [A, B]},
    {"oneOf": [A, {**B, "required": ["b"]}]},
    {"oneOf": [CAT, {**DOG, "required": []}]},
    {"oneOf": [CAT, {**DOG, "properties": CAT["properties"]}]},
    {"type": "array", "contains": A, "items": B},
    {"type": "array", "items": A, "uniqueItems": True},
    {"const": {"properties": {"a": 1}}},
    {"$ref": "#there", "properties": {"a": A}},
    {"properties": {"a": {"$ref": "#/$defs/nowhere"}}},
    {"properties": {"a": {"$id": "http://example.com/a", **A}}},
    {"properties": {"a": {"$dynamicRef": "#node"}}},
]


@each_row("schema", OPEN)
def test_where_others_may_be_needed_nothing_is_said(schema):
    text = json.dumps(schema)
    assert forbid_additional_properties(text) == text


def test_a_definition_is_closed_only_if_it_is_alone_wherever_it_is_used():
    schema = {"$defs": {"A": A}, "properties": {"one": refer("A"), "two": {"allOf": [refer("A"), B]}}}
    assert closed(schema) == schema | END
    # What two schemas say about one value, they say about what is inside of it, too.
    inside = {"allOf": [{"properties": {"in": A}}, {"properties": {"in": B}}]}
    assert closed(inside) == inside
    both = {"properties": {"xa": A}, "patternProperties": {"^x": B}}
    assert closed(both) == both | END


def test_a_reference_in_a_circle_is_followed_once():
    circle = {"$defs": {"A": refer("B"), "B": refer("A")}, "properties": {"a": refer("A")}}
    assert closed(circle) == circle | END
    assert closed({"$ref": "#", "properties": {"a": {}}}) == {"$ref": "#", "properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "whether"),
    [(A, True), ({"properties": {}}, True), ({}, False), ({**A, "required": ["b"]}, False), (A | {"enum": [1]}, False)],
)
def test_what_an_object_says_of_itself(schema, whether):
    assert lists_all(schema) == whether


NAMES = ("a", "b", "c")
LEAVES = st.sampled_from([{}, {"type": "integer"}, {"const": "x"}, {"const": "y"}])
REFERENCE = {"$ref": "#/$defs/D"}


def schemas(inside: st.SearchStrategy[Any], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with properties, alone or combined."""
    objects = st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": st.dictionaries(st.sampled_from(NAMES), inside, min_size=1, max_size=2),
        },
        optional={
            "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            "patternProperties": st.dictionaries(st.just("^[ab]"), inside, max_size=1),
            "minProperties": st.just(2),
            **more,
        },
    )
    several = st.lists(st.one_of(objects, inside), min_size=1, max_size=2)
    combined = st.sampled_from(["anyOf", "allOf", "oneOf"]).flatmap(lambda word: st.fixed_dictionaries({word: several}))
    beside = st.builds(lambda one, other: {**one, **other}, objects, combined)
    return st.one_of(objects, combined, beside, inside.map(lambda each: {"not": each}))


def referring(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return schemas(inside, **{"$ref": st.just(REFERENCE["$ref"])})


DEFINITIONS = schemas(LEAVES)
SCHEMAS = referring(st.recursive(st.one_of(LEAVES, st.just(REFERENCE)), referring, max_leaves=4))
# With each object those that have less of it: what is left when properties are taken out is here, too.
INNER: list[Any] = [1, "x", {}, {"a": 1}, {"b": 1}]
VALUES: list[Any] = [
    {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    for values in itertools.product([None, *INNER], repeat=3)
]


def accepted(schema: Any) -> set[int]:
    """Which of VALUES keep to it, by their places."""
    validator = jsonschema.Draft202012Validator(schema)
    return {at for at, value in enumerate(VALUES) if validator.is_valid(value)}


@settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(schema=SCHEMAS, definition=DEFINITIONS)
def test_what_keeps_to_the_closed_one_keeps_to_the_other_and_something_does(schema, definition):
    whole = {**schema, "$defs": {"D": definition}}
    before, after = accepted(whole), accepted(closed(whole))
    assert after <= before and bool(after) == bool(before)

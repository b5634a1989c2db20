"""StructuredOutputsParams: one constraint, its limits, and errors that name the field."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.structured.params import (
    CONSTRAINTS,
    MAX_CHOICES,
    MAX_NESTING,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    StructuredOutputsParams,
)
from jaxengine.scheduler.base.errors import RequestError
from tests.tables import each_row


def nested(depth: int) -> dict:
    schema: dict = {}
    inner = schema
    for _ in range(depth):
        inner["not"] = {}
        inner = inner["not"]
    return schema


LOOP: dict = {}
LOOP["properties"] = LOOP
WRONG = {
    "json": [
        "",
        "[1]",
        "7",
        "{",
        '{"const": NaN}',
        3,
        [],
        {"const": float("nan")},
        {"const": {1, 2}},
        LOOP,
        nested(MAX_NESTING + 1),
        nested(100_000),
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        {"enum": ["x" * MAX_SCHEMA_BYTES]},
        {"enum": [f"value {index}" for index in range(50_000)]},
        " " * MAX_SCHEMA_BYTES + "{}",
        '{"type": "\ud800"}',
        {"$ref": "http://example.com/schema.json"},
        {"anyOf": [{"$ref": "file:///etc/passwd"}]},
        {"minimum": 10**5000},
    ],
    "regex": [3, "a" * (MAX_REGEX_BYTES + 1), "é" * MAX_REGEX_BYTES, "\ud800", 10**5000],
    "choice": [[], "ab", ["a", "a"], ["a", ""], ["a", 3], ["x"] * (MAX_CHOICES + 1), ["x" * 200_000, "y" * 200_000]],
    "grammar": ["", b"start: A", "x" * (MAX_SCHEMA_BYTES + 1)],
    "json_object": ["yes", 1],
    "structural_tag": ["", "{", "[]", "true", 3, nested(MAX_NESTING + 1), b"{}"],
    "disable_any_whitespace": [None, 1],
    "disable_additional_properties": [1, "no"],
    "lenient": [None, "yes"],
    "whitespace_pattern": ["", 3, "x" * 2000],
    "reasoning_end": ["", [], 3, [""], [["a"], []], [["a", 3]], ["a"] * 5, [["a"] * 5], "x" * 300, "\ud800"],
    "reasoning_begin": ["<think>", "", 3, "x" * 300],
}


@each_row(("field", "index"), [(name, at) for name, values in WRONG.items() for at in range(len(values))])
def test_wrong_value_is_refused_by_name(field, index):
    chosen = {field: WRONG[field][index]}
    if field not in CONSTRAINTS:
        chosen["json"] = {}
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=chosen)
    message = str(caught.value)
    assert caught.value.param == "structured_outputs"
    assert message.startswith(f"structured_outputs.{field} must be ") and ", got " in message and len(message) < 400


def test_every_field_is_covered_here():
    assert {field.name for field in dataclasses.fields(StructuredOutputsParams)} == WRONG.keys()


@pytest.mark.parametrize(
    "chosen",
    [{}, {"json_object": False}, {"json": {}, "regex": "a"}, {"choice": ["a"], "json_object": True}],
    ids=str,
)
def test_exactly_one_constraint(chosen):
    with pytest.raises(RequestError, match="exactly one of json, regex, choice, grammar, json_object"):
        StructuredOutputsParams(**chosen)


@pytest.mark.parametrize(
    "chosen",
    [
        {"regex": "a", "whitespace_pattern": " "},
        {"choice": ["a"], "disable_any_whitespace": True},
        {"grammar": "start: A", "disable_additional_properties": True},
        {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
    ],
    ids=str,
)
def test_an_option_that_would_do_nothing_is_refused(chosen):
    with pytest.raises(RequestError) as caught:
        StructuredOutputsParams(**chosen)
    assert caught.value.param == "structured_outputs"


def test_the_words_around_reasoning():
    for given, kept in (("a", (("a",),)), (["a", "b"], (("a",), ("b",))), ([["a", "b"], "c"], (("a", "b"), ("c",)))):
        params = StructuredOutputsParams(regex="x", reasoning_end=given, reasoning_begin="y")
        grammar = params.compiled_from(lambda text: (7, 8))
        assert (grammar.reasoning_end, grammar.reasoning_begin) == (kept, (7, 8))
        assert params.compiled_from(lambda text: ()).reasoning_end == ()  # the model cannot open it
        assert StructuredOutputsParams(**dataclasses.asdict(params)) == params


def test_values_are_normalised_and_kept_by_copies():
    schema = {"type": "object", "properties": {"$ref": {"type": "string"}, "é": {"enum": ["\u0000", 1.5, None]}}}
    params = SamplingParams(structured_outputs={"json": schema})
    kept = params.structured_outputs
    assert isinstance(kept, StructuredOutputsParams) and kept.kind == "json" and json.loads(str(kept.json)) == schema
    assert params.clone_with(n=3).structured_outputs == kept
    again = SamplingParams(structured_outputs=dataclasses.asdict(kept)).structured_outputs
    assert again == kept and hash(again) == hash(kept)
    assert StructuredOutputsParams(choice=["b", "a"]).choice == ("b", "a")
    assert StructuredOutputsParams(json=nested(MAX_NESTING)).kind == "json"


def test_an_engine_without_a_tokenizer_refuses():
    params = SamplingParams(structured_outputs={"json_object": True})
    with pytest.raises(RequestError, match="structured_outputs must be None when the engine has no tokenizer"):
        params.verify_against(100, 5, 64, has_tokenizer=False)

"""Schemas that pydantic and zod write: each is a grammar, which is no laxer than it must be, or refused by keyword.

client_schemas.json was written by pydantic 2.14 (TypeAdapter(...).json_schema()) and, for zod 4, by hand after its
documentation of z.toJSONSchema.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import llguidance
import pytest

from jaxengine.grammars.worker_process import compile_grammar
from jaxengine.requests.structured.params import StructuredOutputsParams
from tests.tables import each_row

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("client_schemas.json").read_text())
# What a grammar cannot say: two entries of a list must differ.
SETS = {name for name, schema in SCHEMAS.items() if '"uniqueItems"' in json.dumps(schema)}


def grammar_of(schema: Any, **options: Any) -> str:
    grammar = StructuredOutputsParams(json=schema, **options).compiled_from(lambda text: ())
    return compile_grammar(grammar.kind, grammar.text, dict(grammar.options))


def accepts(schema: Any, text: str, **options: Any) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar_of(schema, **options))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@each_row("name", SCHEMAS)
def test_it_is_a_grammar(name):
    assert len(SCHEMAS) >= 40
    problem = llguidance.LLMatcher.validate_grammar(grammar_of(SCHEMAS[name], lenient=name in SETS))
    assert not problem, problem
    if name in SETS:
        assert "uniqueItems" in llguidance.LLMatcher.validate_grammar(grammar_of(SCHEMAS[name]))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("pydantic dictlit", '{"a": 1}', '{"c": 1}'),
        ("pydantic dictenum", '{"a": 1, "b": 2}', '{"c": 1}'),
        ("pydantic dictkeylen", '{"ab": 1}', '{"a": 1}'),
        ("pydantic dictdate", '{"2024-02-03": 1}', '{"2024-13-01": 1}'),
        ("pydantic dictuuid", '{"01234567-89ab-cdef-0123-456789abcdef": 1}', '{"a": 1}'),
        ("pydantic uuid4", '"01234567-89ab-4def-8123-456789abcdef"', '"01234567-89ab-1def-8123-456789abcdef"'),
        ("pydantic path", '"/tmp/x"', "1"),
        ("pydantic decimal before 2.12", "1.5", '"1.5"'),
        ("zod record", '{"x": 1}', '{"x": "y"}'),
        ("zod record of enum", '{"a": 1, "b": 2}', '{"a": 1}'),
        ("properties called like keywords", '{"format": "x", "propertyNames": 1}', '{"format": 1}'),
    ],
)
def test_what_can_be_enforced_is(name, right, wrong):
    assert accepts(SCHEMAS[name], right) and not accepts(SCHEMAS[name], wrong)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "string", "pattern": "^(?!a)b+$"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
    ],
)
def test_what_cannot_be_enforced_is_named_or_with_lenient_left_out(schema, keyword):
    assert keyword in llguidance.LLMatcher.validate_grammar(grammar_of(schema))
    assert not llguidance.LLMatcher.validate_grammar(grammar_of(schema, lenient=True))


def test_white_space_is_bounded_unless_a_request_says_which():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text in ('{"a":1}', '{ "a": 1 }', '{\n  "a": 1\n}', '{\r\n\t"a": 1\r\n}', "{\n" + " " * 40 + '"a": 1}'):
        assert accepts(schema, text), text
    for text in ('{\n\n"a": 1}', '{   "a": 1}', "{\n" + " " * 41 + '"a": 1}', '{"a":\n \n1}'):
        assert not accepts(schema, text), text
        assert accepts(schema, text, whitespace_pattern=r"[ \t\r\n]*"), text
        assert not accepts(schema, text, disable_any_whitespace=True), text

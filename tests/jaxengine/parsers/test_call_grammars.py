"""The formats' grammars, walked token by token: what they let a model write is what their parsers read."""

from __future__ import annotations

import json
from functools import cache

import llguidance
import pytest
import tokenizers

from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.parsers.call_grammar import CallGrammar
from jaxengine.parsers.events import message_of
from jaxengine.parsers.registry import TOOL_PARSERS
from jaxengine.requests.structured_outputs import StructuredOutputsParams
from jaxengine.tokens.tokenizer import Tokenizer
from models.weights.gguf import GGUFFile

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}, "rain": {"type": "boolean"}},
    "required": ["city", "rain"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", 'Zü"rich']}},
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = {"get_weather": WEATHER, "get": NOW}
# The name of the one function begins that of the other, and answers begin as calls do.
SPACE = r"[ \t]?|\r?\n[ \t]{0,20}"
OBJECT = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
ANSWER = {"anyOf": [OBJECT, {"type": "array", "items": {"type": "integer"}}]}

PARIS = '{"city": "Paris", "rain": true}'
TWICE = [("get_weather", {"city": "Paris", "rain": True}), ("get", {})]
# (format, words that are tokens of the vocabulary, an output with two calls, outputs that are none)
CASES = {
    "hermes": (
        "hermes",
        (),
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
        ('<tool_call>\n{"name": "other"', '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"', "Sure"),
    ),
    "hermes with tokens": (
        "hermes",
        ("<tool_call>", "</tool_call>"),
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>',
        ('<tool_call>\n{"name": "get", "arguments": {"a"', "</tool_call>"),
    ),
    "llama3": (
        "llama3_json",
        ("<|python_tag|>",),
        f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "get", "parameters": {{}}}}',
        ('{"name": "get_weather", "parameters": {"rain"', "<|python_tag|>print"),
    ),
    "mistral": (
        "mistral",
        ("[TOOL_CALLS]",),
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get", "arguments": {{}}}}]',
        ("[TOOL_CALLS]get_weather", '[TOOL_CALLS][{"name": "then'),
    ),
    "mistral v11": (
        "mistral",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS}[TOOL_CALLS]get[ARGS]{{}}",
        ("[TOOL_CALLS][", "[TOOL_CALLS]get[CALL_ID]ab[ARGS]"),
    ),
    "pythonic": (
        "pythonic",
        (),
        '[get_weather(city="Paris", rain=true), get()]',
        ("[get_weather(rain", "[other(", '[get_weather(city="Paris")'),
    ),
}


@pytest.fixture(scope="module")
def vocabulary():
    """vocabulary(words): SmolLM2's tokenizer with these as tokens, and the same for llguidance."""
    with GGUFFile(default_model_path()) as file:
        smollm = Tokenizer.from_gguf(file.metadata)

    @cache
    def build(words):
        backend = tokenizers.Tokenizer.from_str(smollm.backend.to_str())
        backend.add_tokens([tokenizers.AddedToken(word, special=word.startswith("[")) for word in words])
        return backend, llguidance.LLTokenizer(backend.to_str(), eos_token=smollm.eos_token_id)

    return build


def grammar_and_tokens(vocabulary, kind, words, many=True):
    backend, tokens = vocabulary(words)
    calls = CallGrammar(
        FUNCTIONS,
        many,
        lambda word: backend.token_to_id(word) if word in words else None,
        lambda schema: StructuredOutputsParams(json=schema, whitespace_pattern=SPACE).in_lark(),
    )
    answer = StructuredOutputsParams(json=ANSWER, whitespace_pattern=SPACE).in_lark()
    rules = ["start: answer | calls", f"answer: {answer}", *TOOL_PARSERS[kind].grammar(calls)]
    matcher = llguidance.LLMatcher(tokens, "\n".join(rules), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return backend, matcher


def taken(backend, matcher, text) -> tuple[bool, bool]:
    """(whether every token of the text is allowed where it stands, whether the text may end there)"""
    matcher = matcher.deep_copy()
    for token_id in backend.encode(text, add_special_tokens=False).ids:
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False, False
        matcher.consume_token(token_id)
    return True, matcher.is_accepting()


@pytest.mark.parametrize("case", CASES)
def test_a_grammar_takes_what_its_parser_reads(vocabulary, case):
    kind, words, text, wrong = CASES[case]
    backend, matcher = grammar_and_tokens(vocabulary, kind, words)
    assert taken(backend, matcher, text) == (True, True)
    parser = TOOL_PARSERS[kind].open()
    parsed = message_of([*parser.feed(text), *parser.finish()])
    assert parsed.content is None
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == TWICE
    for answer in ('{"ok": false}', "[1, 2]", '{\n  "ok": true\n}'):
        assert taken(backend, matcher, answer) == (True, True)
    for other in (*wrong, '{"no"', "Yes."):
        # What is cut off before it goes wrong may have every token allowed, but cannot end.
        assert taken(backend, matcher, other) == (False, False), other


@pytest.mark.parametrize("case", CASES)
def test_one_call_where_several_are_not_wanted(vocabulary, case):
    kind, words, text, _ = CASES[case]
    assert taken(*grammar_and_tokens(vocabulary, kind, words, many=False), text) == (False, False)


def test_what_python_cannot_write_is_named():
    for functions in ({"get-weather": NOW}, {"f": {"properties": {"a-b": {}}}}):
        with pytest.raises(ValueError, match="-"):
            list(TOOL_PARSERS["pythonic"].grammar(CallGrammar(functions, True, lambda _: None, lambda _: "/a/")))

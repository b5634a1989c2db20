"""The formats' grammars, walked token by token: what they let a model write is what their parsers read."""

from __future__ import annotations

import itertools
import json
import re
from functools import cache

import llguidance
import pytest
import tokenizers

from jaxengine.parsers.registry import TOOL_PARSERS
from jaxengine.parsers.scan.argument_forms import argument_forms
from jaxengine.parsers.scan.call_grammar import CallGrammar
from jaxengine.parsers.scan.events import message_of
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.scheduler.base.errors import RequestError
from tests.fixtures.first_tokens import first_tokens
from tests.jaxengine.parsers import element_outputs, token_outputs
from tests.jaxengine.parsers.message_outputs import FORCED
from tests.tables import each_row

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
    "granite": (
        "granite",
        ("<|tool_call|>",),
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get", "arguments": {{}}}}]',
        ('<|tool_call|>[{"name": "then', "<|tool_call|>no"),
    ),
    "granite-20b-fc": (
        "granite-20b-fc",
        (),
        f'<function_call> {{"name": "get_weather", "arguments": {PARIS}}} \n'
        '<function_call> {"name": "get", "arguments": {}} ',
        ("<function_call> no",),
    ),
    "hunyuan": (
        "hunyuan_a13b",
        (),
        f'<tool_calls>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get", "arguments": {{}}}}]'
        "</tool_calls>",
        ("<tool_calls>no",),
    ),
    "deepseek v3": (
        "deepseek_v3",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{PARIS}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek v31": (
        "deepseek_v31",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>",),
    ),
    "kimi": (
        "kimi_k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
        + ("<|tool_calls_section_end|>",),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.get:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ("<|tool_calls_section_begin|><|tool_call_begin|>get", "<|tool_calls_section_begin|>no"),
    ),
    "qwen3 coder": (
        "qwen3_coder",
        ("<tool_call>", "</tool_call>"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=rain>\ntrue\n"
        "</parameter>\n</function>\n<function=get>\n</function>\n</tool_call>",
        ("<tool_call>\n<function=other>", "<tool_call>\n<function=get_weather>\n<parameter=rain>"),
    ),
    "glm": (
        "glm45",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>rain</arg_key>"
        "<arg_value>true</arg_value></tool_call><tool_call>get</tool_call>",
        ("<tool_call>other", "<tool_call>get_weather<arg_key>rain"),
    ),
    "minimax": (
        "minimax_m2",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        '<minimax:tool_call>\n<invoke name="get_weather"><parameter name="city">Paris</parameter>'
        '<parameter name="rain">true</parameter></invoke><invoke name="get"></invoke>\n</minimax:tool_call>',
        ('<minimax:tool_call>\n<invoke name="other',),
    ),
    "deepseek v32": (
        "deepseek_v32",
        (),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">'
        'Paris</｜DSML｜parameter><｜DSML｜parameter name="rain" string="false">true</｜DSML｜parameter>'
        "</｜DSML｜invoke>"
        '<｜DSML｜invoke name="get"></｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="other',),
    ),
    "deepseek v4 with a token": (
        "deepseek_v4",
        ("｜DSML｜",),
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">'
        'Paris</｜DSML｜parameter><｜DSML｜parameter name="rain" string="false">true</｜DSML｜parameter>'
        "</｜DSML｜invoke>"
        '<｜DSML｜invoke name="get"></｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="other',),
    ),
    "minimax m3": (
        "minimax_m3",
        ("]<]minimax[>[",),
        element_outputs.minimax_m3(TWICE),
        (']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="other',),
    ),
    "kimi k3": (
        "kimi_k3",
        ("<|open|>", "<|close|>", "<|sep|>"),
        element_outputs.kimi_k3(TWICE),
        ('<|open|>tools<|sep|><|open|>call tool="other',),
    ),
    "hy v3": (
        "hy_v3",
        ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
        "<tool_calls>\n<tool_call>get_weather<tool_sep><arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>rain"
        "</arg_key><arg_value>true</arg_value></tool_call><tool_call>get<tool_sep></tool_call>\n</tool_calls>",
        ("<tool_calls>\n<tool_call>other",),
    ),
    "hy v4": ("hy_v4", ("<tool_calls>", "</tool_calls>"), token_outputs.hy_v4(TWICE, gap="\n"), ("<tool_calls>no",)),
    "step3": (
        "step3",
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_call_end｜>",
            "<｜tool_sep｜>",
        ),
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">Paris</steptml:parameter><steptml:parameter name="rain">true'
        "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="get"></steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
        ("<｜tool_calls_begin｜>\n<｜tool_call_begin｜>get", "<｜tool_calls_end｜>"),
    ),
    "k2 horizon": (
        "k2_horizon",
        ("<ifm|tool_calls>", "</ifm|tool_calls>"),
        "<ifm|tool_calls>\n<ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Paris"
        "</ifm|arg_value><ifm|arg_key>rain</ifm|arg_key><ifm|arg_value>true</ifm|arg_value></ifm|tool_call>"
        "<ifm|tool_call>get</ifm|tool_call>\n</ifm|tool_calls>",
        ("<ifm|tool_calls>\n<ifm|tool_call>other", "</ifm|tool_calls>"),
    ),
    "plamo3": (
        "plamo3",
        ("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
        token_outputs.plamo3(TWICE),
        ("<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_name:plamo|>",),
    ),
    "gigachat3": (
        "gigachat3",
        ("<|message_sep|>", "<|role_sep|>"),
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {PARIS}}}\n'
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get", "arguments": {}}',
        ("<|message_sep|>\n\nfunction call<|role_sep|>\n[", "<|role_sep|>"),
    ),
    "gigachat3 with its token": (
        "gigachat3",
        ("<|function_call|>",),
        f'<|function_call|>{{"name": "get_weather", "arguments": {PARIS}}}\n'
        '<|function_call|>{"name": "get", "arguments": {}}',
        ('<|function_call|>{"name": "other"', "function call"),
    ),
    "gemma4": (
        "gemma4",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,rain:true}<tool_call|><|tool_call>call:get{}<tool_call|>',
        ("<|tool_call>call:other", "<|tool_call>call:get_weather{rain", '<|tool_call>call:get_weather{city:<|"|>Bonn'),
    ),
    "cohere": (
        "cohere_command3",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}}, '
        '{"tool_call_id": "1", "tool_name": "get", "parameters": {}}]<|END_ACTION|>',
        ('<|START_ACTION|>[{"tool_name',),
    ),
    "apertus": (
        "apertus",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        f'<|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"get": {{}}}}]<|tools_suffix|>',
        ('<|tools_prefix|>[{"other',),
    ),
    "internlm": (
        "internlm",
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {PARIS}}}\n<|action_end|>\n'
        '<|action_start|><|plugin|>\n{"name": "get", "parameters": {}}\n<|action_end|>',
        ('<|action_start|><|plugin|>\n{"name": "other',),
    ),
    "llama4": (
        "llama4_pythonic",
        ("<|python_start|>", "<|python_end|>"),
        '<|python_start|>[get_weather(city="Paris", rain=true), get()]<|python_end|>',
        ("<|python_start|>[other(",),
    ),
    "olmo3": (
        "olmo3",
        (),
        '<function_calls>get_weather(city="Paris", rain=true)\nget()</function_calls>',
        ("<function_calls>other(",),
    ),
}


NUM_TOKENS = 4000  # of SmolLM2's 49,152: each case reads a vocabulary, and walks all of it for a mask


@pytest.fixture(scope="module")
def vocabulary():
    """vocabulary(words): the first of SmolLM2's tokens with these, and the same for llguidance."""
    first, end = first_tokens(NUM_TOKENS)

    @cache
    def build(words):
        backend = tokenizers.Tokenizer.from_str(first)
        backend.add_tokens([tokenizers.AddedToken(word, special=word.startswith(("[", "<|", "<｜"))) for word in words])
        return backend, llguidance.LLTokenizer(backend.to_str(), eos_token=end)

    return build


def call_grammar(backend, words, functions=FUNCTIONS, many=True):
    return CallGrammar(
        functions,
        many,
        lambda word: backend.token_to_id(word) if word in words else None,
        lambda schema: StructuredOutputsParams(json=schema, whitespace_pattern=SPACE).in_lark(),
    )


def matcher_of(tokens, rules):
    matcher = llguidance.LLMatcher(tokens, "\n".join(rules), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def grammar_and_tokens(vocabulary, kind, words, many=True):
    backend, tokens = vocabulary(words)
    calls = call_grammar(backend, words, many=many)
    answer = StructuredOutputsParams(json=ANSWER, whitespace_pattern=SPACE).in_lark()
    rules = ["start: answer | calls", f"answer: {answer}", *TOOL_PARSERS[kind].grammar(calls)]
    return backend, matcher_of(tokens, rules)


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
    parser = TOOL_PARSERS[kind].open(FUNCTIONS)
    parsed = message_of([*parser.feed(text), *parser.finish()])
    assert parsed.content is None
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == TWICE
    for answer in ('{"ok": false}', "[1, 2]", '{\n  "ok": true\n}'):
        assert taken(backend, matcher, answer) == (True, True)
    for other in (*wrong, '{"no"', "Yes."):
        # What is cut off before it goes wrong may have every token allowed, but cannot end.
        assert taken(backend, matcher, other) == (False, False), other


def test_answers_of_a_choice_and_a_pattern_beside_calls(vocabulary):
    kind, words, call, _ = CASES["hermes"]
    backend, tokens = vocabulary(words)
    calls = list(TOOL_PARSERS[kind].grammar(call_grammar(backend, words)))
    for form, right, wrong in (
        ({"choice": ["yes", 'a "b" / c']}, ("yes", 'a "b" / c'), ("no", "yes/")),
        ({"regex": r"[a-c]//\/\d+\n?x"}, ("b///12x",), ("b//12x", "")),
    ):
        rules = ["start: answer | calls", f"answer: {StructuredOutputsParams(**form).in_lark()}", *calls]
        matcher = matcher_of(tokens, rules)
        for text in (*right, call):
            assert taken(backend, matcher, text) == (True, True), (form, text)
        for text in wrong:
            assert taken(backend, matcher, text)[1] is False, (form, text)
    with pytest.raises(RequestError, match="structured_outputs.grammar is only allowed without tools"):
        StructuredOutputsParams(grammar="start: /a/").in_lark()


@pytest.mark.parametrize("case", CASES)
def test_one_call_where_several_are_not_wanted(vocabulary, case):
    kind, words, text, _ = CASES[case]
    assert taken(*grammar_and_tokens(vocabulary, kind, words, many=False), text) == (False, False)


def test_what_python_cannot_write_is_named():
    for functions in ({"get-weather": NOW}, {"f": {"properties": {"a-b": {}}}}):
        with pytest.raises(ValueError, match="-"):
            list(TOOL_PARSERS["pythonic"].grammar(CallGrammar(functions, True, lambda _: None, lambda _: "/a/")))


def test_a_string_of_text_keeps_to_the_values_of_its_schema(vocabulary):
    backend, tokens = vocabulary(())
    functions = {"f": {"properties": {"a": {"enum": ["on", "off"]}, "b": {"type": ["integer", "null"]}}}}
    matcher = matcher_of(
        tokens, ["start: calls", *TOOL_PARSERS["seed_oss"].grammar(call_grammar(backend, (), functions))]
    )
    begin, end = "<seed:tool_call>\n<function=f>", "</function>\n</seed:tool_call>"
    for inside, allowed in (
        ("<parameter=a>on</parameter>", True),
        ("<parameter=a>off</parameter><parameter=b>null</parameter>", True),
        ("", True),
        ("<parameter=a>o</parameter>", False),
        ("<parameter=b>one</parameter>", False),
        ("<parameter=b>1</parameter><parameter=a>on</parameter>", False),
    ):
        assert taken(backend, matcher, begin + inside + end) == (allowed, allowed), inside


@pytest.mark.parametrize("name", FORCED)
def test_a_forced_call_of_harmony(vocabulary, name):
    """A thought and the call; nothing else, no other function, and no message of Muse to the user or the model."""
    words, thought, write = FORCED[name]
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}<|call|>"
    call = write(TWICE[:1]) if write else call
    backend, tokens = vocabulary(words)
    row = TOOL_PARSERS[name]
    matcher = matcher_of(tokens, row.forced_grammar(call_grammar(backend, words)))
    for text in (call, thought + call):
        assert taken(backend, matcher, text) == (True, True)
        parser = row.open(FUNCTIONS)
        (parsed,) = message_of([*parser.feed(text), *parser.finish()]).tool_calls
        assert (parsed.name, json.loads(parsed.arguments)) == TWICE[0]
    final = thought.replace("self", "user").replace("analysis", "final").replace("_thinking", "_text")
    not_to_tools = [call.replace("to=get_weather", f"to={one}") for one in ("self", "user", "developer") if write]
    others = [text for text in not_to_tools if "self" in thought]  # Beam's tools may have any name
    for text in (thought + thought, "Hi", final, call.replace("get_weather", "other"), call + call, *others):
        assert not taken(backend, matcher, text)[0]
    if write:  # several calls are one output, the last one ends it
        assert taken(backend, matcher, thought + write(TWICE * 2)) == (True, True)
    with pytest.raises(ValueError, match=re.escape(f"no token {words[-1]}")):
        list(row.forced_grammar(call_grammar(backend, words[:-1])))


# What schema libraries write: the root by reference, a type at its first use, a schema that contains itself.
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ENDS = {"start": POINT, "end": {"$ref": "#/properties/start"}}
SELF = {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
NAMED = {"start": POINT, "end": {"$ref": "#/definitions/Line/properties/start"}, "next": {"$ref": "#/definitions/Line"}}
REFERRING = {
    "pointers": {"properties": {**ENDS, **SELF}, "additionalProperties": False},
    "root by reference": {
        "$ref": "#/definitions/Line",
        "definitions": {"Line": {"type": "object", "properties": NAMED, "additionalProperties": False}},
    },
    "root in parts": {
        "allOf": [{"$ref": "#/$defs/Ends"}, {"properties": {"next": {"$ref": "#/$defs/Next"}}}],
        "$defs": {
            "Ends": {"properties": {"start": POINT, "end": {"$ref": "#/$defs/Ends/properties/start"}}},
            "Next": {"type": "object", "properties": {"end": POINT}},
        },
    },
}
CALLS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"{}": {}}}}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{{"name": "f", "parameters": {{"{}": {}}}}}',
    "pythonic": "[f({}={})]",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>",
}


@each_row(("kind", "root"), itertools.product(CALLS, REFERRING))
def test_references_keep_their_targets(vocabulary, kind, root):
    backend, tokens = vocabulary(("<|python_tag|>",))
    calls = call_grammar(backend, ("<|python_tag|>",), {"f": REFERRING[root]})
    matcher = matcher_of(tokens, ["start: calls", *TOOL_PARSERS[kind].grammar(calls)])
    for name, value, allowed in (
        ("end", '{"x": 3}', True),
        ("end", '{"x": "3"}', False),
        ("end", '{"y": 3}', False),
        ("next", '{"end": {"x": 3}}', True),
        ("next", '{"end": {"x": null}}', False),
    ):
        assert taken(backend, matcher, CALLS[kind].format(name, value))[1] == allowed, (name, value)


def test_arguments_that_are_alternatives(vocabulary):
    """Each combination by itself; a schema that contains itself, or doubles itself again and again, ends."""
    backend, tokens = vocabulary(())
    either = {
        "anyOf": [
            {"properties": {"a": {"const": "one"}}, "required": ["a"]},
            {"$ref": "#/$defs/B"},
            {"type": "null"},
        ],
        "$defs": {"B": {"properties": {"b": {"type": "integer"}, "c": {"$ref": "#/$defs/C"}}, "required": ["b"]}},
    }
    either["$defs"]["C"] = {"enum": ["on", "off"]}
    calls = call_grammar(backend, (), {"f": either})
    matcher = matcher_of(tokens, ["start: calls", *TOOL_PARSERS["seed_oss"].grammar(calls)])
    a, b, c = (f"<parameter={name}>{{}}</parameter>".format for name in "abc")
    for inside, allowed in (
        (a("one"), True),
        (a("two"), False),
        (b("1"), True),
        (b("1") + c("off"), True),
        (b("1") + c("of"), False),
        (c("on"), False),
        (a("one") + b("1"), False),
        ("", False),
    ):
        text = f"<seed:tool_call>\n<function=f>{inside}</function>\n</seed:tool_call>"
        assert taken(backend, matcher, text)[1] == allowed, inside
    twice = {f"{at}": {"allOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(30)}
    circle = {"$ref": "#/$defs/0", "$defs": {**twice, "30": {"properties": {"a": {"type": "integer"}}, "$ref": "#"}}}
    (form,) = argument_forms(circle)
    assert form.schema("a") == {"type": "integer"}
    with pytest.raises(ValueError, match="at most 64 combinations"):
        argument_forms({"allOf": [{"anyOf": [{"required": ["a"]}, {"required": ["b"]}]} for _ in range(30)]})

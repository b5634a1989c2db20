"""Tool parsers: what is a call, what is content, and that it does not matter how a text is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.parsers.registry import TOOL_PARSERS
from jaxengine.parsers.scan.events import ParsedMessage, message_of
from jaxengine.parsers.tools.forced import NamedToolParser, RequiredToolParser
from tests.tables import each_row

# One alphabet per format: its markers and the characters that matter to it.
JSON_PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"name"',
    '"arguments"',
    '"parameters"',
    '"f"',
    "{}",
    '{"a": 1}',
    '"',
    "\\",
]
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "\n", "null", *JSON_PIECES],
    "llama3_json": ["<|python_tag|>", "; ", "<|", "null", *JSON_PIECES],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "f", "[TOOL", *JSON_PIECES],
    "pythonic": [
        "[",
        "]",
        "f(",
        ")",
        "a=",
        "1",
        ", ",
        "'x'",
        '"',
        "{",
        "}",
        ":",
        "None",
        "\\",
        "-1.5",
        "\\u00e9",
        "(",
        "}",
    ],
    "required": ["; ", *JSON_PIECES],
}
PARSERS = {name: row.parser for name, row in TOOL_PARSERS.items() if name in PIECES} | {"required": RequiredToolParser}


def ids():
    return map(str, itertools.count())


def parse(name: str, pieces) -> ParsedMessage:
    parser = PARSERS[name](ids())
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of([*events, *parser.finish()])


def calls(message: ParsedMessage) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


CALL = '{"name": "weather", "arguments": {"city": "Paris", "days": [1, 2.5e3, true, null], "x": {"y": "}\\"<"}}}'
ARGUMENTS = {"city": "Paris", "days": [1, 2500.0, True, None], "x": {"y": '}"<'}}
PARAMETERS = CALL.replace("arguments", "parameters")


@each_row(
    ("name", "text", "content", "expected"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", None, [("weather", ARGUMENTS)]),
        ("hermes", f"Wait.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}", "Wait.\n", [("weather", ARGUMENTS)] * 2),
        ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", None, [("weather", ARGUMENTS)] * 2),
        ("hermes", f"<tool_call>{CALL}</tool_call>\nDone.", "\nDone.", [("weather", ARGUMENTS)]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>!', "!", [("f", {})]),
        ("hermes", f"<tool_call>{PARAMETERS}</tool_call>", None, [("weather", ARGUMENTS)]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
            None,
            [("f", {"a": "é"})],
        ),
        ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', None, [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null, "id": 1}</tool_call>', None, [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": nope}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "f", "id": "1"}</tool_call>', None, [("f", {})]),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', ..., []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', ..., []),
        ("hermes", "<tool_call> <tool_call", ..., []),
        ("hermes", '<tool_call>{"nom": "f"} and {"a": tru}', ..., []),
        ("hermes", "a < b <tool_cal>", ..., []),
        ("hermes", " \n ", ..., []),
        ("llama3_json", PARAMETERS, None, [("weather", ARGUMENTS)]),
        ("llama3_json", f" {PARAMETERS};\n{CALL}", None, [("weather", ARGUMENTS)] * 2),
        ("llama3_json", f"<|python_tag|>{PARAMETERS}", None, [("weather", ARGUMENTS)]),
        ("llama3_json", f"Look: <|python_tag|>{PARAMETERS}", "Look: ", [("weather", ARGUMENTS)]),
        ("llama3_json", f"{PARAMETERS} So be it", " So be it", [("weather", ARGUMENTS)]),
        ("llama3_json", f"{PARAMETERS}\n{PARAMETERS}, {PARAMETERS}", None, [("weather", ARGUMENTS)] * 3),
        ("llama3_json", f"[{PARAMETERS}, {PARAMETERS}]", None, [("weather", ARGUMENTS)] * 2),
        (
            "llama3_json",
            f"A {{x}} [1]: [{PARAMETERS}]; <|python_tag|> {PARAMETERS}.",
            "A {x} [1]: ; .",
            [("weather", ARGUMENTS)] * 2,
        ),
        ("llama3_json", f"See {PARAMETERS}", "See ", [("weather", ARGUMENTS)]),
        ("llama3_json", '[{"name": "Bob"}]', ..., []),
        ("llama3_json", "<|python_tag|>print({1: [2]})", ..., []),
        ("llama3_json", '{"name": "Bob"}', ..., []),
        ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}', ..., []),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", None, [("weather", ARGUMENTS)] * 2),
        ("mistral", f"Hm[TOOL_CALLS] [{CALL}] ok", "Hm ok", [("weather", ARGUMENTS)]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', None, [("f", {"a": 1}), ("g", {})]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}', None, [("f", {"a": 1})]),
        ("mistral", f"[TOOL_CALLS][{PARAMETERS}]", None, [("weather", ARGUMENTS)]),
        ("mistral", "[TOOL_CALLS] no call here\n{}", ..., []),
        ("mistral", "[TOOL_CALLS][1, 2]", ..., []),
        ("mistral", "[TOOL] [TOOL_CALLS", ..., []),
        ("pythonic", "[f()]", None, [("f", {})]),
        (
            "pythonic",
            "[weather(city='Pa\\'ris\\n', n=[1, -2.5, {'k': None}], ok=True,), tools.now(x=\"\\u00e9\\x41\\d\",)] bye",
            " bye",
            [("weather", {"city": "Pa'ris\n", "n": [1, -2.5, {"k": None}], "ok": True}), ("tools.now", {"x": "éA\\d"})],
        ),
        ("pythonic", "[f(a=1), g(", ", g(", [("f", {"a": 1})]),
        ("pythonic", "[f(1)]", ..., []),
        (
            "pythonic",
            "[f(a=(1, 'x'), b={1, 2}, c='a' \"b\"\n'c', d=(), e=('p'\n 'q'), "
            "g=({'k' 'l': {'s'}},), h={}, i=[(1), {(2,)}])]",
            None,
            [
                (
                    "f",
                    {
                        "a": [1, "x"],
                        "b": [1, 2],
                        "c": "abc",
                        "d": [],
                        "e": "pq",
                        "g": [{"kl": ["s"]}],
                        "h": {},
                        "i": [1, [[2]]],
                    },
                )
            ],
        ),
        ("pythonic", "[f(a={1: 2})]", ..., []),
        ("pythonic", "[f(a={'x': 1, 2})]", ..., []),
        ("pythonic", "[f(a=(,))]", ..., []),
        ("pythonic", "[1, 2]", ..., []),
        ("pythonic", "[]", ..., []),
        ("pythonic", "[f(a=__import__('os').system('x'))]", ..., []),
        ("pythonic", "[f(a=1e999)]", ..., []),
        ("pythonic", "f(a=1)", ..., []),
        ("required", f"[{PARAMETERS}, {PARAMETERS}]", None, [("weather", ARGUMENTS)] * 2),
        ("required", "[1]", ..., []),
    ],
)
def test_calls_and_content(name, text, content, expected):
    """content ...: the text as it is."""
    message = parse(name, [text])
    assert message.content == (text if content is ... else content)
    assert calls(message) == expected
    assert parse(name, text) == message


def test_arguments_come_as_they_are_written():
    parser = PARSERS["hermes"](ids())
    assert parser.feed('<tool_call>{"name": "f", "argum') == []
    kinds = [type(event).__name__ for event in parser.feed('ents": {"a": "b')]
    assert kinds == ["ToolCallStart", "ArgumentsDelta"]
    assert [event.text for event in parser.feed('c"')] == ['c"']


def test_broken_arguments_are_the_callers_to_see():
    message = parse("hermes", ['<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "bye"])
    assert message.tool_calls[0].arguments == '{"a": oops}}' and message.content == "bye"
    assert parse("llama3_json", ['{"name": "f", "parameters": {"a"']).tool_calls[0].arguments == '{"a"'
    # In a format without a word after a list, each of the words before one ends them.
    for word in ("<tool_call>", "<|tool_call|>"):
        parser, rest = TOOL_PARSERS["granite"].parser(ids()), f'{word}[{{"name": "g", "arguments": {{}}}}]'
        message = message_of([*parser.feed('[{"name": "f", "arguments": {"a": oops}}]' + rest), *parser.finish()])
        assert [(call.name, call.arguments) for call in message.tool_calls] == [("f", '{"a": oops}}]'), ("g", "{}")]


def test_a_named_function_gets_the_whole_output():
    parser = NamedToolParser(ids(), "f")
    message = message_of([*parser.feed('{"a"'), *parser.feed(": 1}"), *parser.finish()])
    assert calls(message) == [("f", {"a": 1})] and message.content is None
    parser = NamedToolParser(ids(), "f")
    assert message_of([*parser.feed(""), *parser.finish()]).tool_calls == []


@pytest.mark.parametrize("name", PIECES)
@settings(max_examples=30, deadline=None, database=None)  # test_formats.py cuts all formats
@given(data=st.data())
def test_cuts_do_not_matter(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from([*PIECES[name], " ", "x", "é"]), max_size=25)))
    whole = parse(name, [text])
    assert parse(name, text) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert parse(name, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole
    if not whole.tool_calls:
        assert (whole.content or "") == text


@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("hermes", "", "<tool_call>"),
        ("hermes", "", "<tool_call>{"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\n"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "x</tool_call"),
        ("hermes", "<tool_call>{", '"'),
        ("hermes", "", " "),
        ("llama3_json", '{"name": "f", "parameters": {"a": ', "1"),
        ("llama3_json", "", '{"name": "f", "parameters": {}};'),
        ("llama3_json", "", "[{"),
        ("llama3_json", "", '[{"a": '),
        ("llama3_json", "", "<|python_tag|>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "', "\\n"),
        ("mistral", "", "[TOOL_CALLS]["),
        ("mistral", "[TOOL_CALLS]", "f"),
        ("pythonic", "[f(a=", "["),
        ("pythonic", "[f(a=", "("),
        ("pythonic", "[f(a=", "'x' "),
        ("pythonic", "[f(a='", "\\'"),
        ("pythonic", "[", "f(a=1),"),
    ],
)
@pytest.mark.timeout(60)
def test_hostile_output_takes_linear_time(name, begin, repeated):
    """A long one at once, and a shorter one in single characters; anything quadratic takes minutes."""
    parse(name, [begin + repeated * (100_000 // len(repeated))])
    parse(name, begin + repeated * (10_000 // len(repeated)))


def test_a_megabyte_of_arguments():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x\\n é" * 200_000 + '"}}</tool_call>'
    message = parse("hermes", [text])
    assert len(json.loads(message.tool_calls[0].arguments)["a"]) == 800_000

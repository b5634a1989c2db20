"""Values between tags: where one ends, which line breaks are its own, and arguments inside of a wrapper."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from jaxengine.parsers.registry import TOOL_PARSERS
from jaxengine.parsers.scan.events import ParsedMessage, message_of
from jaxengine.parsers.tools.elements import TAG, arguments_of, elements_of
from tests.jaxengine.parsers.outputs import FORMATS, FUNCTIONS
from tests.tables import each_row

# The words that a value may contain: closing words of a parameter, of a call and of a section, and an opening word.
WORDS = {
    "qwen3_coder": ("</parameter>", "</function>", "</tool_call>", "<parameter=o>", "<parameter=n>"),
    "seed_oss": ("</parameter>", "</function>", "</seed:tool_call>", "<parameter=o>", "<parameter=n>"),
    "minimax_m2": (
        "</parameter>",
        "</invoke>",
        "</minimax:tool_call>",
        '<parameter name="o">',
        '<parameter name="n">',
    ),
    "deepseek_v32": (
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜parameter name="o" string="true">',
        '<｜DSML｜parameter name="n" string="false">',
    ),
    "glm45": ("</arg_value>", "</tool_call>", "</tool_call>", "<arg_key>o</arg_key>", "<arg_key>n</arg_key>"),
}
WORDS |= {"qwen3_xml": WORDS["qwen3_coder"], "glm47": WORDS["glm45"]}
TAGGED = list(WORDS)


def parse(name: str, pieces: Iterable[str]) -> ParsedMessage:
    parser = TOOL_PARSERS[name].open(FUNCTIONS)
    message = message_of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])
    for call in message.tool_calls:
        call.id = ""
    return message


def calls(name: str, text: str) -> list[tuple[str, object]]:
    """The calls of a text, which are the same however it is cut."""
    whole = parse(name, [text])
    for size in (1, 3):
        assert parse(name, [text[at : at + size] for at in range(0, len(text), size)]) == whole, (size, text)
    return [(call.name, json.loads(call.arguments)) for call in whole.tool_calls]


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_may_contain_the_words_of_the_format(name):
    close, end, section, other, _ = WORDS[name]
    for value in [
        *(f"a {word} b" for word in (close, end, section, other)),
        *(f"{word}x" for word in (close, end, section, other)),
        f"{close}{close}x",
        f"{end}\n{end}x",
        close[:-1],
        f"x{end[:-1]}",
    ]:
        expected = [("weather", {"city": value, "n": 3})]
        assert calls(name, FORMATS[name].write(expected)) == expected, value


@pytest.mark.parametrize("name", TAGGED)
def test_closing_words_may_be_missing(name):
    close, end, section, _, opening = WORDS[name]
    expected = [("weather", {"city": "Paris", "n": 3})]
    text = FORMATS[name].write(expected)
    lines = "\n" if name.startswith("qwen3") else ""
    assert calls(name, text.replace(lines + close, "", 1)) == expected
    assert calls(name, text.replace(close, "")) == expected
    assert calls(name, text.replace(end, "")) == expected
    if section != end:
        assert calls(name, text.replace(close, "").replace(end, "")) == expected
        assert calls(name, text.replace(close, "").replace(section, "")) == expected
    two = [*expected, ("now", {})]
    assert calls(name, FORMATS[name].write(two).replace(close, "")) == two
    # A parameter that the function has already, or does not have, is text.
    again = opening.replace("n", "city", 1) if name.startswith("glm") else opening.replace("=n", "=city")
    again = again.replace('"n"', '"city"')
    assert calls(name, FORMATS[name].write([("weather", {"city": f"a {again} b"})])) == [
        ("weather", {"city": f"a {again} b"})
    ]


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_keeps_its_own_line_breaks(name):
    values = ["Paris", "a\nb"]
    # Seed-OSS writes values on the line of their words or on lines of their own, which only the first break tells.
    values += [] if name == "seed_oss" else ["\na", "a\n", "\na\n", "\n\na\n\n", "\n"]
    for value in values:
        expected = [("weather", {"city": value, "n": 3})]
        assert calls(name, FORMATS[name].write(expected)) == expected, repr(value)


def test_parameters_of_an_unknown_schema_end_values():
    text = "<tool_call>\n<function=other>\n<parameter=a>\nx\n<parameter=b>\ny\n</parameter>\n</function>\n</tool_call>"
    assert calls("qwen3_coder", text) == [("other", {"a": "x", "b": "y"})]


INNER = {"city": "Zürich", "n": 3}


@each_row(
    ("arguments", "expected"),
    [
        ({"arguments": INNER}, INNER),
        ({"input": INNER}, INNER),
        ({"arguments": json.dumps(INNER)}, INNER),
        ({"arguments": {}}, {}),
        # Anything else stays as the model wrote it.
        ({"arguments": {"town": "x"}}, {"arguments": {"town": "x"}}),
        ({"arguments": json.dumps([1])}, {"arguments": "[1]"}),
        ({"arguments": "5"}, {"arguments": "5"}),
        ({"arguments": INNER, "n": 4}, {"arguments": INNER, "n": 4}),
        ({"n": 4, "input": INNER}, {"n": 4, "input": INNER}),
        ({"others": INNER}, {"others": INNER}),
    ],
)
def test_a_wrapper_around_all_arguments_is_removed(arguments, expected):
    assert calls("deepseek_v32", FORMATS["deepseek_v32"].write([("weather", arguments)])) == [("weather", expected)]


def test_a_function_may_have_a_parameter_of_a_wrappers_name():
    functions = {"run": {"type": "object", "properties": {"input": {"type": "object"}}}}
    parser = TOOL_PARSERS["deepseek_v32"].open(functions)
    text = FORMATS["deepseek_v32"].write([("run", {"input": {"input": {}}})])
    message = message_of([*parser.feed(text), *parser.finish()])
    assert json.loads(message.tool_calls[0].arguments) == {"input": {"input": {}}}


@each_row(
    ("kind", "is_string", "written", "expected"),
    [
        ("integer", "true", "42", 42),
        ("integer", "true", "many", "many"),
        (["object", "null"], "true", '{"a": 1}', {"a": 1}),
        (["string", "integer"], "true", "42", "42"),
        (["string", "null"], "false", "null", None),
        ("string", "false", "null", "null"),
        ("string", "false", "42", "42"),
        ("integer", "false", "42", 42),
    ],
)
def test_a_schema_counts_more_than_whether_the_model_says_that_a_value_is_a_string(kind, is_string, written, expected):
    functions = {"run": {"type": "object", "properties": {"a": {"type": kind}}}}
    for name, space in ("deepseek_v32", ""), ("deepseek_v41", " "):
        text = (
            f'<｜DSML｜{space}invoke name="run">\n<｜DSML｜{space}parameter name="a" string="{is_string}">{written}'
            f"</｜DSML｜{space}parameter>\n</｜DSML｜{space}invoke>"
        )
        parser = TOOL_PARSERS[name].open(functions)
        message = message_of([*parser.feed(text), *parser.finish()])
        assert json.loads(message.tool_calls[0].arguments) == {"a": expected}


def test_elements_under_a_schema_that_contains_itself():
    """Which would have three times as many schemas at each level, if each were followed on every way to it."""
    schema = {"properties": {"a": {"$ref": "#"}, "b": {"items": {"type": "integer"}}}}
    schema["anyOf"] = [{"properties": {"a": {"$ref": "#"}}} for _ in range(2)]
    depth = 60
    body = f"{TAG}<a>" * depth + f"{TAG}<b>{TAG}<item>1{TAG}</item>{TAG}</b>" + f"{TAG}</a>" * depth
    elements, is_whole = elements_of(body)
    assert is_whole
    assert arguments_of(elements, schema) == '{"a": ' * depth + '{"b": [1]}' + "}" * depth

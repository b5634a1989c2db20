"""Texts of custom tools: what the model wrote as arguments, and what a forced call is, cut anywhere."""

from __future__ import annotations

import json
import re

from jaxengine.parsers.registry import call_ids
from jaxengine.parsers.scan.events import message_of
from jaxengine.parsers.tools.forced import NamedTextParser, RequiredTextParser
from jaxengine.requests.structured.structural_tags import lark_regex
from jaxengine.server.http.responses.text_input import TextInput
from tests.tables import each_row


def pieces_of(text: str):
    """The text in two pieces, cut everywhere, and in pieces of one and of three characters."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield from ([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 3))


@each_row(
    ("arguments", "text"),
    [
        (json.dumps({"input": 'a\n"b" \\ ü 😀 \u2028'}), 'a\n"b" \\ ü 😀 \u2028'),
        (json.dumps({"input": 'a\n"b" \\ ü 😀'}, ensure_ascii=False), 'a\n"b" \\ ü 😀'),
        ('{"input": "line\nbreak\ttab"}', "line\nbreak\ttab"),
        (' { "input" : "x" , "input": "y"}', "x"),
        ('{"input": "\\ud83d\\u0041 \\ud83d\\ud83d\\ude00 \\ude00"}', "\ufffdA \ufffd😀 \ufffd"),
        ('{"input": "\\u12 \\u \\uD83 \\x"}', "\\u12 \\u \\uD83 \\x"),
        ('{"input": "cut off \\ud83d', "cut off "),
        ('{"input": "cut off \\', "cut off "),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ('{"inputs": "a"}', "a"),
        ('"only a text"', "only a text"),
        ("*** Begin Patch\n{", "*** Begin Patch\n{"),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_the_text_of_arguments(arguments, text):
    for pieces in pieces_of(arguments):
        reader = TextInput()
        assert "".join(map(reader.feed, pieces)) + reader.finish() == text, pieces


@each_row(
    ("output", "calls"),
    [
        ('{"name": "c"}\nline\n"ü"\\', [("c", {"input": 'line\n"ü"\\'})]),
        ('[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]', [("f", {"a": 1}), ("g", {})]),
    ],
)
def test_a_required_call(output, calls):
    for pieces in pieces_of(output):
        parser = RequiredTextParser(call_ids())
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        message = message_of(events)
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls, pieces
        assert message.content is None


@each_row("output", ["", '{"name"', '{"name": 7}\nx', "{\nx"])
def test_what_is_no_required_call_is_content(output):
    parser = RequiredTextParser(call_ids())
    message = message_of(parser.feed(output) + parser.finish())
    assert (message.content or "") == output and not message.tool_calls


def test_a_named_call():
    for pieces in pieces_of('a\n"ü"\\'):
        parser = NamedTextParser(call_ids(), "c")
        message = message_of([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert json.loads(message.tool_calls[0].arguments) == {"input": 'a\n"ü"\\'}


@each_row(
    ("regex", "texts"), [("a/b", ["a/b"]), (r"a\/b\\/", ["a/b\\/"]), ("a\nb\\\nc", ["a\nb\nc"]), (r"\[/]", ["[/]"])]
)
def test_a_regular_expression_is_quoted(regex, texts):
    pattern = lark_regex(regex)[1:-1]
    assert not re.search(r"(?<!\\)(?:\\\\)*/|\n", pattern)
    assert all(re.fullmatch(pattern, text) for text in texts)

"""Reasoning parsers, and both kinds of parser one behind the other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.config.engine_config import ConfigError
from jaxengine.parsers.events import message_of
from jaxengine.parsers.message import MessageParser
from jaxengine.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, reasoning_format, tool_format

PROMPT = "user: hi\nassistant:"


def parse(name: str, pieces, prompt: str = PROMPT, tools=None):
    parser = MessageParser(REASONING_PARSERS[name].open(prompt), tools)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of([*events, *parser.finish()])


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", PROMPT, "<think>a</think>b", "a", "b"),
        ("qwen3", PROMPT, "\n<think>\na\n</think>\n\nb<think>c", "\na\n", "\n\nb<think>c"),
        ("qwen3", PROMPT, "<think>cut off", "cut off", None),
        ("qwen3", PROMPT, "no </think> thought", None, "no </think> thought"),
        ("qwen3", PROMPT, "<thi", None, "<thi"),
        ("qwen3", PROMPT + "<think>\n", "a</think>b", "a", "b"),
        ("qwen3", "say <think>" + PROMPT, "b", None, "b"),
        ("deepseek_r1", PROMPT, "a</think>b", "a", "b"),
        ("deepseek_r1", PROMPT, "<think>a</think>b", "a", "b"),
        ("deepseek_r1", PROMPT, "all of it", "all of it", None),
        ("deepseek_r1", PROMPT, "a</thin", "a</thin", None),
        ("deepseek_r1", PROMPT + "<think>\n\n</think>\n\n", "b", None, "b"),
        ("mistral", PROMPT, "[THINK]a[/THINK]b", "a", "b"),
    ],
)
def test_the_split(name, prompt, text, reasoning, content):
    message = parse(name, [text], prompt)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert parse(name, text, prompt) == message


@pytest.mark.parametrize("name", REASONING_PARSERS)
@settings(max_examples=100, deadline=None, database=None)
@given(pieces=st.lists(st.sampled_from(["<think>", "</think>", "[THINK]", "[/THINK]", "<", "[", "</th", " ", "x"])))
def test_cuts_do_not_matter_and_nothing_is_lost(name, pieces):
    text = "".join(pieces)
    whole = parse(name, [text])
    assert parse(name, text) == parse(name, pieces) == whole
    kept = (whole.reasoning or "") + (whole.content or "")
    row = REASONING_PARSERS[name]
    words = [("", ""), (row.begin, ""), ("", row.end), (row.begin, row.end)]
    # White space before the opening word goes with it.
    allowed = [text.replace(begin, "", 1).replace(end, "", 1).replace(" ", "") for begin, end in words]
    assert kept.replace(" ", "") in allowed


def test_calls_inside_reasoning_are_thoughts():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = map(str, itertools.count())
    message = parse("qwen3", [f"<think>{call}</think>\n\n{call}"], tools=TOOL_PARSERS["hermes"].parser(ids))
    assert message.reasoning == call and message.content is None
    assert [(each.id, each.name, each.arguments) for each in message.tool_calls] == [("0", "f", "{}")]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="hermes, llama3_json"):
        tool_format("herms")
    with pytest.raises(ConfigError, match="deepseek_r1, qwen3"):
        reasoning_format("qwen")
    assert tool_format(None) is None and reasoning_format(None) is None


def test_ids_are_new_and_of_the_models_form():
    first, second = itertools.islice(TOOL_PARSERS["mistral"].ids(), 2)
    assert first != second and len(first) == 9 and first.isalnum()
    assert next(TOOL_PARSERS["hermes"].ids()).startswith("chatcmpl-tool-")

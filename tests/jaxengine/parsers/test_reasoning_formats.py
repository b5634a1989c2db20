"""Every format of reasoning: recorded outputs, with and without calls behind them, cut anywhere."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from jaxengine.parsers.events import ParsedMessage, message_of
from jaxengine.parsers.message import MessageParser
from jaxengine.parsers.reasoning_think import ThinkFormat
from jaxengine.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.jaxengine.parsers.outputs import FUNCTIONS
from tests.jaxengine.parsers.reasoning_outputs import Thought, outputs, tools
from tests.jaxengine.parsers.test_formats import FORMATS, cut

NUM_CUTS, NUM_CUTS_THOROUGH = 200, 10_000


def parse(name: str, pieces, output: Thought, *, calls: bool = True) -> ParsedMessage:
    reasoning = REASONING_PARSERS[name].format.open(output.prompt or "", output.continued)
    row, ids = TOOL_PARSERS[tools(name)], map(str, itertools.count())
    reader = row.parser(ids, FUNCTIONS) if row.typed else row.parser(ids)
    parser = MessageParser(reasoning, reader if calls else None)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of([*events, *parser.finish()])


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_recorded_outputs(name):
    recorded = outputs(name)
    assert len({(each.prompt, each.continued, each.text) for each in recorded}) >= 20
    for output in recorded:
        message = parse(name, [output.text], output)
        assert (message.reasoning, message.content) == (output.reasoning, output.content), output
        found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        assert found == list(output.calls), output
        if not output.calls:
            assert parse(name, [output.text], output, calls=False) == message, output


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_cuts_do_not_matter(name, thorough):
    """At every place of every recorded output, and at random ones of them and of what nobody would write."""
    draw, recorded, row = random.Random(name), outputs(name), REASONING_PARSERS[name].format
    words = [*row.begins, *row.ends, *row.calls, *(row.answer or ())] if isinstance(row, ThinkFormat) else []
    words += [*FORMATS[tools(name)].pieces, *(word[: len(word) // 2] for word in words), "\n", " ", "x", "é", "<"]
    for output in recorded:
        assert parse(name, output.text, output) == parse(name, [output.text], output), output
    for _ in range(NUM_CUTS_THOROUGH if thorough else NUM_CUTS):
        output = draw.choice(recorded)
        text = output.text
        if draw.random() < 0.5:
            text = "".join(draw.choices(words, k=draw.randint(1, 20)))
        if draw.random() < 0.3:
            text = text[: draw.randint(0, len(text))]
        places = [draw.randint(0, len(text)) for _ in range(draw.randint(1, 6))]
        calls = draw.random() < 0.7
        whole = parse(name, [text], output, calls=calls)
        assert parse(name, cut(text, places), output, calls=calls) == whole, (text, places, output)


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"So.\n{CALL}", "So.\n", CALL),
        (f"So.\n{CALL}\n{CALL}\n", "So.\n", f"{CALL}\n{CALL}\n"),
        (f"I write <tool_call> tags. Now.\n{CALL}", "I write <tool_call> tags. Now.\n", CALL),
        (f"{CALL} No, better:\n{CALL}", f"{CALL} No, better:\n", CALL),
        ("I wrap it in <tool_call> and </tool_call>", "I wrap it in <tool_call> and </tool_call>", None),
        ("</tool_call>", "</tool_call>", None),
        (f"So.\n{CALL} and", f"So.\n{CALL} and", None),
    ],
)
def test_only_calls_that_an_output_ends_with_end_qwen3s_thoughts(text, reasoning, content):
    for pieces in ([f"<think>{text}"], f"<think>{text}"):
        message = parse("qwen3", pieces, Thought("", ""), calls=False)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_where_calls_are_not_read_none_end_thoughts():
    for name, call in (("qwen3", CALL), ("kimi_k2", "<|tool_calls_section_begin|>x")):
        parser = REASONING_PARSERS[name].format.open("", calls=False)
        message = message_of([*parser.feed(f"<think>So.{call}"), *parser.finish()])
        assert (message.reasoning, message.content) == (f"So.{call}", None)

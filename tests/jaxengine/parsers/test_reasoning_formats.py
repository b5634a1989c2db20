"""Every format of reasoning: recorded outputs, with and without calls behind them, cut anywhere."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from jaxengine.parsers.message import MessageParser
from jaxengine.parsers.reasoning.think import ThinkFormat
from jaxengine.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from jaxengine.parsers.scan.call_start import CallStarts
from jaxengine.parsers.scan.events import ParsedMessage, message_of
from tests.jaxengine.parsers.outputs import FUNCTIONS
from tests.jaxengine.parsers.reasoning_outputs import NAMES, SAME, Thought, outputs, tools
from tests.jaxengine.parsers.test_formats import FORMATS, cut

NUM_CUTS, NUM_CUTS_THOROUGH = 100, 10_000


def parse(name: str, pieces, output: Thought, *, calls: bool = True) -> ParsedMessage:
    row, ids = TOOL_PARSERS[tools(name)], map(str, itertools.count())
    starts = row.call_starts(FUNCTIONS) if calls else None
    reasoning = REASONING_PARSERS[name].format.open(output.prompt or "", output.continued, calls=starts)
    reader = row.parser(ids, FUNCTIONS) if row.typed else row.parser(ids)
    parser = MessageParser(reasoning, reader if calls else None)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of([*events, *parser.finish()])


def test_formats_with_the_same_words_are_one():
    assert {*NAMES, *itertools.chain(*SAME.values()), "beam"} == REASONING_PARSERS.keys()
    for name, others in SAME.items():
        assert all(REASONING_PARSERS[other].format == REASONING_PARSERS[name].format for other in others)


def test_beams_calls_are_xml_and_gpt_oss_writes_its_own_tools_so():
    call = " to=python<|channel|>analysis <|constrain|>xml<|message|>1<|call|>"
    for name, message in (("beam", (None, call)), ("openai_gptoss", ("1", None))):
        parser = REASONING_PARSERS[name].format.open("", calls=CallStarts(("f",)))
        found = message_of([*parser.feed(call), *parser.finish()])
        assert (found.reasoning, found.content) == message, name


@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("name", NAMES)
def test_cuts_do_not_matter(name, thorough):
    """At every place of every recorded output, and at random ones of them and of what nobody would write."""
    draw, recorded, row = random.Random(name), outputs(name), REASONING_PARSERS[name].format
    words = [*row.begins, *row.ends, *row.calls, *sum(row.answer or (), ())] if isinstance(row, ThinkFormat) else []
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


CALLS = [("now", {}), ("weather", {"city": "a</think>b", "n": 3})]
# Formats whose tool parser has words before a call, and a reasoning parser that goes with it.
THINKING_TOOLS = [
    *((name, tools(name)) for name in NAMES if TOOL_PARSERS[tools(name)].starts is not None),
    ("qwen3", "qwen3_coder"),
    ("deepseek_v3", "deepseek_v32"),
]


def thought(name: str, kind: str, thoughts: str) -> ParsedMessage:
    """Return the message of thoughts that have no end, which is the same however the text is cut."""
    row, format = TOOL_PARSERS[kind], REASONING_PARSERS[name].format
    assert isinstance(format, ThinkFormat)
    messages = []
    for size in (len(thoughts), 1, 3):
        parser = MessageParser(
            format.open(format.begins[0], calls=row.call_starts(FUNCTIONS)),
            row.parser(map(str, itertools.count()), *([FUNCTIONS] if row.typed else [])),
        )
        pieces = [thoughts[at : at + size] for at in range(0, len(thoughts), size)]
        messages.append(message_of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]))
        assert messages[0] == messages[-1], (size, thoughts)
    return messages[0]


@pytest.mark.parametrize(("name", "kind"), THINKING_TOOLS)
def test_a_call_ends_thoughts(name, kind):
    written = FORMATS[kind].write(CALLS)
    for thoughts in ("Hm.\n", f"I could use {written[:12]} here, as {written[:12]}.\n", written[:12] * 2 + "\n"):
        message = thought(name, kind, thoughts + written)
        found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        if REASONING_PARSERS[name].format.shown:  # thoughts and calls are content
            assert found[-2:] == CALLS
        else:
            assert (message.reasoning, message.content, found) == (thoughts, None, CALLS)


@pytest.mark.parametrize(("name", "kind"), THINKING_TOOLS)
def test_thoughts_may_speak_of_calls(name, kind):
    """Words without a function of the request end nothing, nor does half a beginning at the end of the output."""
    format = REASONING_PARSERS[name].format
    unknown = FORMATS[kind].write([("nowhere", {}), ("no", {})])
    if format.shown or any(word in unknown for word in format.calls):
        return
    end = format.ends[0]
    written = FORMATS[kind].write(CALLS[:1])
    half = written[: written.index("now") + 2]
    for thoughts in (f"I could write {unknown} then.", f"{half} is what I might write", half):
        message = thought(name, kind, thoughts)
        assert (message.reasoning, message.content, message.tool_calls) == (thoughts, None, [])
        message = thought(name, kind, f"{thoughts}{end}Hi")
        assert (message.reasoning, message.content, message.tool_calls) == (thoughts, "Hi", [])


@pytest.mark.parametrize(("name", "kind"), [("glm45", "glm45"), ("qwen3", "hermes"), ("minimax_m2", "minimax_m2")])
def test_the_word_that_ends_thoughts_may_come_after_the_call(name, kind):
    written = FORMATS[kind].write(CALLS)
    for after, content in (
        ("</think>", None),
        ("\n</think>\n\n", None),
        ("\n</think>\n\nDone.", "\n\nDone."),
        (" So.</think> Done.", " So. Done."),
        ("</think>a</think>b", "a</think>b"),
        ("</thin", "</thin"),
    ):
        message = thought(name, kind, f"Hm.{written}{after}")
        assert (message.reasoning, message.content) == ("Hm.", content), after
        assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == CALLS
    message = thought(name, kind, f"Hm.{written}</think>\n{written}")
    assert message.content is None and len(message.tool_calls) == 4


def test_where_calls_are_not_read_none_end_thoughts():
    for name, kind in THINKING_TOOLS:
        format = REASONING_PARSERS[name].format
        assert isinstance(format, ThinkFormat)
        text = f"So.{FORMATS[kind].write([('now', {})])}"
        parser = format.open(format.begins[0])
        message = message_of([*parser.feed(text), *parser.finish()])
        assert format.shown or (message.reasoning, message.content) == (text, None)

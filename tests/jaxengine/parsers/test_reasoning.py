"""Reasoning parsers, and both kinds of parser one behind the other."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.config.engine_config import ConfigError
from jaxengine.parsers.message import MessageParser
from jaxengine.parsers.reasoning.think import ThinkFormat
from jaxengine.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    by_template,
    reasoning_format,
    suffix_of,
    tool_format,
)
from jaxengine.parsers.scan.call_start import CallStarts
from jaxengine.parsers.scan.events import message_of
from jaxengine.requests.structured.params import StructuredOutputsParams
from tests.jaxengine.parsers.outputs import FORMATS
from tests.jaxengine.parsers.reasoning_outputs import NAMES
from tests.jaxengine.parsers.token_outputs import hy_v4
from tests.tables import each_row

PROMPT = "user: hi\nassistant:"


def parse(name: str, pieces, prompt: str = PROMPT, tools=None):
    parser = MessageParser(REASONING_PARSERS[name].format.open(prompt, calls=CallStarts(())), tools)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return message_of([*events, *parser.finish()])


@each_row(
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
        ("deepseek_v3", PROMPT + "<think>", "a</think>b", "a", "b"),
        ("deepseek_v3", PROMPT + "</think>", "b", None, "b"),
        ("granite", PROMPT, "Here is my thought process: a Here is my response: b", " a ", " b"),
        ("granite", PROMPT, "Here's my thought process: a Here's my response: b", " a ", " b"),
        ("granite", PROMPT, "Here is my cat", None, "Here is my cat"),
        ("seed_oss", PROMPT, "<seed:think>a</seed:think>b", "a", "b"),
        (
            "seed_oss",
            PROMPT + "<seed:think><seed:cot_budget_reflect>0</seed:cot_budget_reflect></seed:think>",
            "b",
            None,
            "b",
        ),
        (
            "seed_oss",
            PROMPT + "<seed:think><seed:cot_budget_reflect>",
            "none</seed:cot_budget_reflect></seed:think>b",
            "none</seed:cot_budget_reflect>",
            "b",
        ),
        ("hunyuan_a13b", PROMPT, "<think>\na\n</think>\n<answer>\nb\nc\n</answer>", "\na\n", "b\nc"),
        ("hunyuan_a13b", PROMPT, "<think>\n\n</think>\n<answer>b</answer>\n<tool_calls>", "\n\n", "b\n<tool_calls>"),
        ("hunyuan_a13b", PROMPT, "<think>a</think>b</answer>", "a", "b</answer>"),
        ("hunyuan_a13b", PROMPT, "<think>a</think><answer>b\n</ans", "a", "b\n</ans"),
        ("ernie45", PROMPT + "<think>\n", "a\n</think>\n\n\n<response>\nb\n</response>\n", "a\n", "b"),
        ("ernie45", PROMPT + "<think>\n", "a</think>\n\n<tool_call>", "a", "\n\n<tool_call>"),
        ("ernie45", PROMPT, "<resp", None, "<resp"),
        ("olmo3", PROMPT + "<think>", "a</think>b", "a", "b"),
        ("kimi_k2", PROMPT, "<think>a</think>b", "a", "b"),
        ("kimi_k2", PROMPT, "<think>a<|tool_calls_section_begin|>b", "a", "<|tool_calls_section_begin|>b"),
        ("minimax_m2", PROMPT + "<think>\n", "a</think>b", "a", "b"),
        ("minimax_m2_append_think", PROMPT + "<think>\n", "a</think>b", None, "<think>a</think>b"),
        (
            "openai_gptoss",
            PROMPT,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            "a",
            "b",
        ),
        ("openai_gptoss", PROMPT, "<|channel|>final <|constrain|>json<|message|>{}<|return|>", None, "{}"),
        ("openai_gptoss", PROMPT, "<|channel|>analysis<|message|>cut", "cut", None),
        ("openai_gptoss", PROMPT, "<|channel|>analysis to=browser.search code<|message|>a<|call|>", "a", None),
        (
            "openai_gptoss",
            PROMPT,
            "<|channel|>commentary<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>c",
            None,
            "b\nc",
        ),
        ("openai_gptoss", PROMPT, "plain < text", None, "plain < text"),
        ("openai_gptoss", PROMPT, "<|channel|>final", None, "<|channel|>final"),
    ],
)
def test_the_split(name, prompt, text, reasoning, content):
    message = parse(name, [text], prompt)
    assert (message.reasoning, message.content) == (reasoning, content)
    assert parse(name, text, prompt) == message


HARMONY = ["<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "analysis", "final", " to=functions.f", "<|"]
INKLING = FORMATS["inkling"].pieces


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, database=None)
@given(data=st.data())
def test_cuts_do_not_matter_and_nothing_is_lost(name, data):
    row = REASONING_PARSERS[name].format
    thinks = isinstance(row, ThinkFormat)
    words = INKLING if name == "inkling" else HARMONY
    if thinks:
        words = [*row.begins, *row.ends, *row.calls, *sum(row.answer or (), ())]
    pieces = data.draw(st.lists(st.sampled_from([*words, *[word[:4] for word in words], "<", "[", "\n", " ", "x"])))
    text = "".join(pieces)
    whole = parse(name, [text])
    assert parse(name, text) == parse(name, pieces) == whole
    if not thinks or row.answer or row.shown:
        return
    kept = (whole.reasoning or "") + (whole.content or "")
    # White space before the opening word goes with it.
    taken = itertools.product(("", *row.begins), ("", *row.ends))
    assert _bare(kept) in [_bare(text.replace(begin, "", 1).replace(end, "", 1)) for begin, end in taken]


def _bare(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_long_output(name, thorough):
    """A hundred kilobytes; with --thorough megabytes, for which anything quadratic takes minutes."""
    thoughts, words = (200_000, 10_000) if thorough else (20_000, 1000)
    row = REASONING_PARSERS[name].format
    begin, end = HARMONY[1] + "analysis<|message|>", "<|end|>"
    if isinstance(row, ThinkFormat):
        begin, end = row.begins[0], row.ends[0]
    elif name == "inkling":
        begin, end = "<|content_thinking|>", "<|end_message|>"
    text = begin + "x < é\n" * thoughts + end + "y < \n" * words
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    message = parse(name, pieces)
    kept = (message.reasoning or "") + (message.content or "")
    assert _bare(kept).count("x<é") == thoughts and _bare(kept).count("y<") == words


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "begin", "ends"),
    [
        ("qwen3", PROMPT, "", "<think>", True),
        ("qwen3", PROMPT + "<think>\n", "", None, True),
        ("qwen3", PROMPT + "<think>\n\n</think>\n\n", "", None, False),
        ("qwen3", PROMPT, "<think>a", None, True),
        ("qwen3", PROMPT, "<think>a</think>b", None, False),
        ("qwen3", PROMPT, "The answer", None, False),
        ("deepseek_r1", PROMPT, "", None, True),
        ("deepseek_r1", PROMPT + "</think>", "", None, False),
        ("openai_gptoss", PROMPT, "", None, True),
        ("granite", PROMPT, "", "Here is my thought process:", True),
        ("kimi_k2", PROMPT, "", "<think>", True),
        ("inkling", PROMPT, "", "<|content_thinking|>", True),
        ("inkling", "<|message_system|>tool_declare<|content_xml|>[]<|end_message|>", "", None, True),
        ("inkling", PROMPT, "So", None, False),
    ],
)
def test_what_a_grammar_waits_for(name, prompt, continued, begin, ends):
    waits = REASONING_PARSERS[name].format.waits_for(prompt, continued)
    assert bool(waits) == ends and waits.get("reasoning_begin") == begin
    if waits and name not in ("openai_gptoss", "inkling"):
        assert waits["reasoning_end"] == REASONING_PARSERS[name].format.ends
    StructuredOutputsParams(regex="a", **waits)


def test_harmony_through_both_parsers():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    for pieces in ([text], text):
        ids = map(str, itertools.count())
        message = parse("openai_gptoss", pieces, tools=TOOL_PARSERS["openai"].parser(ids, ()))
        assert (message.reasoning, message.content) == ("Hm.", "I look.")
        assert [(each.name, each.arguments) for each in message.tool_calls] == [("f", '{"a": 1}')]


@each_row(
    ("recipient", "called"),
    [
        ("python", None),
        ("browser.search", None),
        ("container.exec", None),
        ("weather", "weather"),
        ("weathers", None),
        ("functions.python", "python"),
        ("functions.browser.search", "browser.search"),
        ("functions.anything", "anything"),
        ("functions.", None),
    ],
)
def test_harmonys_own_tools_are_never_functions_without_the_prefix(recipient, called):
    functions = ("weather", "python", "browser.search", "container.exec")
    text = f"<|start|>assistant to={recipient}<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>"
    for size in (len(text), 1, 3):
        tools = TOOL_PARSERS["openai"].open(dict.fromkeys(functions, {}))
        format = REASONING_PARSERS["openai_gptoss"].format
        parser = MessageParser(format.open("", calls=CallStarts(functions)), tools)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        message = message_of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])
        assert [call.name for call in message.tool_calls] == ([called] if called else [])
        assert (message.reasoning, message.content) == (None if called else "{}", None)


def test_calls_of_no_function_inside_reasoning_are_thoughts():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = map(str, itertools.count())
    message = parse("qwen3", [f"<think>{call}</think>\n\n{call}"], tools=TOOL_PARSERS["hermes"].parser(ids))
    assert message.reasoning == call and message.content is None
    assert [(each.id, each.name, each.arguments) for each in message.tool_calls] == [("0", "f", "{}")]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="hermes, qwen3_json"):
        tool_format("herms")
    with pytest.raises(ConfigError, match="auto, deepseek_r1, deepseek_v3"):
        reasoning_format("qwen")
    assert tool_format(None) is None and reasoning_format(None) is None
    assert tool_format("auto") is None and reasoning_format("auto") is None


@pytest.mark.parametrize("rows", [TOOL_PARSERS, REASONING_PARSERS], ids=["tools", "reasoning"])
def test_a_template_tells_the_format(rows):
    """By the row's own words, whatever other rows have; none where no row has all of its words in it."""
    for name, row in rows.items():
        if row.template:
            chosen = by_template(rows, "\n".join(row.template))
            assert chosen is not None and rows[chosen] is row, (name, chosen)
            assert by_template(rows, row.template[0][:3]) is None
    assert by_template(rows, "") is None


def test_ids_are_new_and_of_the_models_form():
    first, second = itertools.islice(TOOL_PARSERS["mistral"].ids(), 2)
    assert first != second and len(first) == 9 and first.isalnum()
    assert next(TOOL_PARSERS["hermes"].ids()).startswith("chatcmpl-tool-")


def test_a_checkpoint_may_write_words_with_a_suffix_of_its_own():
    suffix = suffix_of(["<s>", "<tool_calls:6124>", "<think:6124>"])
    assert suffix == ":6124" and suffix_of(["<think>", "<x:1>"]) == ""
    assert tool_format("hy_v3", suffix) is TOOL_PARSERS["hy_v3"] and tool_format("hy_v4") is TOOL_PARSERS["hy_v4"]
    calls, thinking = tool_format("hy_v4", suffix), reasoning_format("hy_v4", suffix)
    assert calls is not None and thinking is not None
    for wanted in ([("f", {"a": "<b>"}), ("f", {})], [("f", {"a": "x </tool_call> y"})]):
        text = "It may <think>.</think:6124>Yes." + hy_v4(wanted, suffix)
        for pieces in ([text], list(text)):
            tools = calls.open({"f": {"properties": {"a": {"type": "string"}}}})
            parser = MessageParser(thinking.open("Hi<think:6124>", calls=calls.call_starts(("f",))), tools)
            found = message_of([*(event for each in pieces for event in parser.feed(each)), *parser.finish()])
            assert (found.reasoning, found.content) == ("It may <think>.", "Yes.")
            assert [(each.name, json.loads(each.arguments)) for each in found.tool_calls] == wanted
    assert reasoning_format("hy_v4") == REASONING_PARSERS["hy_v3"].format


@each_row(
    ("text", "content"),
    [
        ("<think>a b</think>", "a b"),
        ("<think>a b</think>\n", "\na b"),
        ("<think>a b", "a b"),
        ("<think>a b</think>c", "c"),
        ('<think>a b</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', None),
    ],
)
def test_reasoning_is_the_content_of_a_message_that_may_not_be_empty(text, content):
    for pieces in ([text], list(text)):
        tools, calls = TOOL_PARSERS["hermes"].open({"f": {}}), CallStarts(("f",))
        parser = MessageParser(REASONING_PARSERS["nemotron_v3"].format.open("", calls=calls), tools, True)
        found = message_of([*(event for each in pieces for event in parser.feed(each)), *parser.finish()])
        assert (found.reasoning, found.content, bool(found.tool_calls)) == ("a b", content, content is None)


@each_row(
    ("prompt", "closing"),
    [
        ("<ifm|think>", "</ifm|think>"),
        ("<ifm|think_fast>\n", "</ifm|think_fast>"),
        ("<ifm|think_faster>", "</ifm|think_faster>"),
        (PROMPT, "</ifm|think>"),
    ],
)
def test_a_limit_closes_with_the_word_of_what_the_prompt_opens(prompt, closing):
    limited = REASONING_PARSERS["k2_horizon"].format.limited_by
    assert limited(prompt)["closing"] == closing == limited(prompt, "I think")["closing"]
    assert limited("<ifm|assistant>", f"{prompt}I think")["closing"] == closing

"""Every format of tool calls: recorded outputs, cut anywhere and broken off anywhere, and outputs that are hostile."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import partial

import pytest

from jaxengine.parsers.registry import TOOL_PARSERS
from jaxengine.parsers.scan.events import ParsedCall, ParsedMessage, message_of
from jaxengine.parsers.scan.harmony import INVOKE, TEXT, THINKING, InklingHeader
from jaxengine.parsers.tools.sections import KIMI_K2
from tests.jaxengine.parsers.outputs import FUNCTIONS, common
from tests.jaxengine.parsers.token_outputs import ALL_FORMATS as FORMATS
from tests.tables import each_row

NUM_CUTS, NUM_CUTS_THOROUGH = 60, 10_000


def parser_of(name: str) -> tuple[object, ...]:
    """Return the class and the words of a format's parser, by which it differs from others."""
    parser = TOOL_PARSERS[name].parser
    return (parser.func, *sorted(parser.keywords.items())) if isinstance(parser, partial) else (parser,)


# The first of those that share a parser.
NAMES = list({parser_of(name): name for name in reversed(FORMATS)}.values())[::-1]


def parse(name: str, pieces) -> ParsedMessage:
    parser = TOOL_PARSERS[name].open(FUNCTIONS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    message = message_of([*events, *parser.finish()])
    for at, call in enumerate(message.tool_calls):
        call.id = str(at) if call.id.startswith("chatcmpl-tool-") or name == "mistral" else call.id
    return message


def cut(text: str, places) -> list[str]:
    return [text[begin:end] for begin, end in itertools.pairwise([0, *sorted(places), len(text)])]


def outputs(name: str):
    return [*common(FORMATS[name]), *FORMATS[name].odd]


def test_every_parser_has_outputs():
    assert FORMATS.keys() == TOOL_PARSERS.keys()
    assert all(len({text for text, _, _ in outputs(name)}) >= 20 for name in FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_outputs(name):
    for text, calls, content in outputs(name):
        message = parse(name, [text])
        found = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
        assert found == calls, text
        kept = message.content or ""
        assert kept.strip() == (text if content is ... else content or "").strip(), text
        # Types as well: True is 1 to Python.
        assert json.dumps([each[1] for each in found]) == json.dumps([each[1] for each in calls])


@pytest.mark.parametrize("name", NAMES)
def test_cuts_do_not_matter(name, thorough):
    """At every place of every recorded output, and at random ones of outputs that nobody would write."""
    draw = random.Random(name)
    texts = [text for text, _, _ in outputs(name)]
    for text in texts:
        assert parse(name, text) == parse(name, [text]), text
    for _ in range(NUM_CUTS_THOROUGH if thorough else NUM_CUTS):
        text = draw.choice(texts)
        if draw.random() < 0.5:
            text = "".join(draw.choices([*FORMATS[name].pieces, " ", "x", "é"], k=draw.randint(1, 20)))
        if draw.random() < 0.3:
            text = text[: draw.randint(0, len(text))]
        places = [draw.randint(0, len(text)) for _ in range(draw.randint(1, 6))]
        whole = parse(name, [text])
        assert parse(name, cut(text, places)) == whole, (text, places)
        if not whole.tool_calls and name not in ("openai", "beam", "muse_glimmer", "muse", "inkling"):
            assert (whole.content or "") == text


@pytest.mark.parametrize("name", NAMES)
def test_what_is_broken_off_has_the_calls_before(name):
    """Calls that were complete stay as they are, the last one's arguments are the beginning of what they would be."""
    text = FORMATS[name].write([("now", {}), ("weather", {"city": "Zü\nrich", "n": 12})])
    whole = parse(name, [text])
    for end in range(len(text)):
        message = parse(name, [text[:end]])
        for part, full in zip(message.tool_calls, whole.tool_calls, strict=False):
            assert part.name == full.name
            # A call that lacks nothing but its end is closed; half a word of the format is text.
            said = re.sub(r"(\\n|\n)?(<\|close\|>argument|]+>?)?(<[^<]*)?$", "", part.arguments).removesuffix("}")
            assert full.arguments.startswith(said), text[:end]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_output(name, thorough):
    """20 kB of an argument, of a text, and of whatever the format is made of; with --thorough a megabyte, for which
    anything quadratic takes minutes."""
    count = 125_000 if thorough else 2500
    big = ("weather", {"city": "x < y\n é" * count})
    message = parse(name, cut(FORMATS[name].write([big]), range(0, 8 * count, 250)))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == [big]
    for piece in FORMATS[name].pieces:
        parse(name, [piece * (30_000 // len(piece))])
    opening = FORMATS[name].write([("now", {})])
    for end in range(1, len(opening), 9):
        parse(name, [opening[:end], "<" * 5_000])


def test_a_string_goes_out_as_it_comes():
    parser = TOOL_PARSERS["qwen3_coder"].open(FUNCTIONS)
    parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\nPar")
    (event,) = parser.feed("is\n")
    assert event.text == "is"


def test_a_text_without_words_of_inkling_goes_out_as_it_comes():
    """Only its first word could be a function's name."""
    parser = TOOL_PARSERS["inkling"].open(FUNCTIONS)
    assert parser.feed("It") == []
    for piece, text in (("s cold", "Its cold"), (" out", " out")):
        (event,) = parser.feed(piece)
        assert event.text == text
    (event,) = TOOL_PARSERS["inkling"].open(FUNCTIONS).feed("x" * 600)
    assert event.text == "x" * 600


def test_a_call_of_inkling_that_is_broken_off_is_no_text():
    message = parse("inkling", ['now<|content_invoke_tool_json|>{"name":"now","args":{"a'])
    assert (message.content, message.tool_calls) == (None, [ParsedCall("0", "now", '{"a')])
    assert [InklingHeader(f"now{word}").is_said for word in ("", TEXT, THINKING, INVOKE)] == [True, True, False, False]


def test_the_models_own_ids():
    text = FORMATS["kimi_k2"].write([("now", {}), ("weather", {})])
    assert [call.id for call in parse("kimi_k2", [text]).tool_calls] == ["functions.now:0", "functions.weather:1"]


@each_row(
    "head, functions, name, own_id",
    [
        ("functions.now:0", ("now",), "now", "functions.now:0"),
        ("now:0", ("now",), "now", "now:0"),
        ("functions.now", ("now",), "now", None),
        ("now", ("now",), "now", None),
        ("functions.now_0", ("now",), "now", None),
        ("functions.now:call_1", ("now",), "now", None),
        ("functions:now:1", ("now",), "now", "functions:now:1"),
        ("functions.now_0:2", ("now", "now_0"), "now_0", "functions.now_0:2"),
        # Names with the words of the format in them.
        ("functions.clock:now:0", ("clock:now",), "clock:now", "functions.clock:now:0"),
        ("functions.now:0", ("functions.now",), "functions.now", "functions.now:0"),
        ("functions.now", ("functions.now",), "functions.now", None),
        ("functions.functions.now:0", ("functions.now", "now"), "functions.now", "functions.functions.now:0"),
        ("functions.other:0", ("now",), "other", "functions.other:0"),
    ],
)
def test_heads_of_kimi_name_a_function_of_the_request(head, functions, name, own_id):
    assert KIMI_K2.call(f" {head}\n", functions) == (name, own_id)


def test_a_head_without_a_function_is_no_call():
    assert KIMI_K2.call("two words", ("now",)) is None


@pytest.mark.parametrize(
    "inside", ["a=!" + "'a'," * 25_000, "a='b'c', " + "a='x', " * 30 + "a=[" + "0," * 50_000 + "0]!"]
)
@pytest.mark.timeout(60)
def test_nested_quotes_are_not_repaired_at_any_cost(inside):
    """Many strings, and many readings that all fail at the end of a long text; both took minutes."""
    assert not parse("lfm2", [f"<|tool_call_start|>[f({inside})]<|tool_call_end|>"]).tool_calls

"""Stop strings end answers and not the reasoning before them, however the text is cut."""

from __future__ import annotations

import pytest

from jaxengine.parsers.registry import REASONING_PARSERS
from jaxengine.requests.params.stop_after import AnswerStops, StopAfter, stop_after
from jaxengine.requests.params.stop_strings import StopStrings
from jaxengine.scheduler.base.errors import RequestError
from tests.tables import each_row

MAY_THINK = {"reasoning_end": "</think>", "reasoning_begin": "<think>"}
THINKS = {"reasoning_end": "</think>"}
FINAL = {"reasoning_end": (("<|channel|>final", "<|message|>"),)}
# (words, stop strings, output, the text that is left, the string that was met)
CASES = [
    (MAY_THINK, ["\n\n"], "<think>a\n\nb</think>\n\nYes.\n\nNo.", "<think>a\n\nb</think>\n\nYes.", "\n\n"),
    (MAY_THINK, ["END"], " <think>END</think>END", " <think>END</think>", "END"),
    (MAY_THINK, ["END"], "<think>END", "<think>END", None),
    (MAY_THINK, ["END"], "<think>a</think>EN", "<think>a</think>EN", None),
    # A string that spans the boundary began in the reasoning; one may begin in the space between.
    (MAY_THINK, ["nk>Yes"], "<think>a</think>Yes", "<think>a</think>Yes", None),
    (MAY_THINK, ["</think>"], "<think>a</think>b</think>c", "<think>a</think>b", "</think>"),
    (MAY_THINK, ["\nObs"], "<think>a</think>\n\nObs: x", "<think>a</think>\n", "\nObs"),
    # Outputs that do not think: the text that might have opened the reasoning is looked through too.
    (MAY_THINK, ["x"], "ax<think>x</think>", "a", "x"),
    (MAY_THINK, ["<t"], "<tip>", "", "<t"),
    (MAY_THINK, ["\n"], "\n<thin ice\n", "", "\n"),
    (MAY_THINK, ["k"], "<think", "<thin", "k"),
    (MAY_THINK, ["z"], "<think", "<think", None),
    (THINKS, ["x"], "x</thinx</think>yx", "x</thinx</think>y", "x"),
    (THINKS, ["x"], "<think>x</think>yx", "<think>x</think>y", "x"),
    ({"reasoning_end": ["</a>", "<b>"]}, ["x"], "x<b>yx</a>x", "x<b>y", "x"),
    (FINAL, ["json"], "json<|message|>x<|channel|>final json<|message|>{json", None, "json"),
]


def stopped(words, stop, pieces, keep=False, uncounted=0):
    """(the text that is left, the string that was met)."""
    stops = AnswerStops(StopStrings(tuple(stop), keep=keep), stop_after("stop_after", words))
    text = ""
    for number, piece in enumerate(pieces):
        text += stops.feed(piece, counts=number >= uncounted)
        if stops.met is not None:
            return text, stops.met
    return text + stops.release(), stops.met


@each_row("words, stop, output, left, met", CASES)
def test_only_the_answer_is_looked_through(words, stop, output, left, met):
    left = output[: output.rindex(met)] if left is None else left
    for cuts in (list(output), [output], *([output[:at], output[at:]] for at in range(1, len(output)))):
        assert stopped(words, stop, cuts) == (left, met), cuts
    if met is not None:
        assert stopped(words, stop, list(output), keep=True) == (left + met, met)


def test_tokens_before_min_tokens_count_as_before():
    """A string that ends within them is ignored, in the answer and in text that might have opened the reasoning."""
    assert stopped(MAY_THINK, ["x"], ["<think>", "</think>", "x", "yx"], uncounted=3)[0] == "<think></think>xy"
    assert stopped(MAY_THINK, ["t"], ["<t", "h", "at"], uncounted=1)[0] == "<tha"
    assert stopped(MAY_THINK, ["th"], ["<t", "h", "at"], uncounted=1)[0] == "<"


PROMPT = "<|im_start|>assistant\n"
# (parser, prompt, beginning of a continued answer, output, what is left of it with the stop string "!")
PARSERS = [
    ("qwen3", PROMPT, "", "<think>a!</think>b!", "<think>a!</think>b"),
    ("qwen3", PROMPT + "<think>\n", "", "a!</think>b!", "a!</think>b"),
    ("qwen3", PROMPT + "<think>\n\n</think>\n\n", "", "a!</think>b", "a"),
    ("qwen3", PROMPT, "", "a!", "a"),
    ("qwen3", PROMPT, "<think>so", "a!</think>b!", "a!</think>b"),
    ("qwen3", PROMPT, "So", "a!", "a"),
    ("qwen3", PROMPT, "", '<think>a!<tool_call>{"a": "!"}</tool_call>', None),
    ("deepseek_r1", PROMPT, "", "a!</think>b!", "a!</think>b"),
    ("minimax_m2_append_think", PROMPT, "", "a!</think>b!", "a!</think>b"),
    ("mistral", PROMPT, "", "[THINK]a![/THINK]b!", "[THINK]a![/THINK]b"),
    ("granite", PROMPT, "", "Here's my thought process: a! Here's my response: b!", None),
    ("seed_oss", PROMPT, "", "<seed:think>a!</seed:think>b!", "<seed:think>a!</seed:think>b"),
    ("hunyuan_a13b", PROMPT, "", "<think>a!</think><answer>b!", "<think>a!</think><answer>b"),
    ("gemma4", PROMPT, "", "<|channel>thought\na!<channel|>b!", "<|channel>thought\na!<channel|>b"),
    ("gemma4", PROMPT, "", "a!", "a"),
    (
        "cohere_command3",
        PROMPT,
        "",
        "<|START_THINKING|>a!<|END_THINKING|><|START_RESPONSE|>b!",
        "<|START_THINKING|>a!<|END_THINKING|><|START_RESPONSE|>b",
    ),
    ("kimi_k2", PROMPT, "", "<think>a!<|tool_calls_section_begin|>b!", "<think>a!<|tool_calls_section_begin|>b"),
    ("plamo3", PROMPT, "", "a!<|plamo:end_think:plamo|>b!", "a!<|plamo:end_think:plamo|>b"),
    ("k2_horizon", PROMPT, "", "a!</ifm|think_fast>b!", "a!</ifm|think_fast>b"),
    ("kimi_k3", PROMPT + "<|open|>think<|sep|>", "", "a!<|close|>think<|sep|>b!", "a!<|close|>think<|sep|>b"),
    ("minimax_m3", PROMPT, "", "<mm:think>a!</mm:think>b!", "<mm:think>a!</mm:think>b"),
    ("openai_gptoss", PROMPT, "", "<|channel|>analysis<|message|>a!<|end|><|start|>assistant", None),
    ("openai_gptoss", PROMPT, "", "<|channel|>analysis<|message|>!<|end|><|channel|>final<|message|>b!", None),
    ("openai_gptoss", PROMPT, "So", "a!", "a"),
    ("muse_glimmer", PROMPT, "", "to=self<|message|>a!<|eom|><|start|>assistant to=user<|message|>b!", None),
    ("muse", PROMPT, "", "to=self<|message|>a!<|eom|><|start|>assistant to=user<|message|>b!", None),
    ("inkling", PROMPT, "", "<|content_thinking|>a!<|end_message|><|message_model|><|content_text|>b!", None),
    ("inkling", PROMPT, "", "b!", "b"),
    ("inkling", PROMPT + "<|content_xml|>", "", "f<|content_invoke_tool_json|>!<|content_text|>b!", None),
]


@each_row("parser, prompt, continued, output, left", PARSERS)
def test_every_parser_says_where_the_answer_begins(parser, prompt, continued, output, left):
    if left is None:
        left = output.removesuffix("!")
    words = REASONING_PARSERS[parser].format.answers_after(prompt, continued)
    if words is None:
        assert left == "a"  # all of it is the answer
        return
    assert stopped(words, ["!"], list(output))[0] == left


def test_every_parser_is_in_the_table():
    formats = [REASONING_PARSERS[row[0]].format for row in PARSERS]
    missing = {name for name, row in REASONING_PARSERS.items() if row.format not in formats}
    assert missing == {"ernie45", "beam"}  # with the words of another one


@pytest.mark.parametrize(
    "value",
    [
        "</think>",
        {},
        {"reasoning_begin": "a"},
        {"reasoning_end": ""},
        {"reasoning_end": []},
        {"reasoning_end": [["a", 1]]},
    ]
    + [{"reasoning_end": "a", "reasoning_begin": wrong} for wrong in ("", [], [1], 7)]
    + [{"reasoning_end": "a", "other": 1}],
)
def test_other_forms_are_refused(value):
    with pytest.raises(RequestError, match="stop_after") as error:
        stop_after("stop_after", value)
    assert error.value.param == "stop_after"


def test_a_value_stays_as_it_is():
    words = StopAfter("</think>", ["<think>"])
    assert stop_after("stop_after", words) is words
    assert (words.reasoning_end, words.reasoning_begin) == ((("</think>",),), ("<think>",))

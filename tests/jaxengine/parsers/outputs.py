"""Outputs in every format of tool calls: the same calls as each chat template writes them, and what is odd about each.

Formats are those of the models' published chat templates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.jaxengine.parsers import writers
from tests.jaxengine.parsers.writers import Call

TEXT, ANY = {"type": "string"}, {"type": "object"}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": TEXT,
            "days": {"type": "array", "items": {"type": "number"}},
            "rain": {"type": "boolean"},
            "n": {"type": "integer"},
            "x": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
    "tools.write-file": {"type": "object", "properties": {"path": TEXT, "text": TEXT, "mode": {"$ref": "#/$defs/M"}}}
    | {"$defs": {"M": {"enum": [7, None]}}},
}

PARIS: Call = ("weather", {"city": "Paris", "days": [1, 2.5], "rain": True, "n": -3, "x": {"y": [{"z": None}]}})
ZURICH: Call = ("weather", {"city": 'Zü"rich\\ 東京 😀', "x": None})
NOW: Call = ("now", {})
CODE: Call = ("tools.write-file", {"path": "a b.py", "text": "if a < b:\n    print('<b>{}</b>')\n\n", "mode": 7})
NUMBERS: Call = ("weather", {"city": "42", "rain": False, "n": 0})
EMPTY: Call = ("weather", {"city": "", "days": [], "x": {}})


class Output(NamedTuple):
    """An output and what it holds. content: None for no text but white space around calls; ...: the text as it is."""

    text: str
    calls: list[Call]
    content: str | None = None


class Format(NamedTuple):
    """write: an output that calls these functions. odd: outputs of this format alone. pieces: what they are made of.

    python: names are as Python writes them. first: behind a text are no calls.
    """

    write: Callable[[list[Call]], str]
    odd: list[Output]
    pieces: list[str]
    python: bool = False
    first: bool = False


def common(form: Format) -> list[Output]:
    """What every format can say."""
    calls = [PARIS, ZURICH, NOW, CODE, NUMBERS, EMPTY]
    if form.python:
        calls = [(name.replace("-", "_"), arguments) for name, arguments in calls]
    found = [Output(form.write([call]), [call]) for call in calls]
    found += [
        Output(form.write(calls[:2]), calls[:2]),
        Output(form.write([calls[2]] * 2), [calls[2]] * 2),
        Output(form.write(calls), calls),
        Output("Just an answer.", [], "Just an answer."),
        Output("", []),
        Output("a < b, c > d & [e] {f} | g: `h`\n", [], "a < b, c > d & [e] {f} | g: `h`\n"),
        Output("Ça, 東京 😀", [], "Ça, 東京 😀"),
        Output("\n\n" + form.write([calls[2]]), [calls[2]]),
        Output(form.write([calls[0]]) + "\n", [calls[0]]),
        Output(form.write(calls[::-1]), calls[::-1]),
        Output(form.write([calls[2]]) + "Done.", [calls[2]], "Done."),
        Output(form.write([calls[2]])[:3], [], form.write([calls[2]])[:3]),
    ]
    behind = ["Wait: " + form.write([calls[2]]), "Wait: " + form.write(calls[:3]) + "Done."]
    if form.first:
        return [*found, *(Output(text, [], text) for text in behind)]
    return [*found, Output(behind[0], [calls[2]], "Wait:"), Output(behind[1], calls[:3], "Wait: Done.")]


JSON_PIECES = ["{", "}", "[", "]", ",", '"name"', ":", '"f"', '"arguments"', "{}", '{"a": 1}', '"', "\\"]
CALLED = '{"name": "now", "arguments": {}}'

INKLING_NOW = writers.inkling([NOW])
_OWN_TOOL = " to=python<|channel|>analysis <|constrain|>xml<|message|>1<|call|>"
FORMATS: dict[str, Format] = {
    "hermes": Format(
        writers.hermes,
        [
            Output(f"Wait.<tool_call>{CALLED}</tool_call>So.", [NOW], "Wait.So."),
            Output(f"<tool_call>{CALLED}", [NOW]),
            Output("<tool_call>no</tool_call>", [], "<tool_call>no</tool_call>"),
        ],
        ["<tool_call>", "</tool_call>", "<tool", "\n", *JSON_PIECES],
    ),
    "openai": Format(
        writers.harmony,
        [
            Output("<|channel|>final<|message|>Hi.<|return|>", [], "Hi."),
            Output("<|channel|>final<|message|>Hi", [], "Hi"),
            Output(
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + writers.harmony([PARIS]),
                [PARIS],
                "I look.",
            ),
            Output(" to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", [NOW]),
            Output("<|channel|>commentary to=functions.now<|message|>{}<|call|>", [NOW]),
            Output("<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>", [NOW]),
            Output("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", [NOW]),
            Output("<|channel|>analysis<|message|>Hm<|end|>", [], "<|channel|>analysis<|message|>Hm<|end|>"),
            Output("<|channel|>analysis", [], "<|channel|>analysis"),
            Output("<|channel|>" + "x" * 600, [], "<|channel|>" + "x" * 600),
            Output("No harmony at all", [], "No harmony at all"),
            # Beam's form of a call, in which gpt-oss would address a tool of its own.
            Output(_OWN_TOOL, [], _OWN_TOOL),
        ],
        [
            "<|channel|>",
            "<|message|>",
            "<|start|>assistant",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|constrain|>json",
            " to=functions.f",
            "commentary",
            "analysis",
            "final",
            "<|",
            "{}",
        ],
    ),
    "inkling": Format(
        writers.inkling,
        [
            Output(INKLING_NOW.removeprefix("<|message_model|>"), [NOW]),
            Output(INKLING_NOW.removesuffix("<|end_message|><|content_model_end_sampling|>"), [NOW]),
            Output(INKLING_NOW.replace("<|end_message|>", ""), [NOW]),
            Output(INKLING_NOW.replace("args", "arguments"), [NOW]),
            Output(INKLING_NOW.replace(',"args":{}', ""), [NOW]),
            Output(f"<|content_text|>I look.<|end_message|>{INKLING_NOW}", [NOW], "I look."),
            Output(f"<|content_text|>I look.{INKLING_NOW}", [NOW], "I look."),
            # Without the word that begins a message, text before it is not the function's name.
            Output("Look<|end_message|>" + INKLING_NOW.removeprefix("<|message_model|>"), [NOW], "Look"),
            Output("<|content_text|>Hi.<|end_message|><|content_model_end_sampling|>", [], "Hi."),
            Output(
                "me<|content_text|>A<|end_message|><|message_model|><|content_tool_error|>B<|end_message|>", [], "AB"
            ),
            Output("Hi <|end_message|>", [], "Hi "),
            Output("<|message_model|>Hi<|end_message|><|message_model|>", [], "Hi"),
            Output("x" * 600 + "<|end_message|>", [], "x" * 600),
            *(
                Output(text, [], text)
                for text in (
                    "<|content_thinking|>Hm<|end_message|>",
                    'f<|content_invoke_tool_json|>{"name":"f","args":[]}<|end_message|>',
                    "f<|content_invoke_tool_json|>no<|end_message|>",
                    'f<|content_invoke_tool_json|>{"name"<|end_message|>',
                    "f<|content_invoke_tool_json|><|content_model_end_sampling|>",
                    'f<|content_invoke_tool_json|>{"na',
                )
            ),
            Output('<|content_invoke_tool_json|>{"name":"now","args":{}} !<|end_message|>', [NOW], "!"),
        ],
        [
            "<|message_model|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_json|>",
            "<|content_invoke_tool_text|>",
            "<|end_message|>",
            "<|content_model_end_sampling|>",
            "<|content",
            "f",
            '"args"',
            *JSON_PIECES,
        ],
    ),
    "deepseek_v3": Format(
        writers.deepseek_v3,
        [
            Output("I look.\n" + writers.deepseek_v3([PARIS]), [PARIS], "I look.\n"),
            Output(writers.deepseek_v3([NOW]).replace("<｜tool▁calls▁begin｜>", ""), [NOW]),
            Output(writers.deepseek_v3([NOW]).replace("<｜tool▁calls▁end｜>", ""), [NOW]),
            Output(writers.deepseek_v3([NOW]).replace("```<｜tool▁call▁end｜>", ""), [NOW]),
            Output("<｜tool▁calls▁begin｜>", [], "<｜tool▁calls▁begin｜>"),
            Output("<｜tool▁call▁begin｜>what<｜tool▁call▁end｜>", [], "<｜tool▁call▁begin｜>what<｜tool▁call▁end｜>"),
            Output("<｜tool▁calls▁end｜>", [], "<｜tool▁calls▁end｜>"),
        ],
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "function<｜tool▁sep｜>",
            "f\n",
            "```json\n",
            "\n```",
            "{}",
            '{"a": 1}',
            "{",
            "<｜",
        ],
    ),
    "deepseek_v31": Format(
        writers.deepseek_v31,
        [
            Output("I look." + writers.deepseek_v31([PARIS]), [PARIS], "I look."),
            Output("<｜tool▁call▁begin｜>now<｜tool▁sep｜><｜tool▁call▁end｜>", [NOW]),
            Output("<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}", [NOW]),
            Output("<｜tool▁call▁begin｜>now<｜tool▁sep｜>[1]", [], "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[1]"),
            Output("<｜tool▁call▁begin｜>no", [], "<｜tool▁call▁begin｜>no"),
            Output("<｜tool▁call▁beg", [], "<｜tool▁call▁beg"),
        ],
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "f",
            "{}",
            "{",
            "}",
            "<｜",
        ],
    ),
    "deepseek_v32": Format(
        writers.dsml,
        [
            Output("I look.\n\n" + writers.dsml([PARIS]), [PARIS], "I look.\n\n"),
            Output('<｜DSML｜invoke name="now"></｜DSML｜invoke>', [NOW]),
            Output("<｜DSML｜function_calls>no", [], "<｜DSML｜function_calls>no"),
        ],
        [
            "<｜DSML｜function_calls>",
            '<｜DSML｜invoke name="',
            'f">',
            '<｜DSML｜parameter name="',
            'a" string="true">',
            "1",
            "</｜DSML｜parameter>",
            "</｜DSML｜invoke>",
            "</｜DSML｜function_calls>",
            "\n",
            "<｜",
        ],
    ),
    "kimi_k2": Format(
        writers.kimi,
        [
            Output("I look." + writers.kimi([PARIS]), [PARIS], "I look."),
            Output(writers.kimi([NOW]).replace("_calls_section_begin", "_call_section_begin"), [NOW]),
            Output("<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", [NOW]),
            Output("<|tool_calls_section_begin|><|tool_calls_section_end|>", [], ...),  # pyright: ignore
            Output("<|tool_call_begin|>a b<|tool_call_argument_begin|>{}", [], ...),  # pyright: ignore
        ],
        [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "functions.f:0",
            "f",
            "{}",
            "{",
            "}",
            "<|",
        ],
    ),
    "qwen3_coder": Format(
        writers.qwen3_coder,
        [
            Output("I look.\n" + writers.qwen3_coder([PARIS]), [PARIS], "I look.\n"),
            Output("<function=now>\n</function>", [NOW]),
            Output("<function=now>\n</function>\n</tool_call>", [NOW]),
            Output("<tool_call>\n<function=now></function>", [NOW]),
            Output(
                "<tool_call>\n<function=weather>\n<parameter=n>\n5\n</function>\n</tool_call>", [("weather", {"n": 5})]
            ),
            Output("<function=weather><parameter=rain>True</parameter></function>", [("weather", {"rain": True})]),
            Output("<function=weather><parameter=n>3.0</parameter></function>", [("weather", {"n": 3.0})]),
            Output("<function=weather><parameter=n>many</parameter></function>", [("weather", {"n": "many"})]),
            Output("<function=weather><parameter=days>(1, 2)</parameter></function>", [("weather", {"days": [1, 2]})]),
            Output("<function=weather><parameter=o>7</parameter></function>", [("weather", {"o": "7"})]),
            Output("<function=other><parameter=o>[1]</parameter></function>", [("other", {"o": "[1]"})]),
            Output("<function=now>what</function>", [NOW], "what</function>"),
            Output("<tool_call>{}</tool_call>", [], ...),  # pyright: ignore
            Output("<function=", [], ...),  # pyright: ignore
            Output("<function=a b></function>", [], ...),  # pyright: ignore
        ],
        [
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "f>",
            "<parameter=",
            "a>",
            "\n",
            "1",
            "</parameter>",
            "</function>",
            "<",
        ],
    ),
    "seed_oss": Format(
        writers.seed_oss,
        [
            Output("I look." + writers.seed_oss([PARIS]), [PARIS], "I look."),
            Output("<seed:tool_call><function=now></function></seed:tool_call>!", [NOW], "!"),
            Output("</seed:tool_call>", [], "</seed:tool_call>"),
        ],
        ["<seed:tool_call>", "</seed:tool_call>", "<function=f>", "<parameter=a>", "1", "</parameter>", "</function>"],
    ),
    "minimax_m2": Format(
        writers.minimax,
        [
            Output("I look." + writers.minimax([PARIS]), [PARIS], "I look."),
            Output('<invoke name="now"></invoke>', [NOW]),
            Output("<minimax:tool_call>\nno", [], "<minimax:tool_call>\nno"),
        ],
        [
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            '<invoke name="f">',
            '<parameter name="a">',
            "1",
            "</parameter>",
            "</invoke>",
            "\n",
        ],
    ),
    "glm45": Format(
        writers.glm45,
        [
            Output("I look.\n" + writers.glm45([PARIS]), [PARIS], "I look.\n"),
            Output("<tool_call>now</tool_call>", [NOW]),
            Output(
                "<tool_call>weather<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>", [("weather", {"n": 5})]
            ),
            Output(
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>\nA\n</arg_value>\n</tool_call>",
                [("weather", {"city": "\nA\n"})],
            ),
            Output('<tool_call>{"name": "now"}</tool_call>', [], ...),  # pyright: ignore
            Output("<tool_call></tool_call>", [], ...),  # pyright: ignore
        ],
        [
            "<tool_call>",
            "f",
            "\n",
            "<arg_key>",
            "a",
            "</arg_key>",
            "<arg_value>",
            "1",
            "</arg_value>",
            "</tool_call>",
            "<",
        ],
    ),
    "glm47": Format(
        writers.glm47, [], ["<tool_call>f", "<arg_key>a</arg_key>", "<arg_value>", "1", "</arg_value>", "</tool_call>"]
    ),
    "granite": Format(
        writers.listed("<|tool_call|>"),
        [
            Output(f"<tool_call>[{CALLED}]", [NOW]),
            Output(f"[{CALLED}]", [NOW]),
            Output(f"Hm <|tool_call|> [{CALLED}] ok", [NOW], "Hm  ok"),
            Output("[1, 2]", [], "[1, 2]"),
        ],
        ["<|tool_call|>", "<tool_call>", "<|", *JSON_PIECES],
    ),
    "granite-20b-fc": Format(
        writers.objects("<function_call> ", ""),
        [Output(f"Hm <function_call>{CALLED}<function_call>{CALLED} ok", [NOW, NOW], "Hm  ok")],
        ["<function_call>", "<function", *JSON_PIECES],
    ),
    "phi4_mini_json": Format(
        writers.listed("functools"),
        [
            Output("functools are nice", [], "functools are nice"),
            Output(f"functools [{CALLED}]!", [NOW], "!"),
        ],
        ["functools", "func", *JSON_PIECES],
    ),
    "hunyuan_a13b": Format(
        writers.listed("<tool_calls>", "</tool_calls>"),
        [
            Output(f"Hm.<tool_calls>\n[{CALLED}]\n</tool_calls>\nOk", [NOW], "Hm.\nOk"),
            Output(f"<tool_calls>[{CALLED}]<tool_calls>[{CALLED}]", [NOW, NOW]),
            Output("<tool_calls>none</tool_calls>", [], "<tool_calls>none</tool_calls>"),
        ],
        ["<tool_calls>", "</tool_calls>", "<tool", "\n", *JSON_PIECES],
    ),
    "jamba": Format(
        writers.listed("<tool_calls>", "</tool_calls>"), [], ["<tool_calls>", "</tool_calls>", *JSON_PIECES]
    ),
    "ernie45": Format(writers.hermes, [], ["<tool_call>", "</tool_call>", *JSON_PIECES]),
    "longcat": Format(
        writers.objects("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        [],
        ["<longcat_tool_call>", "</longcat_tool_call>", *JSON_PIECES],
    ),
    "llama4_pythonic": Format(
        lambda calls: f"<|python_start|>[{', '.join(map(writers.python, calls))}]<|python_end|>",
        [
            Output("[now()]", [NOW]),
            Output("Hm <|python_start|>[now()] ok<|python_end|>", [NOW], "Hm  ok"),
            Output("<|python_start|>print(1)<|python_end|>", [], "<|python_start|>print(1)<|python_end|>"),
            Output("<|python_start|><|python_start|>[now()]", [NOW], "<|python_start|>"),
        ],
        ["<|python_start|>", "<|python_end|>", "[", "]", "f(", ")", "a=", "1", ", ", "'x'", "<|"],
        python=True,
    ),
    "olmo3": Format(
        lambda calls: "<function_calls>" + "\n".join(map(writers.python, calls)) + "</function_calls>",
        [
            Output("Hm <function_calls>\nnow()\n</function_calls> ok", [NOW], "Hm  ok"),
            Output("<function_calls>now()", [NOW]),
            Output("<function_calls>now(</function_calls>", [], "<function_calls>now(</function_calls>"),
            Output("<function_calls></function_calls>", [], "<function_calls></function_calls>"),
        ],
        ["<function_calls>", "</function_calls>", "f(", ")", "a=", "1", ", ", "'x'", "\n", "<"],
        python=True,
    ),
    "xlam": Format(
        writers.listed(""),
        [
            Output(f"<think>Hm.</think>[{CALLED}]", [NOW], "<think>Hm.</think>"),
            # The words around calls go with them, and only with them.
            Output(f"Hm.\n```json\n[{CALLED}]\n```\nOk", [NOW], "Hm.\n\nOk"),
            Output(f"Hm.[TOOL_CALLS][{CALLED}, {CALLED}]", [NOW, NOW], "Hm."),
            Output(f"Hm.<tool_call>[{CALLED}]</tool_call>", [NOW], "Hm."),
            Output(f"<tool_call>{CALLED}</tool_cal", [NOW], "</tool_cal"),
            Output('```json\n{"a": 1}\n``` [TOOL [1] <tool_call></tool_call>', [], ...),  # pyright: ignore
        ],
        ["<think>", "```json\n", "```", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", *JSON_PIECES],
    ),
}
FORMATS["qwen3_xml"] = FORMATS["qwen3_coder"]

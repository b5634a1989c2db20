"""Outputs of the formats of Gemma, Cohere, Apertus, LFM2 and others, whose calls stand between tokens of their own."""

from __future__ import annotations

from typing import Any

from tests.jaxengine.parsers import writers
from tests.jaxengine.parsers.bare_outputs import BARE_FORMATS
from tests.jaxengine.parsers.element_outputs import ELEMENT_FORMATS
from tests.jaxengine.parsers.outputs import CALLED, FORMATS, JSON_PIECES, NOW, PARIS, Format, Output
from tests.jaxengine.parsers.writers import Call


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_value(each, quote)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(each, quote) for each in value)}]"
    return writers.as_json(value)


def gemma(begin: str, end: str, quote: str):
    return lambda calls: "".join(f"{begin}call:{name}{gemma_value(given, quote)}{end}" for name, given in calls)


def cohere(calls: list[Call]) -> str:
    said = [
        f'    {{"tool_call_id": "{at}", "tool_name": {writers.as_json(name)}, "parameters": {writers.as_json(given)}}}'
        for at, (name, given) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(said) + "\n]<|END_ACTION|>"


def apertus(calls: list[Call]) -> str:
    said = ", ".join(writers.as_json({name: given}) for name, given in calls)
    return f"<|tools_prefix|>[{said}]<|tools_suffix|>"


def internlm(calls: list[Call]) -> str:
    said = (writers.as_object(call, "parameters") for call in calls)
    return "\n".join(f"<|action_start|><|plugin|>\n{each}<|action_end|>" for each in said)


def hy_v3(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{writers.plain(each)}</arg_value>\n" for key, each in given.items()
        )
        said.append(f"<tool_call>{name}<tool_sep>\n{''.join(pairs)}</tool_call>\n")
    return f"<tool_calls>\n{''.join(said)}</tool_calls>"


def hy_v4(calls: list[Call], suffix: str = "", gap: str = "") -> str:
    """Calls in Hy4's format. suffix: goes before the last character of every word, not of those in values. gap: text
    after the first word and before the last one.
    """
    words = [
        f"<{end}{name}{suffix}>" for name in ("tool_calls", "tool_call", "arg_key", "arg_value") for end in ("", "/")
    ]
    groups, end_groups, call, end_call, key, end_key, value, end_value = words
    said = []
    for name, given in calls:
        pairs = (f"{key}{one}{end_key}{value}{writers.plain(each)}{end_value}" for one, each in given.items())
        said.append(f"{call}{name}{''.join(pairs)}{end_call}")
    return f"{groups}{gap}{''.join(said)}{gap}{end_groups}"


def mimo(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        lines = (f"<parameter={key}>{writers.plain(each)}</parameter>\n" for key, each in given.items())
        said.append(f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>")
    return "\n".join(said)


def v4(calls: list[Call]) -> str:
    return writers.dsml(calls).replace("function_calls>", "tool_calls>")


def v41(calls: list[Call]) -> str:
    said = writers.dsml(calls).replace("function_calls>", "calls>")
    return said.replace("｜DSML｜", "｜DSML｜ ")


def step3(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        lines = (
            f'<steptml:parameter name="{key}">{writers.plain(each)}</steptml:parameter>\n'
            for key, each in given.items()
        )
        said.append(
            f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n{"".join(lines)}'
            "</steptml:invoke><｜tool_call_end｜>\n"
        )
    return f"<｜tool_calls_begin｜>\n{''.join(said)}<｜tool_calls_end｜>"


def k2_horizon(calls: list[Call]) -> str:
    said = writers.glm45(calls).replace("<", "<ifm|").replace("<ifm|/", "</ifm|")
    # What is in the values stays as it is.
    for _, given in calls:
        for text in filter(lambda each: isinstance(each, str), given.values()):
            said = said.replace(text.replace("<", "<ifm|").replace("<ifm|/", "</ifm|"), text)
    return f"<ifm|tool_calls>{said}</ifm|tool_calls>"


def plamo3(calls: list[Call]) -> str:
    said = (
        f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{writers.as_json(given)}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        for name, given in calls
    )
    return f"<|plamo:begin_tool_requests:plamo|>{''.join(said)}<|plamo:end_tool_requests:plamo|>"


_GEMMA = gemma("<|tool_call>", "<tool_call|>", '<|"|>')
TOKEN_FORMATS: dict[str, Format] = {
    "gemma4": Format(
        _GEMMA,
        [
            Output(
                '<|tool_call>call:weather{city:<|"|>a, {b}: "c"<|"|>,n:5}<tool_call|>',
                [("weather", {"city": 'a, {b}: "c"', "n": 5})],
            ),
            # The schema's types come first; without one, those of the notation.
            Output(
                '<|tool_call>call:weather{city:42,n:<|"|>5<|"|>}<tool_call|>', [("weather", {"city": "42", "n": 5})]
            ),
            Output(
                '<|tool_call>call:other{a:42,b:<|"|>5<|"|>,c:free text}<tool_call|>',
                [("other", {"a": 42, "b": "5", "c": "free text"})],
            ),
            Output(
                "<|tool_call>call:weather{ city : Paris , rain: true }<tool_call|>",
                [("weather", {"city": "Paris", "rain": True})],
            ),
            # A name between quotation words, values in JSON's notation, and a call without "call".
            Output('<|tool_call>:weather{<|"|>city<|"|>:<|"|>A<|"|>}<tool_call|>', [("weather", {"city": "A"})]),
            Output(
                '<|tool_call>call:weather{x:{"y": "a,\\"}", z:[]}}<tool_call|>',
                [("weather", {"x": {"y": 'a,"}', "z": []}})],
            ),
            Output(
                '<|tool_call>call:weather{x:{y:,z:<|"|>}<|"|>,w:-0.5,},days:[1,,[2],]}',
                [("weather", {"x": {"y": "", "z": "}", "w": -0.5}, "days": [1, [2]]})],
            ),
            Output("<|tool_call>call:now{}", [NOW]),
            Output("<|tool_call>call:now{} and", [NOW], " and"),
            Output("<|tool_call>call:now(){}<tool_call|>", [], "<|tool_call>call:now(){}<tool_call|>"),
            Output("<|tool_call>no", [], "<|tool_call>no"),
            Output("<|tool_call><|tool_call>call:now{}<tool_call|>", [NOW], "<|tool_call>"),
        ],
        ["<|tool_call>", "call:", "f", "{", "a:", '<|"|>', "1", ",", "[", "]", "}", "<tool_call|>", '"', "<|"],
    ),
    "functiongemma": Format(
        gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        [
            Output(
                "Hm<start_function_call>call:weather{city:<escape>A<escape>}<end_function_call>",
                [("weather", {"city": "A"})],
                "Hm",
            )
        ],
        ["<start_function_call>", "call:f{", "a:", "<escape>", "1", ",", "}", "<end_function_call>"],
    ),
    "cohere_command3": Format(
        cohere,
        [
            Output(cohere([PARIS, NOW]).replace("\n    ", "").replace("\n", ""), [PARIS, NOW]),
            Output('<|START_ACTION|>[{"tool_name": "now"}]<|END_ACTION|>', [NOW]),
            Output(f"<|START_ACTION|>[{CALLED}]<|END_ACTION|>", [], ...),  # pyright: ignore
        ],
        ["<|START_ACTION|>", "<|END_ACTION|>", '"tool_name"', '"parameters"', *JSON_PIECES],
    ),
    "apertus": Format(
        apertus,
        [
            Output('<|tools_prefix|>[{"now": {}}, {"now": {}}]', [NOW, NOW]),
            Output('<|tools_prefix|>[{"now": []}]<|tools_suffix|>', [], ...),  # pyright: ignore
            Output('<|tools_prefix|>[{"now": "{}"}]<|tools_suffix|>', [], ...),  # pyright: ignore
            Output('<|tools_prefix|>[{"": {}}]<|tools_suffix|>', [], ...),  # pyright: ignore
            Output("<|tools_prefix|>[{}]<|tools_suffix|>", [], ...),  # pyright: ignore
            Output('<|tools_prefix|>[{"now": {}, "id": "x", "then": {"a": 1}}]<|tools_suffix|>', [NOW]),
        ],
        ["<|tools_prefix|>", "<|tools_suffix|>", *JSON_PIECES],
    ),
    "internlm": Format(
        internlm,
        [Output(f"Hm<|action_start|><|plugin|>{CALLED}<|action_end|>", [NOW], "Hm")],
        ["<|action_start|>", "<|plugin|>", "<|action_end|>", *JSON_PIECES],
    ),
    "lfm2": Format(
        lambda calls: f"<|tool_call_start|>[{', '.join(map(writers.python, calls))}]<|tool_call_end|>",
        [
            Output("Hm<|tool_call_start|>[weather(n=07)]<|tool_call_end|>ok", [("weather", {"n": 7})], "Hmok"),
            Output("<|tool_call_start|>[f(from='a', class=1)]<|tool_call_end|>", [("f", {"from": "a", "class": 1})]),
            # Quotes in quotes, where one reading makes calls of all of it; else it is text.
            Output(
                """<|tool_call_start|>[now(), weather(city='sed -n '3,4p' a.py', n=1)]<|tool_call_end|>ok""",
                [NOW, ("weather", {"city": "sed -n '3,4p' a.py", "n": 1})],
                "ok",
            ),
            Output(
                """<|tool_call_start|>[weather(city='python -c "f(x, s='\\,'))"')]<|tool_call_end|>""",
                [("weather", {"city": """python -c "f(x, s='\\,'))\""""})],
            ),
            Output("<|tool_call_start|>[f(a='b'c', d='e')]<|tool_call_end|>", [], ...),
            Output("<|tool_call_start|>[f(a='b'c'", [], ...),
            Output(
                "<|tool_call_start|>[f(a='b'c<|tool_call_start|>[now()]<|tool_call_end|>",
                [NOW],
                "<|tool_call_start|>[f(a='b'c",
            ),
        ],
        ["<|tool_call_start|>", "<|tool_call_end|>", "[", "]", "f(", ")", "a=", "1", ", ", "'x'", "<|"],
        python=True,
    ),
    "hy_v3": Format(
        hy_v3,
        [Output("<tool_call>now<tool_sep></tool_call>", [NOW]), Output("<tool_calls>no", [], "<tool_calls>no")],
        [
            "<tool_calls>",
            "</tool_calls>",
            "<tool_call>",
            "f",
            "<tool_sep>",
            "<arg_key>",
            "a",
            "</arg_key>",
            "<arg_value>",
            "1",
            "</arg_value>",
            "</tool_call>",
        ],
    ),
    "hy_v4": Format(
        hy_v4,
        [Output("<tool_call>now</tool_call>", [NOW]), Output("<tool_calls>no", [], "<tool_calls>no")],
        [
            *("<tool_calls>", "</tool_calls>", "<tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>", "1"),
            *("</arg_value>", "</tool_call>"),
        ],
    ),
    "mimo": Format(
        mimo,
        [Output("<function=weather><parameter=city>\nA\n</parameter></function>", [("weather", {"city": "\nA\n"})])],
        FORMATS["qwen3_coder"].pieces,
    ),
    "dots": Format(
        lambda calls: writers.minimax(calls).replace("minimax:tool_call", "dots_function_call"),
        [],
        ["<dots_function_call>", "</dots_function_call>", *FORMATS["minimax_m2"].pieces[2:]],
    ),
    "deepseek_v4": Format(
        v4,
        [
            Output(v4([PARIS]).replace("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>"), [PARIS]),
            Output(v4([PARIS]).replace("<｜DSML｜tool_calls>", "<｜DSML｜tool>"), [PARIS]),
            Output(v4([NUMBER := ("weather", {"n": 5})]).replace(' string="false"', ""), [NUMBER]),
        ],
        ["<｜DSML｜tool_calls>", "<｜DSML｜tool>", "</｜DSML｜tool_calls>", *FORMATS["deepseek_v32"].pieces[1:8]],
    ),
    "deepseek_v41": Format(
        v41,
        [],
        ["<｜DSML｜ calls>", '<｜DSML｜ invoke name="f">', "</｜DSML｜ invoke>", "</｜DSML｜ calls>", "\n", "<｜"],
    ),
    "step3": Format(
        step3,
        [
            Output("I look.\n" + step3([PARIS]), [PARIS], "I look.\n"),
            Output(step3([NOW]).replace("<｜tool_calls_begin｜>\n", ""), [NOW]),
            Output("<｜tool_calls_begin｜>no", [], "<｜tool_calls_begin｜>no"),
            Output("<｜tool_call_begin｜>no", [], "<｜tool_call_begin｜>no"),
        ],
        [
            *(
                "<｜tool_calls_begin｜>",
                "<｜tool_calls_end｜>",
                "<｜tool_call_begin｜>",
                "<｜tool_call_end｜>",
                "function",
            ),
            *("<｜tool_sep｜>", '<steptml:invoke name="', 'f">', "</steptml:invoke>", '<steptml:parameter name="a">'),
            *("1", "</steptml:parameter>", "\n"),
        ],
    ),
    "k2_horizon": Format(
        k2_horizon,
        [
            Output("<ifm|tool_calls><ifm|tool_call>now</ifm|tool_call></ifm|tool_calls>", [NOW]),
            Output("<ifm|tool_call>now</ifm|tool_call>", [NOW]),
            Output("<ifm|tool_calls>no", [], "<ifm|tool_calls>no"),
        ],
        [
            *("<ifm|tool_calls>", "</ifm|tool_calls>", "<ifm|tool_call>", "f", "</ifm|tool_call>", "<ifm|arg_key>"),
            *("a", "</ifm|arg_key>", "<ifm|arg_value>", "1", "</ifm|arg_value>", "\n"),
        ],
    ),
    "plamo3": Format(
        plamo3,
        [
            Output("I look." + plamo3([PARIS]), [PARIS], "I look."),
            Output(plamo3([NOW]).replace("{}", ""), [NOW]),
            Output("<|plamo:begin_tool_requests:plamo|>", [], "<|plamo:begin_tool_requests:plamo|>"),
        ],
        [
            *("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>", "f", "{}", "{", "}"),
            *("<|plamo:begin_tool_request:plamo|>", "<|plamo:begin_tool_name:plamo|>", "<|plamo:end_tool_name:plamo|>"),
            *("<|plamo:begin_tool_arguments:plamo|>", "<|plamo:constrain|>json<|plamo:msg|>"),
            *("<|plamo:end_tool_arguments:plamo|>", "<|plamo:end_tool_request:plamo|>"),
        ],
    ),
    "gigachat3": Format(
        lambda calls: "\n".join(f"<|function_call|>{writers.as_object(call)}" for call in calls),
        [
            Output(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{CALLED}", [NOW]),
            Output(f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{CALLED}", [NOW], "I look."),
            Output(f"function call<|role_sep|>\n{CALLED}", [NOW]),
            Output("A function call<|role_sep|>", [], "A function call<|role_sep|>"),
            Output("function call<|role_sep|>\n7", [], "function call<|role_sep|>\n7"),
            Output("<|message_sep|>\n\nfunction call<|role_sep|>\n[1]", [], ...),  # pyright: ignore
        ],
        ["<|function_call|>", "<|message_sep|>\n\n", "function call", "<|role_sep|>\n", "<|", *JSON_PIECES],
    ),
    "granite4": FORMATS["hermes"],
    "qwen3_json": FORMATS["hermes"],
    "step3p5": FORMATS["qwen3_coder"],
    "step5": FORMATS["qwen3_coder"],
    "ling3": FORMATS["glm47"],
    "poolside_v1": FORMATS["glm47"],
}
TOKEN_FORMATS["cohere_command4"] = TOKEN_FORMATS["cohere_command3"]
ALL_FORMATS = FORMATS | BARE_FORMATS | TOKEN_FORMATS | ELEMENT_FORMATS

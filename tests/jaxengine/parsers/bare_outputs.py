"""Outputs of the formats that Llama, ToolACE and Mistral write: calls with few words around them, or none."""

from __future__ import annotations

from tests.jaxengine.parsers import writers
from tests.jaxengine.parsers.outputs import CALLED, JSON_PIECES, NOW, PARIS, Format, Output
from tests.jaxengine.parsers.writers import Call


def parameters(calls: list[Call]) -> str:
    return "; ".join(writers.as_object(call, "parameters") for call in calls)


def named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{writers.as_json(arguments)}" for name, arguments in calls)


def text(said: str) -> Output:
    """One without calls."""
    return Output(said, [], said)


PYTHONIC = Format(
    lambda calls: f"[{', '.join(map(writers.python, calls))}]",
    [
        Output('[weather(city="Paris", n=-3), now()]', [("weather", {"city": "Paris", "n": -3}), NOW]),
        Output("[ weather( city = 'It\\'s' , ) ,\n now ( ) ]", [("weather", {"city": "It's"}), NOW]),
        Output(
            "[weather(days=[1, 2.5,], x={'y': {\"z\": (True, None)}})]",
            [("weather", {"days": [1, 2.5], "x": {"y": {"z": [True, None]}}})],
        ),
        Output('[weather(city="""Zürich""", n=0x10)]', [("weather", {"city": "Zürich", "n": 16})]),
        Output('[weather(city="now()], [x(", n=1_000)]', [("weather", {"city": "now()], [x(", "n": 1000})]),
        Output("[weather(city='a' \"b\"\n'c', rain=false)]", [("weather", {"city": "abc", "rain": False})]),
        Output("[tools.now(), now()]\n\nI look.", [("tools.now", {}), NOW], "I look."),
        Output("[now()", [NOW]),
        Output("[now(), weather(city='Par", [NOW], ", weather(city='Par"),
        Output('[now(), weather("Paris")]', [NOW], ', weather("Paris")]'),
        *map(text, ["[weather(city='Par", "[weather(", '[weather("Paris")]', "[Market Trends API(country='us')]"]),
        *map(text, ["[weather(city=f'{x}')]", "[[now()]]", "now()", "[x for x in y]", "[]", "[1]: see below", CALLED]),
    ],
    ["[", "]", "f(", ")", "a=", "1", ", ", "'x'", '"', "{", "}", ":", "None", "\\", "-1.5", "(", "\n"],
    python=True,
    first=True,
)
LLAMA = Format(
    parameters,
    [
        Output(f"<|python_tag|>{CALLED}", [NOW]),
        Output(f"Hm <|python_tag|>{CALLED}", [NOW], "Hm"),
        Output(f"[{CALLED}, {CALLED}]", [NOW, NOW]),
        Output("<|python_tag|>print({1: [2]})", [], "<|python_tag|>print({1: [2]})"),
        Output('{"name": "Bob"}', [], '{"name": "Bob"}'),
    ],
    ["<|python_tag|>", "; ", "<|", "null", *JSON_PIECES],
)
BARE_FORMATS: dict[str, Format] = {
    "pythonic": PYTHONIC,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "mistral": Format(
        named,
        [
            Output(f"[TOOL_CALLS][{CALLED}, {CALLED}]", [NOW, NOW]),
            Output(f"Hm[TOOL_CALLS] [{CALLED}] ok", [NOW], "Hm ok"),
            Output("[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", [NOW]),
            Output("[TOOL_CALLS]now{}" + named([PARIS]), [NOW, PARIS]),
            Output("[TOOL_CALLS] no call here\n{}", [], "[TOOL_CALLS] no call here\n{}"),
        ],
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f", "[TOOL", *JSON_PIECES],
    ),
}

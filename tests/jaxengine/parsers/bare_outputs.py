"""Outputs of the formats that Llama and Mistral write: calls with few words around them, or none."""

from __future__ import annotations

from tests.jaxengine.parsers import writers
from tests.jaxengine.parsers.outputs import CALLED, JSON_PIECES, NOW, PARIS, Format, Output
from tests.jaxengine.parsers.writers import Call


def parameters(calls: list[Call]) -> str:
    return "; ".join(writers.as_object(call, "parameters") for call in calls)


def named(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{writers.as_json(arguments)}" for name, arguments in calls)


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

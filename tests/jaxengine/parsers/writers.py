"""Tool calls as each model's published chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": {as_json(call[0])}, "{key}": {as_json(call[1])}}}'


def plain(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{as_object(call)}\n</tool_call>" for call in calls)


def listed(begin: str, end: str = "") -> Callable[[list[Call]], str]:
    return lambda calls: f"{begin}[{', '.join(map(as_object, calls))}]{end}"


def python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{name}={value!r}' for name, value in call[1].items())})"


def harmony(calls: list[Call]) -> str:
    said = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{as_json(arguments)}<|call|>"
        for name, arguments in calls
    ]
    return "<|start|>assistant".join(said)


def inkling(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        said.append(f'{name}<|content_invoke_tool_json|>{{"name":{as_json(name)},"args":{arguments}}}<|end_message|>')
    return "".join(f"<|message_model|>{each}" for each in said) + "<|content_model_end_sampling|>"


def deepseek_v3(calls: list[Call]) -> str:
    said = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{as_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(said) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: list[Call]) -> str:
    said = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{as_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(said) + "<｜tool▁calls▁end｜>"


def kimi(calls: list[Call]) -> str:
    said = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{as_json(arguments)}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(said) + "<|tool_calls_section_end|>"


def qwen3_coder(calls: list[Call]) -> str:
    said = []
    for name, arguments in calls:
        lines = [f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items()]
        said.append(f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>")
    return "\n".join(said)


def seed_oss(calls: list[Call]) -> str:
    said = []
    for name, arguments in calls:
        lines = [f"<parameter={key}>{plain(value)}</parameter>\n" for key, value in arguments.items()]
        said.append(f"<seed:tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</seed:tool_call>")
    return "".join(said)


def minimax(calls: list[Call]) -> str:
    said = []
    for name, arguments in calls:
        lines = [f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items()]
        said.append(f'<invoke name="{name}">\n{"".join(lines)}</invoke>\n')
    return "<minimax:tool_call>\n" + "".join(said) + "</minimax:tool_call>"


def dsml(calls: list[Call]) -> str:
    said = []
    for name, arguments in calls:
        lines = []
        for key, value in arguments.items():
            is_string = "true" if isinstance(value, str) else "false"
            lines.append(f'<｜DSML｜parameter name="{key}" string="{is_string}">{plain(value)}</｜DSML｜parameter>\n')
        said.append(f'<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n')
    return "<｜DSML｜function_calls>\n" + "".join(said) + "</｜DSML｜function_calls>"


def glm45(calls: list[Call]) -> str:
    said = []
    for name, arguments in calls:
        lines = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
        ]
        said.append(f"<tool_call>{name}\n{''.join(lines)}</tool_call>")
    return "\n".join(said)


def objects(begin: str, end: str) -> Callable[[list[Call]], str]:
    return lambda calls: "\n".join(f"{begin}{as_object(call)}{end}" for call in calls)


def glm47(calls: list[Call]) -> str:
    return (
        glm45(calls)
        .replace("</arg_key>\n", "</arg_key>")
        .replace("</arg_value>\n", "</arg_value>")
        .replace("<tool_call>now\n", "<tool_call>now")
        .replace("<tool_call>weather\n", "<tool_call>weather")
    )

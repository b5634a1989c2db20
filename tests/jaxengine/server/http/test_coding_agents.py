"""Requests as Claude Code and Codex send them: they are answered, and what has no effect is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxengine.requests.inputs import InputProcessor
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import Answer, http_client, post
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

FOLDER = Path(__file__).parents[3] / "fixtures" / "client_requests"
RECORDED = [case for name in ("claude_code", "codex") for case in json.loads((FOLDER / f"{name}.json").read_text())]
TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or () %}<call>{{ c.function | tojson }}{% endfor %}{% endfor %}<assistant>"
)
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SAID = {
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture
def scripted(chat_engine):
    """scripted(texts): an application, and the engine behind it, with room for a long prompt."""

    def build(*texts: str, **options):
        engine = ScriptedEngine(chat_engine, *texts)
        inputs = engine.inputs
        config = dataclasses.replace(inputs.config, chat_template=TEMPLATE, max_model_len=8192)
        engine.inputs = InputProcessor(config, inputs.model_config, inputs.tokenizer, inputs.generation_defaults)
        return create_app(engine, ServerConfig(served_model_name="tiny", **{**PARSERS, **options})), engine

    return build


@pytest.fixture
def says_yes(scripted):
    """An application for all rows of a table."""
    return scripted("Yes.")[0]


def named(answer) -> set[str]:
    """What the answer says has no effect."""
    assert "x-unknown-fields" not in answer.headers, answer.headers["x-unknown-fields"]
    return set(filter(None, answer.headers.get("x-ignored-fields", "").split(", ")))


@each_row("case", RECORDED, ids=[case["about"] for case in RECORDED])
async def test_a_recorded_request_is_answered(scripted, case):
    app, engine = scripted('{"title": "Hello"}')
    async with http_client(app) as client:
        answer = await client.post(case["path"], json=case["body"], headers=case["headers"])
    assert answer.status_code == 200, answer.text
    # SmolLM2's template has no variable for reasoning, nor has this one.
    assert named(answer) - {"reasoning", "thinking", "output_config.effort"} == set(case["ignored"])
    if "count_tokens" in case["path"]:
        assert answer.json()["input_tokens"] > 50
        return
    ends = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}
    assert ends[case["path"].partition("?")[0]] in answer.text.split("\n\n")[-2]
    prompt = engine.calls[-1][0]["prompt"]
    for absent in ("web_search", "image_generation", "tool_search", "encrypted", "x-anthropic-billing-header"):
        assert absent not in prompt


async def test_the_prompt_of_a_conversation_of_codex(scripted):
    app, engine = scripted("Done.")
    case = next(case for case in RECORDED if case["about"] == "after calls")
    assert (await post(app, case["path"], **case["body"])).status == 200
    tools, _, said = engine.calls[-1][0]["prompt"].partition("<system>")
    functions = {tool["function"]["name"]: tool["function"] for tool in json.loads(tools)}
    assert said.startswith("Be an agent that writes programs.\n\n<permissions>") and "<system>" not in said
    assert list(functions)[-2:] == ["mcp__github__get_issue", "mcp__github__list_issues"]
    assert functions["mcp__github__get_issue"]["description"].startswith("Namespace mcp__github: Tools of the GitHub")
    patch = functions["apply_patch"]
    assert "start: head change+ tail" in patch["description"] and patch["parameters"]["required"] == ["input"]
    calls = [json.loads(part.partition("<")[0]) for part in said.split("<call>")[1:]]
    assert [call["name"] for call in calls] == ["exec_command", "mcp__github__get_issue", "apply_patch"]
    arguments = calls[2]["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert arguments["input"].startswith("*** Begin Patch\n*** Add File: hello.py\n+print")
    assert "Success. Updated" in said


@each_row(
    ("path", "fields", "ignored"),
    [
        ("/v1/messages", {"context_management": {"edits": []}}, {"context_management"}),
        ("/v1/messages", {"context_management": {}}, {"context_management"}),
        ("/v1/messages", {"context_management": None}, set()),
        (
            "/v1/messages/count_tokens",
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
            {"context_management"},
        ),
        (
            "/v1/messages",
            {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
            {"output_config.task_budget"},
        ),
        (
            "/v1/messages",
            {"betas": ["a"], "service_tier": "auto", "cache_control": {}},
            {"betas", "service_tier", "cache_control"},
        ),
        (
            "/v1/messages",
            {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "auto"}},
            {"tools.bash_20250124"},
        ),
        (
            "/v1/messages/count_tokens",
            {"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}, {"type": "memory_20250818", "name": "memory"}]},
            {"tools.mcp_toolset", "tools.memory_20250818"},
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "redacted_thinking", "data": "x"},
                            {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
                            {"type": "web_search_tool_result", "tool_use_id": "a", "content": []},
                            {"type": "text", "text": "So."},
                        ],
                    },
                    {"role": "user", "content": "On"},
                ]
            },
            {"messages.redacted_thinking", "messages.server_tool_use", "messages.web_search_tool_result"},
        ),
        (
            "/v1/responses",
            {"reasoning": {"summary": "detailed", "context": "auto"}},
            {"reasoning.summary", "reasoning.context"},
        ),
        ("/v1/responses", {"reasoning": {"generate_summary": "concise"}}, {"reasoning.generate_summary"}),
        ("/v1/responses", {"include": ["web_search_call.action.sources"]}, {"include.web_search_call.action.sources"}),
        ("/v1/responses", {"tools": [{"type": "local_shell"}], "tool_choice": "auto"}, {"tools.local_shell"}),
        ("/v1/responses", {"tools": [{"type": "mcp", "server_label": "a"}, FUNCTION]}, {"tools.mcp"}),
        (
            "/v1/responses",
            {"tools": [{"type": "web_search_preview_2025_03_11"}]},
            {"tools.web_search_preview_2025_03_11"},
        ),
        ("/v1/responses/input_tokens", {"input": "Hi", "tools": [{"type": "file_search"}]}, {"tools.file_search"}),
        (
            "/v1/responses",
            {"stream": True, "stream_options": {"reasoning_summary_delivery": "sequential_cutoff"}},
            {"stream_options.reasoning_summary_delivery"},
        ),
    ],
)
async def test_hints_and_tools_without_effect_are_named(says_yes, path, fields, ignored):
    answer = await post(says_yes, path, **{**SAID.get(path, {}), **fields})
    assert answer.status == 200, answer.body
    assert named(answer) - {"reasoning"} == ignored


async def test_the_line_for_anthropics_accounts_is_no_part_of_a_prompt(scripted):
    """Its hash would keep every prefix from being found again."""
    app, engine = scripted("Yes.")
    brief = {"role": "user", "content": "Hi"}
    for line in ("x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=22;"):
        block = {"type": "text", "text": line}
        for system, messages, ignored in (
            (line, [brief], "system"),
            ([block, {"type": "text", "text": "Be"}], [brief], "system"),
            ("Be", [brief, {"role": "system", "content": line}, {"role": "system", "content": [block]}], "messages"),
        ):
            ask = {"system": system, "messages": messages, "max_tokens": 5}
            assert named(await post(app, "/v1/messages", **ask)) == {f"{ignored}.x-anthropic-billing-header"}
    prompts = [each[0]["prompt"] for each in engine.calls]
    assert prompts[:3] == prompts[3:] and not any("billing" in prompt for prompt in prompts)
    assert ["<system>" in prompt for prompt in prompts[:3]] == [False, True, True]
    # What a user or a model writes stays.
    await post(app, "/v1/messages", messages=[{"role": "user", "content": [block]}], max_tokens=5)
    assert line in engine.calls[-1][0]["prompt"]
    # Proxies send it to chat completions, and before the instructions in one text.
    both = {"role": "system", "content": f"{line}\nBe"}
    await post(app, "/v1/messages", system=both["content"], messages=[brief], max_tokens=5)
    for system in (both, {**both, "content": [block, {"type": "text", "text": "Be"}]}, {**both, "content": line}):
        await post(app, "/v1/chat/completions", messages=[system, brief], max_tokens=5)
    assert [each[0]["prompt"] for each in engine.calls[-4:]] == [prompts[1]] * 3 + [prompts[0]]
    alone = await post(app, "/v1/chat/completions", messages=[{**both, "content": line}], max_tokens=5)
    assert alone.status == 400 and alone.error["param"] == "messages"


SEARCH, ANTHROPIC_SEARCH = {"type": "web_search"}, {"type": "web_search_20250305", "name": "web_search"}


@each_row(
    ("path", "fields", "param", "about"),
    [
        ("/v1/responses", {"tools": [SEARCH, FUNCTION], "tool_choice": SEARCH}, "tool_choice", "web_search"),
        ("/v1/responses", {"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "web_search"),
        (
            "/v1/responses",
            {"tools": [SEARCH], "tool_choice": {"type": "mcp", "server_label": "a"}},
            "tool_choice",
            "mcp",
        ),
        ("/v1/responses", {"tools": [{"type": "web_serch"}]}, "tools", "namespace"),
        ("/v1/responses", {"tools": [FUNCTION, FUNCTION]}, "tools", "two tools"),
        (
            "/v1/responses",
            {"tools": [{"type": "namespace", "name": "a" * 250, "tools": [FUNCTION, FUNCTION]}]},
            "tools",
            "two",
        ),
        ("/v1/responses", {"tools": [{"type": "namespace", "name": "a", "tools": [SEARCH]}]}, "tools", "custom"),
        (
            "/v1/responses",
            {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]},
            "tools",
            "syntax",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "additional_tools", "tools": [{"type": "x"}]}]},
            "input",
            "input[0].tools[0]",
        ),
        ("/v1/responses", {"input": [{"type": "additional_tools"}]}, "input", "input[0].tools"),
        ("/v1/responses", {"reasoning": {"summary": "long"}}, "reasoning", "summary"),
        (
            "/v1/responses",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "include_obfuscation",
            "include",
        ),
        ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management", "context_management"),
        ("/v1/messages", {"tools": [ANTHROPIC_SEARCH], "tool_choice": {"type": "any"}}, None, "web_search_20250305"),
        (
            "/v1/messages",
            {"tools": [ANTHROPIC_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            None,
            "web_search",
        ),
        ("/v1/messages", {"tools": [{"type": "costum", "name": "a", "input_schema": {}}]}, None, "tools"),
        (
            "/v1/messages",
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            None,
            "context_management",
        ),
        (
            "/v1/messages/count_tokens",
            {
                "context_management": {
                    "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]
                }
            },
            None,
            "context_management",
        ),
    ],
)
async def test_what_would_change_the_answer_is_refused(says_yes, path, fields, param, about):
    answer = await post(says_yes, path, **{**SAID[path], **fields})
    assert answer.status == 400 and about in answer.json["error"]["message"], answer.body
    assert answer.json["error"].get("param") == param


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" B+ "\\n}"\nB: /[bß"{]/'}
LARK = {"type": "custom", "name": "c", "format": GRAMMAR}
REGEX = {"type": "custom", "name": "r", "format": {"type": "grammar", "syntax": "regex", "definition": "x/[0-9]\\\\+"}}
SPACE = {"type": "namespace", "name": "ns", "tools": [{"type": "custom", "name": "c"}, FUNCTION]}


async def said(app, **fields) -> tuple[list[dict], list[dict]]:
    """(items of the answer, events of the stream); both ways of asking have the same items."""
    whole = await post(app, "/v1/responses", input="Hi", **fields)
    assert whole.status == 200, whole.body
    streamed: Answer = await post(app, "/v1/responses", input="Hi", stream=True, **fields)
    frames = [part.partition("data: ")[2] for part in streamed.body.decode().split("\n\n")]
    events = [json.loads(frame) for frame in frames if frame]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == events[-1]["response"]["output"]
    without = [
        [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in of]
        for of in (items, whole.json["output"])
    ]
    assert without[0] == without[1]
    return items, events


@each_row(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb \\"q\\" \\u00fc \\ud83d\\ude00 \\\\d"}', 'a\nb "q" ü 😀 \\d'),
        ('{\n "input" :\t"x", "other": [1, {"input": "y"}]}', "x"),
        ('{"input": "half \\ud83d and \\udc00 and \\uzz and \\q"}', "half \ufffd and \ufffd and \\uzz and \\q"),
        ('{"patch": "p"}', "p"),
        ('{"other": 1, "input": "x"}', "x"),
        ('{"a": "p", "b": "q"}', '{"a": "p", "b": "q"}'),
        ('{"input": ""}', ""),
        ("{}", ""),
    ],
)
async def test_a_custom_tool_takes_one_text(scripted, arguments, text):
    """Whatever the model writes for it, whole and in pieces."""
    app, _ = scripted(f'Yes.<tool_call>{{"name": "ns__c", "arguments": {arguments}}}</tool_call>')
    (message, call), events = await said(app, tools=[SPACE])
    assert message["type"] == "message"
    assert (call["type"], call["name"], call["namespace"], call["status"]) == (
        "custom_tool_call",
        "c",
        "ns",
        "completed",
    )
    assert call["input"] == text and call["id"].startswith("ctc_") and call["call_id"]
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert "".join(event["delta"] for event in deltas) == done["input"] == text
    assert {event["item_id"] for event in deltas} | {done["item_id"]} == {call["id"]}


async def test_a_function_of_a_namespace_is_called_by_its_name(scripted):
    app, engine = scripted('<tool_call>{"name": "ns__f", "arguments": {}}</tool_call>')
    (call,), events = await said(app, tools=[SPACE])
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "f", "ns")
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["namespace"] == "ns"


async def test_the_conversation_of_a_custom_tool_goes_on(scripted):
    app, engine = scripted('<tool_call>{"name": "c", "arguments": {"patch": "é"}}</tool_call>')
    first = (await post(app, "/v1/responses", input="Hi", tools=[LARK])).json
    (call,) = first["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    await post(app, "/v1/responses", input=[result], tools=[LARK], previous_response_id=first["id"])
    kept = engine.calls[-1][0]["prompt"]
    await post(app, "/v1/responses", input=[{"role": "user", "content": "Hi"}, call, result], tools=[LARK])
    assert engine.calls[-1][0]["prompt"] == kept and "é" in kept and kept.endswith("<tool>ok<assistant>")


@each_row(
    ("text", "tools", "choice", "expected"),
    [
        ('abß"\n}', [LARK, FUNCTION], {"type": "custom", "name": "c"}, [("custom_tool_call", 'abß"\n}')]),
        ("x/7\\+", [REGEX], {"type": "custom", "name": "r"}, [("custom_tool_call", "x/7\\+")]),
        ('{"name": "c"}\nab\n}', [LARK, FUNCTION], "required", [("custom_tool_call", "ab\n}")]),
        ('{"name": "r"}\nx/7\\+', [LARK, REGEX], "required", [("custom_tool_call", "x/7\\+")]),
        ('[{"name": "f", "parameters": {}}]', [LARK, FUNCTION], "required", [("function_call", "{}")]),
    ],
)
async def test_a_forced_call_of_a_custom_tool(scripted, text, tools, choice, expected):
    app, _ = scripted(text)
    items, _ = await said(app, tools=tools, tool_choice=choice)
    assert [(item["type"], item.get("input", item.get("arguments"))) for item in items] == expected


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([LARK, FUNCTION], {"type": "custom", "name": "c"}),
        ([REGEX], {"type": "custom", "name": "r"}),
        ([LARK, REGEX], "required"),
        ([{**SPACE, "tools": [{**LARK}, FUNCTION]}], {"type": "custom", "name": "c", "namespace": "ns"}),
    ],
)
async def test_a_forced_text_is_of_its_grammar(chat_engine, tools, choice):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    bias = dict.fromkeys((chat_engine.inputs.tokenizer.encode(text)[0] for text in ("\n}", "\n")), 30)
    answer = await post(
        app,
        "/v1/responses",
        input="Hi",
        tools=tools,
        tool_choice=choice,
        max_output_tokens=100,
        seed=1,
        logit_bias={str(token): value for token, value in bias.items()},
    )
    assert answer.status == 200, answer.body
    (call,) = answer.json["output"]
    assert call["type"] == "custom_tool_call" and call["status"] == "completed", call
    if call["name"] == "c":
        assert call["input"][0] == "a" and call["input"].endswith("\n}") and set(call["input"][1:-2]) <= set('bß"{')
    else:
        assert call["input"][:2] == "x/" and call["input"][2].isdigit() and set(call["input"][3:]) == {"\\"}


async def test_a_grammar_that_cannot_be_used_is_named(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    for syntax, definition in (("lark", "start: ("), ("regex", "(a")):
        tool = {**LARK, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
        for choice in ({"type": "custom", "name": "c"}, "required"):
            answer = await post(app, "/v1/responses", input="Hi", tools=[tool], tool_choice=choice)
            assert answer.status == 400 and answer.error["param"] == "tools", answer.body

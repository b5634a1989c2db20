"""/v1/messages: the events in the order that Anthropic's clients read them, blocks, ends and errors."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from pydantic import TypeAdapter

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.messages.protocol import Conversation, MessagesRequest
from jaxengine.server.http.responses.tools import Callables, ResponseTool
from tests.jaxengine.server.asgi_client import http_client, post
from tests.jaxengine.server.field_matrix import check_acts
from tests.jaxengine.server.http.test_chat_fields import SAMPLING, TEMPLATE
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

PATH = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
ASK = {"model": "tiny", "max_tokens": 20, "messages": HI}
WEATHER = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [WEATHER, {"name": "now", "input_schema": {"type": "object"}}]
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
SAYS = (
    '<think>Hm, ü.</think>Yes.<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


@pytest.fixture
def scripted(chat_engine):
    def build(*texts: str, template: str | None = None, **options):
        engine = ScriptedEngine(chat_engine, *texts, chat_template=template)
        return create_app(engine, ServerConfig(served_model_name=("tiny", "alias"), **options)), engine

    return build


@pytest.fixture
def says_yes(scripted):
    """An application for all rows of a table."""
    return scripted("Yes.")[0]


@pytest.fixture
def answers(chat_engine):
    """The same with the engine itself behind it."""
    return create_app(chat_engine, ServerConfig(served_model_name="tiny"))


def events_of(answer) -> list[dict]:
    """What a stream says; each event is named twice."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.body
    *frames, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    lines = [frame.split("\n") for frame in frames]
    said = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]
    assert all(name == event["type"] for name, event in said)
    return [event for _, event in said]


def put_together(events: list[dict], whole: bool = True) -> dict:
    """The message, as Anthropic's clients add it up; the order of the events is checked. whole: its calls are."""
    message, buffers, closed = {}, {}, set()
    for number, event in enumerate(events):
        match event["type"]:
            case "message_start":
                assert number == 0 and event["message"]["content"] == []
                message = copy.deepcopy(event["message"])
            case "content_block_start":
                assert event["index"] == len(message["content"]) == len(closed)
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1 not in closed
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    text = buffers[event["index"]] = buffers.get(event["index"], "") + delta["partial_json"]
                    block["text"] = text
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "content_block_stop":
                closed.add(event["index"])
                block = message["content"][event["index"]]
                if block["type"] == "tool_use" and whole:
                    block["input"] = json.loads(block.pop("text"))
            case "message_delta":
                assert len(closed) == len(message["content"])
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case "message_stop":
                assert number == len(events) - 1
    return message


async def test_thinking_text_and_calls_whole_and_streamed(scripted):
    app, engine = scripted(SAYS, **PARSERS)
    answer = await post(app, PATH, **ASK, tools=TOOLS)
    message = answer.json
    assert message["id"].startswith("msg-") and (message["type"], message["role"]) == ("message", "assistant")
    assert (message["stop_reason"], message["stop_sequence"], message["model"]) == ("tool_use", None, "tiny")
    thinking, text, weather, now = message["content"]
    assert (thinking["thinking"], text) == ("Hm, ü.", {"type": "text", "text": "Yes."})
    assert (weather["name"], weather["input"], now["input"]) == ("weather", {"city": "Zürich"}, {})
    number = len(engine.inputs.tokenizer.encode(SAYS))
    assert message["usage"]["output_tokens"] == number and message["usage"]["input_tokens"] > 0
    events = events_of(await post(app, PATH, **ASK, tools=TOOLS, stream=True))
    streamed = put_together(events)
    for one in (message, streamed):
        one.pop("id")
        for block in one["content"]:
            block.pop("id", None)
    assert streamed == message
    assert events[0]["message"]["usage"]["output_tokens"] == 0


async def test_a_conversation_with_calls_is_the_chat_it_means(scripted):
    app, engine = scripted("Yes.", **PARSERS)
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Ö"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "text", "text": "So"}, call],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "20"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    # Texts are joined as those of a chat completion are; vLLM joins those of `system` without a line break.
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    answer = await post(app, PATH, **{**ASK, "messages": messages}, system=system, tools=TOOLS)
    assert answer.status == 200, answer.body
    prompt = engine.calls[-1][0]["prompt_token_ids"]
    function = {"name": "weather", "arguments": '{"city": "Ö"}'}
    chat = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "So",
            "reasoning": "Hm",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "20"},
        {"role": "user", "content": "Well?"},
    ]
    weather = {"name": "weather", "description": "d", "parameters": WEATHER["input_schema"]}
    now = {"name": "now", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": each} for each in (weather, now)]
    await post(app, "/v1/chat/completions", model="tiny", messages=chat, tools=tools)
    assert engine.calls[-1][0]["prompt_token_ids"] == prompt
    counted = await post(app, PATH + "/count_tokens", model="tiny", messages=messages, system=system, tools=TOOLS)
    assert counted.json == {"input_tokens": len(prompt)}
    # Each has the variables of the template and, with "", the model itself.
    moved = {"messages": HI, "model": "", "chat_template_kwargs": {"mood": "very good " * 9}}
    app, engine = scripted("Yes.", template=TEMPLATE)
    assert (await post(app, PATH, **{**ASK, **moved})).json["model"] == "tiny"
    counted = await post(app, PATH + "/count_tokens", **moved)
    assert counted.json == {"input_tokens": len(engine.calls[-1][0]["prompt_token_ids"])}
    assert counted.json["input_tokens"] > 20


async def test_forced_calls_and_schemas(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    tool = {
        "name": "pick",
        "input_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    }
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "pick"}):
        ask = {**ASK, "max_tokens": 60, "tools": [tool], "tool_choice": choice, "seed": 1}
        for message in (
            (await post(app, PATH, **ask)).json,
            put_together(events_of(await post(app, PATH, **ask, stream=True))),
        ):
            (block,) = message["content"]
            assert message["stop_reason"] == "tool_use" and block["name"] == "pick" and block["input"]["a"] in (1, 2)
    config = {"format": {"type": "json_schema", "schema": {"enum": [7]}}}
    answer = await post(app, PATH, **ASK, output_config=config)
    assert json.loads(answer.json["content"][0]["text"]) == 7


async def test_ends_are_named(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    long = (await post(app, PATH, **{**ASK, "max_tokens": 8}, ignore_eos=True, seed=3)).json
    assert (long["stop_reason"], long["stop_sequence"], long["usage"]["output_tokens"]) == ("max_tokens", None, 8)
    text = long["content"][0]["text"]
    stop = text[-3:]
    cut = (await post(app, PATH, **{**ASK, "max_tokens": 8}, ignore_eos=True, seed=3, stop_sequences=[stop])).json
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert text.startswith(cut["content"][0]["text"])


async def test_a_call_that_a_stop_sequence_cuts_is_not_to_be_run(scripted):
    """As in vLLM: a cut call may have other arguments than the model meant; a whole one before the text is a call."""
    for said, ended in (
        ('<tool_call>{"name": "weather", "arguments": {"city": "Zü', ("stop_sequence", "ri")),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Zü"}}</tool_call>\n', ("tool_use", None)),
    ):
        app, engine = scripted(said, **PARSERS)
        complete = engine._completion
        engine._completion = lambda *own, complete=complete: dataclasses.replace(complete(*own), stop_reason="ri")
        ask = {**ASK, "tools": TOOLS, "stop_sequences": ["ri"]}
        whole = (await post(app, PATH, **ask)).json
        for one in (whole, put_together(events_of(await post(app, PATH, **ask, stream=True)), whole=False)):
            assert (one["stop_reason"], one["stop_sequence"]) == ended
            assert [block["type"] for block in one["content"]] == ["tool_use"]


async def test_an_answer_that_is_ended_early_may_be_gone_on_with(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    answer = await post(app, PATH, **{**ASK, "max_tokens": 200}, ignore_eos=True, timeout=0.05)
    assert (answer.status, answer.json["stop_reason"]) == (200, "pause_turn")


async def test_the_model_goes_on_with_an_answer(scripted):
    app, engine = scripted(" well.")
    answer = await post(app, PATH, **{**ASK, "messages": [*HI, {"role": "assistant", "content": "All is"}]})
    assert answer.json["content"] == [{"type": "text", "text": " well."}] and answer.json["stop_reason"] == "end_turn"
    assert engine.calls[-1][0]["prompt"].endswith("All is")


def test_messages_add_and_remove_tools():
    listed = [{"name": name, "input_schema": {}} for name in ("bash", "search", "fetch")]
    listed[1]["defer_loading"] = listed[2]["defer_loading"] = True

    def tools(*changes):
        text = {"type": "text", "text": "Tools changed."}
        messages = [*HI, *({"role": "system", "content": [text, each]} for each in changes)]
        chat = Conversation(messages=messages, tools=listed).chat_request()
        assert chat.messages[1:] == [{"role": "system", "content": "Tools changed."}] * len(changes)
        return {tool["function"]["name"]: tool["function"].get("defer_loading") for tool in dumped(chat)["tools"]}

    def dumped(chat):
        return chat.model_dump(exclude_unset=True)

    def change(kind, name):
        return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}

    defined = {"type": "tool_definition", "definition": {"name": "query", "input_schema": {}}}
    removal, addition = change("removal", "bash"), change("addition", "bash")
    assert tools() == {"bash": None, "search": True, "fetch": True}
    assert tools(change("addition", "search")) == {"bash": None, "search": None, "fetch": True}
    assert list(tools(removal)) == ["search", "fetch"] and list(tools(removal, addition)) == ["bash", "search", "fetch"]
    assert list(tools({"type": "tool_addition", "tool": defined})) == ["bash", "search", "fetch", "query"]
    for wrong, message in (
        (change("addition", "missing"), r"messages\[1\].content\[1\].tool.name is 'missing'; allowed: names that"),
        ({"type": "tool_removal", "tool": defined}, "tool.type is 'tool_definition'; allowed: tool_reference"),
        (
            {"type": "tool_addition", "tool": {**defined, "definition": {"name": "f"}}},
            "definition: input_schema",
        ),
        ({"type": "tool_addition"}, "tool.type is None; allowed: tool_reference, tool_definition"),
    ):
        with pytest.raises(RequestError, match=message):
            tools(wrong)
    # Keys without effect are named.
    of_function = {**defined["definition"], "cache_control": {}, "rank": 1}
    block = {"type": "tool_addition", "tool": {**defined, "definition": of_function, "name": "query"}, "why": "x"}
    asked = Conversation(
        messages=[*HI, {"role": "system", "content": [block, {**removal, "cache_control": {"type": "a"}}]}]
    )
    named = ("why", "tool.name", "tool.definition.cache_control", "tool.definition.rank")
    wanted = ["messages.cache_control", *(f"messages.tool_addition.{each}" for each in named)]
    assert list(asked.ignored_parts) == wanted
    # Names that occur twice, a choice of what a message adds, and an assistant's message that is not the last one.
    (twice, own), call = listed[:1] * 2, {"type": "bash_20250124", "name": "bash"}
    with pytest.raises(RequestError, match="two functions with the same name"):
        Conversation(messages=HI, tools=[twice, own]).chat_request()
    both = Conversation(messages=HI, tools=[own, call]).chat_request()
    assert [tool.function.name for tool in both.tools or ()] == ["bash"]
    added = [*HI, {"role": "assistant", "content": "Yes"}, {"role": "system", "content": [addition]}]
    added[-1]["content"] = [{"type": "tool_addition", "tool": {**defined, "definition": own}}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "bash"}):
        chat = Conversation(messages=added, tools=[call], tool_choice=choice).chat_request()
        assert [tool.function.name for tool in chat.tools or ()] == ["bash"] and not chat.continue_final_message
    for fields in ({"system": [addition], "messages": HI}, {"messages": [{"role": "user", "content": [addition]}]}):
        with pytest.raises(RequestError, match=r"content\[0\].type is 'tool_addition'|system\[0\].type is 'tool_add"):
            Conversation(**fields).chat_request()


async def test_thinking_that_is_disabled_is_the_effort_none(scripted):
    """A template may know efforts alone, and an effort of the request does not switch thinking on again."""
    off = {"thinking": {"type": "disabled"}}
    for template, prompt in (
        ("{{ reasoning_effort }}", "none"),
        ("{{ enable_thinking }}", "False"),
        ("{{ thinking }} {{ reasoning_effort }}", "False none"),
        ("{{ 'x' }}", "x"),
    ):
        for fields in (off, {**off, "output_config": {"effort": "high"}}):
            app, engine = scripted("Yes.", template=template)
            answer = await post(app, PATH, **ASK, **fields)
            assert answer.status == 200 and engine.calls[-1][0]["prompt"] == prompt, answer.body
            ignored = answer.headers.get("x-ignored-fields", "").split(", ")
            assert ("thinking" in ignored) == (prompt == "x")
            assert ("output_config.effort" in ignored) == ("output_config" in fields)


def test_a_tool_that_is_deferred_reaches_the_template():
    function, custom = {"type": "function", "name": "f"}, {"type": "custom", "name": "g"}
    for name, given in (("a", {}), ("b", {"defer_loading": True}), ("c", {"defer_loading": False})):
        # OpenAI's chat tool has the key beside its function; a function's own is stronger.
        (tool,) = ChatRequest.of({"messages": HI, "tools": [{"function": {"name": name}, **given}]}).tools or ()
        assert tool.function.model_dump(exclude_unset=True) == {"name": name, **given}
        made = Callables.of(
            [TypeAdapter(ResponseTool).validate_python({**each, **given}) for each in (function, custom)]
        )
        assert [each["function"].get("defer_loading") for each in made.functions] == [given.get("defer_loading")] * 2
    own = {"function": {"name": "a", "defer_loading": False}, "defer_loading": True}
    (tool,) = ChatRequest.of({"messages": HI, "tools": [own]}).tools or ()
    assert tool.function.defer_loading is False


@each_row(
    ("fields", "about"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "input",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": TOOLS}, "enable-auto-tool-choice"),
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"stop_sequences": ["a"], "stop": ["b"]}, "stop_sequences"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_token_budget": 9},
            "thinking.budget_tokens and thinking_token_budget are the same",
        ),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "http://a"}}}}, "output_config"),
    ],
)
async def test_what_is_wrong_is_named_in_anthropics_shape(answers, fields, about):
    asked = {name: value for name, value in {**ASK, **fields}.items() if value is not None}
    for stream in (False, True):
        answer = await post(answers, PATH, **asked, stream=stream)
        assert answer.status == 400 and set(answer.json) == {"type", "error"}, answer.body
        assert answer.json["type"] == "error" and answer.json["error"]["type"] == "invalid_request_error"
        assert about in answer.json["error"]["message"]


async def test_a_key_as_anthropics_clients_send_it(chat_engine):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny", api_key="right"))
    for headers, status, kind in (
        ({"X-Api-Key": "right"}, 200, None),
        ({"Authorization": "Bearer right"}, 200, None),
        ({"X-Api-Key": "wrong"}, 401, "authentication_error"),
        ({"X-Api-Key": "right", "Authorization": "Bearer wrong"}, 401, "authentication_error"),
        ({}, 401, "authentication_error"),
    ):
        async with http_client(app) as client:
            answer = await client.post(PATH, json=ASK, headers=headers)
        assert answer.status_code == status and (kind is None or answer.json()["error"]["type"] == kind), headers
    async with http_client(app) as client:
        answer = await client.post(PATH, json={**ASK, "model": "other"}, headers={"X-Api-Key": "right"})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"


async def test_what_another_engine_fetches_is_in_the_answer(scripted):
    app, engine = scripted("Hello.")
    plain, moved = engine.stream, {"remote_block_ids": [[1]]}

    async def moves(*arguments, **options):
        async for output in plain(*arguments, **options):
            output.kv_transfer_params = moved if output.finished else None
            yield output

    assert "kv_transfer_params" not in (await post(app, PATH, **ASK)).json
    engine.stream = moves
    assert (await post(app, PATH, **ASK)).json["kv_transfer_params"] == moved


async def test_a_stream_that_fails_says_so(scripted):
    app, engine = scripted("Hello there, all of you")
    engine.failure, plain = RuntimeError("nobody knows"), engine.stream

    async def breaks(*arguments, **options):
        count = 0
        async for output in plain(*arguments, **options):
            if count == 2:
                raise engine.failure
            count += 1
            yield output

    engine.stream = breaks
    *events, last = events_of(await post(app, PATH, **ASK, stream=True))
    assert events[0]["type"] == "message_start" and last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "internal error of the server"}


FIELDS = {
    **{name: value for name, value in SAMPLING.items() if name != "structured_outputs"},
    "structured_outputs": {"regex": "a+"},
    "messages": [{"role": "user", "content": "Other"}],
    "model": "alias",
    "max_tokens": 5,
    "system": "Be brief.",
    "stop_sequences": ["x"],
    "tools": (TOOLS, {}),
    "tool_choice": ({"type": "none"}, {"tools": TOOLS}),
    "thinking_token_budget": 9,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "stop_in_reasoning": (True, {"stop_sequences": ["x"]}),
    "chat_template_kwargs": {"mood": "good"},
    "kv_transfer_params": {"do_remote_prefill": False},
}


def test_no_field_is_forgotten():
    # Without effect where it is accepted: see test_coding_agents.
    assert {*FIELDS, "context_management"} == MessagesRequest.model_fields.keys()


@pytest.fixture
def says_all(scripted):
    """As `scripted`, for all rows of a table."""
    return scripted(SAYS, template=TEMPLATE, **PARSERS)


@each_row("name", FIELDS)
async def test_a_field_acts(says_all, name, caplog):
    app, engine = says_all
    value, beside = FIELDS[name] if isinstance(FIELDS[name], tuple) else (FIELDS[name], {})
    base = {**{key: value for key, value in ASK.items() if key != "model"}, **beside}
    await check_acts(app, engine, PATH, base, name, value, caplog)


@each_row("name", MessagesRequest.refused)
async def test_a_field_is_refused(says_yes, name):
    for value in (True, 7, "x", [1], {"a": 1}):
        answer = await post(says_yes, PATH, **ASK, **{name: value})
        neutral = any(type(value) is type(one) and value == one for one in MessagesRequest.refused[name])
        assert answer.status == (200 if neutral else 400), (name, value, answer.body)
        assert neutral or name in answer.json["error"]["message"]

"""/cohere/v2/chat: the messages and events of Cohere's clients, and what their fields become."""

from __future__ import annotations

import json

import pytest

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.cohere_protocol import CohereChatRequest
from tests.jaxengine.server.asgi_client import http_client, post
from tests.jaxengine.server.scripted_engine import ScriptedEngine

PATH = "/cohere/v2/chat"
HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
SAYS = (
    '<think>Hm, ü.</think>Yes.<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


@pytest.fixture
def scripted(chat_engine):
    def build(text: str, template: str | None = None, **options):
        engine = ScriptedEngine(chat_engine, text, chat_template=template)
        return create_app(engine, ServerConfig(served_model_name=("tiny",), **options)), engine

    return build


def asked(**fields) -> CohereChatRequest:
    return CohereChatRequest.model_validate({"messages": HI, **fields})


def events_of(body: bytes) -> list[dict]:
    *events, done = body.decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(events: list[dict]) -> dict:
    """The complete response, from the events of a stream, whose order is checked."""
    first, *rest, last = events
    assert first["type"] == "message-start" and first["delta"] == {"message": {"role": "assistant"}}
    assert (last["type"], last["id"]) == ("message-end", first["id"])
    message, scores, opened = {"role": "assistant"}, [], None
    for event in rest:
        kind, _, step = event["type"].rpartition("-")
        field = {"content": "content", "tool-call": "tool_calls"}[kind]
        if step == "start":
            assert opened is None and event["index"] == len(message.setdefault(field, []))
            message[field].append(opened := event["delta"]["message"][field])
        elif step == "end":
            opened = None
        elif kind == "content":
            ((name, text),) = event["delta"]["message"]["content"].items()
            opened[name] += text
            scores += event["logprobs"]["token_ids"] if "logprobs" in event else []
        else:
            opened["function"]["arguments"] += event["delta"]["message"][field]["function"]["arguments"]
    assert opened is None
    return {"id": first["id"], **last["delta"], "message": message} | ({"logprobs": scores} if scores else {})


async def test_answers_whole_and_streamed(scripted):
    app, _ = scripted(SAYS, **PARSERS)
    body = {"model": "tiny", "messages": HI, "tools": TOOLS, "logprobs": True}
    whole, streamed = (await post(app, PATH, **body)).json, await post(app, PATH, **body, stream=True)
    joined = put_together(events_of(streamed.body))
    for one in (whole, joined):
        assert one["message"]["content"] == [
            {"type": "thinking", "thinking": "Hm, ü."},
            {"type": "text", "text": "Yes."},
        ]
        called = [(each["type"], each["function"]["name"]) for each in one["message"]["tool_calls"]]
        assert called == [("function", "weather"), ("function", "now")] and one["finish_reason"] == "TOOL_CALL"
        assert json.loads(one["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich"}
        counts = one["usage"]["tokens"]
        assert one["usage"] == {"billed_units": counts, "tokens": counts, "cached_tokens": 0}
        assert counts["output_tokens"] == len(whole["logprobs"]) > 20
    ids = [token for each in whole["logprobs"] for token in each["token_ids"]]
    assert len(joined["logprobs"]) > 5 and joined["logprobs"] == ids[: len(joined["logprobs"])]
    assert {tuple(each["logprobs"]) for each in whole["logprobs"]} == {(-0.5,)}


def test_what_messages_become():
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    blocks = [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    documents = [{"type": "text", "text": "c"}, {"type": "document", "document": {"id": "d", "data": {"x": "y"}}}]
    chat = asked(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]},
            {"role": "user", "content": [{"type": "text", "text": "e"}, image]},
            {"role": "user", "content": [{"type": "text", "text": each} for each in "uv"]},
            {"role": "assistant", "content": blocks, "tool_plan": "p", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": documents},
            {"role": "assistant", "tool_calls": [{**call, "function": {"name": "now"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "f"},
        ],
        tools=TOOLS,
        strict_tools=True,
        tool_choice="REQUIRED",
        documents=["g", {"id": "own", "data": {"title": "h"}}],
        safety_mode="STRICT",
        citation_options={"mode": "OFF"},
        max_tokens=5,
        stop_sequences=["z"],
        k=3,
        p=0.5,
        thinking={"type": "enabled", "token_budget": 7},
    ).chat_request(limits_thinking=True)
    assert chat.messages == [
        {"role": "system", "content": "st"},
        {"role": "user", "content": [{"type": "text", "text": "e"}, image]},
        {"role": "user", "content": [{"type": "text", "text": each} for each in "uv"]},  # joined by a line break
        {"role": "assistant", "content": "b", "reasoning": "ap", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": 'c\n{"id": "d", "data": {"x": "y"}}'},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "f"},
    ]
    assert chat.chat_template_kwargs == {
        "documents": [{"id": "doc_0", "data": {"text": "g"}}, {"id": "own", "data": {"title": "h"}}],
        "safety_mode": "strict",
        "citation_options": {"mode": "OFF"},
    }
    assert (chat.tool_choice, [tool.function.strict for tool in chat.tools or ()]) == ("required", [True, True])
    assert (chat.max_completion_tokens, chat.stop, chat.top_k, chat.top_p) == (5, ["z"], 3, 0.5)
    assert (chat.thinks, chat.thinking_token_budget) == (True, 7)
    off = asked(thinking={"type": "disabled", "token_budget": 7})
    chat, ignored = off.chat_request(limits_thinking=True), off.ignored_parts("", limits_thinking=True)
    assert (chat.thinks, chat.thinking_token_budget, [*ignored]) == (False, None, ["thinking.token_budget"])
    for given, wanted in (
        ({}, "json_object"),
        ({"json_schema": {}}, "json_object"),
        ({"json_schema": CITY}, "json_schema"),
        (None, None),
    ):
        form = None if given is None else {"type": "json_object", **given}
        made = asked(response_format=form).chat_request().response_format
        assert (made and made.type) == wanted


async def test_errors_ends_and_what_has_no_effect(scripted):
    app, _ = scripted("All is well.")
    answer = await post(app, PATH, model="tiny", messages=HI)
    assert answer.json["finish_reason"] == "COMPLETE" and "logprobs" not in answer.json
    for fields, status, about in (
        ({"model": "other"}, 404, "other"),
        ({"max_tokens": 0}, 400, "max_tokens is 0"),
        ({"p": 2.0}, 400, "p must be"),
        ({"top_p": 2.0}, 400, "top_p must be"),
        ({"k": 2, "top_k": 2}, 400, "k and top_k are the same"),
        ({"stop_sequences": [""]}, 400, "stop_sequences"),
        ({"tool_choice": "REQUIRED"}, 400, "tool_choice is only allowed with tools"),
        ({"messages": [{"role": "x"}]}, 400, "messages[0].role is 'x'; allowed: user"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
        ({"documents": [{"id": "a"}]}, 400, "documents[0]"),
        ({"response_format": {"type": "text", "json_schema": CITY}}, 400, "response_format.json_schema is only"),
        (
            {"thinking": {"type": "enabled", "token_budget": 5}, "thinking_token_budget": 4},
            400,
            "thinking.token_budget and thinking_token_budget are the same",
        ),
    ):
        wrong = await post(app, PATH, **{"model": "tiny", "messages": HI, **fields})
        assert (wrong.status, list(wrong.json)) == (status, ["message"]) and about in wrong.json["message"], wrong.body
    given = {
        "documents": [{"data": "a", "snippet": "b"}],
        "safety_mode": "OFF",
        "thinking": {"type": "enabled", "token_budget": 5},
    }
    named = await post(app, PATH, model="tiny", messages=[{**HI[0], "citations": [1]}], **given)
    wanted = ["documents", "safety_mode", "thinking.token_budget", "messages.citations", "documents.snippet"]
    wanted.append("thinking")
    assert named.headers["x-ignored-fields"].split(", ") == wanted
    app, engine = scripted("All", "{{ documents[0].data.text }} {{ safety_mode }}", chat_template_kwargs_allowed=False)
    refused = await post(app, PATH, model="tiny", messages=HI, **given)
    assert refused.status == 400 and refused.json["message"].startswith("documents are not allowed"), refused.body
    app, engine = scripted("All", "{{ documents[0].data.text }} {{ safety_mode }}")
    await post(app, PATH, model="tiny", messages=HI, **given)
    assert engine.calls[-1][0]["prompt"] == "a off"
    async with http_client(app) as client:
        rendered = await client.post(f"{PATH}/render", json={"model": "tiny", "messages": HI, **given})
    assert rendered.json()["token_ids"] == engine.calls[-1][0]["prompt_token_ids"]
    with pytest.raises(RequestError, match="k must be"):
        asked(k=-5).chat_request().sampling_params(engine.inputs, ServerConfig())


async def test_a_stream_that_fails_ends_its_block(scripted, monkeypatch):
    app, engine = scripted("All is well.")
    run = engine.stream

    async def breaks(*arguments, **options):
        async for output in run(*arguments, **options):
            yield output
            raise EngineDeadError("gone")

    monkeypatch.setattr(engine, "stream", breaks)
    answer = await post(app, PATH, model="tiny", messages=HI, stream=True)
    first, *_, closed, last = events_of(answer.body)
    assert (first["type"], closed) == ("message-start", {"type": "content-end", "index": 0})
    assert (last["type"], last["id"], last["delta"]["finish_reason"]) == ("message-end", first["id"], "ERROR")
    assert "cannot answer" in last["delta"]["error"]

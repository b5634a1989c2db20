"""/openapi.json and Allow say what the server really does."""

from __future__ import annotations

import json

import pytest

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import Recorder, http_client
from tests.jaxengine.server.http.checked_document import Checked
from tests.jaxengine.server.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name="tiny", api_key="right"))


async def get_document(app):
    async with http_client(app, "right") as client:
        return (await client.get("/openapi.json")).json()


async def test_errors_are_those_that_come(app):
    document = await get_document(app)
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    assert not [path for path, _, operation in operations if "422" in operation["responses"]]
    assert "HTTPValidationError" not in document["components"]["schemas"]
    async with http_client(app) as client:
        for path, method, operation in operations:
            assert {"401", "500", "503"} <= operation["responses"].keys(), path
            assert operation["description"] and "Raises" not in operation["description"], path
            if "requestBody" in operation:
                assert {"400", "413", "415", "429"} <= operation["responses"].keys(), path
            answer = await client.request(method, path.replace("{response_id}", "a").replace("{model}", "a"))
            shape = operation["responses"]["401"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if answer.status_code == 401:
                required = document["components"]["schemas"][shape]["required"]
                assert answer.json().keys() == set(required), path
    kinds = {
        path: operation["responses"]["200"]["content"]
        for path, _, operation in operations
        if "requestBody" in operation and path != "/invocations"  # whose answers are those of other routes
    }
    assert "text/event-stream" in kinds["/v1/chat/completions"] and "text/event-stream" in kinds["/v1/messages"]
    assert "text/event-stream" not in kinds["/tokenize"]


async def test_pages_of_documentation_can_be_left_out(chat_engine):
    app = create_app(chat_engine, ServerConfig(disable_fastapi_docs=True))
    async with http_client(app) as client:
        for path in ("/docs", "/openapi.json"):
            answer = await client.get(path)
            assert answer.status_code == 404 and "/docs lists" not in answer.json()["error"]["message"]
        assert (await client.get("/v1/models")).status_code == 200


async def test_methods_that_a_path_has_are_all_named(app):
    async with http_client(app, "right") as client:
        for path, methods in (
            ("/v1/responses/resp_a", "DELETE, GET"),
            ("/v1/chat/completions", "POST"),
            ("/ping", "GET, POST"),
        ):
            answer = await client.patch(path)
            assert (answer.status_code, answer.headers["allow"]) == (405, methods), path
            assert answer.json()["error"]["message"] == f"the method is not allowed here; allowed: {methods}"


CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 8}
FULL_CHAT = {
    **CHAT,
    "logprobs": True,
    "top_logprobs": 2,
    "n": 2,
    "return_token_ids": True,
    "return_prompt_text": True,
    "tools": [{"type": "function", "function": TOOL}],
}
COMPLETION = {"prompt": "Hi", "max_tokens": 4}
RESPONSE = {
    "input": "Hi",
    "top_logprobs": 2,
    "tools": [{"type": "function", **TOOL}],
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
}
MESSAGE = {
    "messages": MESSAGES,
    "max_tokens": 8,
    "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
}
COHERE = {
    "messages": MESSAGES,
    "tools": [{"function": {"name": TOOL["name"], "parameters": TOOL["parameters"]}}],
    "logprobs": True,
}
STREAM = {"stream": True}
TOKENS = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "logprobs": 1, "n": 2}}
GENERATED = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5, 6], "finish_reason": "stop"}]}
COUNTED = {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
# What a scripted engine with reasoning and calls is asked, and what one that computes is: path, body.
SCRIPTED = [
    ("/v1/chat/completions", FULL_CHAT),
    ("/v1/chat/completions", {**FULL_CHAT, **COUNTED}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, **STREAM}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {**MESSAGE, **STREAM}),
    ("/cohere/v2/chat", COHERE),
    ("/cohere/v2/chat", {**COHERE, **STREAM}),
]
COMPUTED = [
    ("/v1/chat/completions/batch", {**CHAT, "messages": [MESSAGES, MESSAGES]}),
    ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 1}),
    ("/v1/completions", {**COMPLETION, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}),
    ("/v1/completions", {**COMPLETION, **COUNTED, "logprobs": 2, "return_token_ids": True}),
    ("/inference/v1/generate", {**TOKENS, "return_token_ids": True}),
    (
        "/inference/v1/generate",
        {**TOKENS, "return_token_ids": True, **STREAM, "stream_options": {"include_usage": True}},
    ),
    ("/skyrl/v1/generate", TOKENS),
    ("/generative_scoring", {"query": "A cat", "items": [" sat", " ran"], "label_token_ids": [5, 6]}),
    ("/v1/chat/completions/render", CHAT),
    ("/v1/chat/completions/derender", {"generate_response": GENERATED}),
    ("/v1/chat/completions/derender", {"generate_chunk": GENERATED, **STREAM}),
    ("/v1/completions/derender", {"generate_responses": [GENERATED]}),
    ("/v1/completions/derender", {"generate_chunk": GENERATED, **STREAM}),
    ("/v1/completions/render", {**COMPLETION, **COUNTED}),
    ("/v1/messages/render", {**MESSAGE, "tools": None}),
    ("/cohere/v2/chat/render", {**COHERE, "tools": None}),
    ("/v1/responses/render", {"input": "Hi"}),
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
]


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_answers_are_as_the_document_says(chat_engine):
    switches = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    config = ServerConfig(served_model_name="tiny", **switches)
    scripted = create_app(ScriptedEngine(chat_engine, f"<think>Hm</think>Hello {CALL}"), config)
    computed = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    failing = Recorder(chat_engine)
    failing.fail_after = 1
    failing_app = create_app(failing, ServerConfig(served_model_name="tiny"))
    async with http_client(computed) as client:
        document = (await client.get("/openapi.json")).json()
    checked = Checked(document)
    broken = [("/v1/completions", {**COMPLETION, **STREAM}), ("/v1/messages", {**MESSAGE, **STREAM, "tools": None})]
    kinds = set()
    for app, asked in ((scripted, SCRIPTED), (computed, COMPUTED), (failing_app, broken)):
        async with http_client(app) as client:
            for path, body in asked:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
                kind = answer.headers["content-type"].partition(";")[0]
                values = events_of(answer.text) if kind == "text/event-stream" else [answer.json()]
                kinds |= {value.get("type") for value in values if isinstance(value, dict)}
                checked.check("post", path, kind, values)
    assert {"error", "message_delta", "response.output_text.done", "response.function_call_arguments.done"} <= kinds
    assert {"response.reasoning_text.delta", "response.completed", "content_block_start"} <= kinds
    async with http_client(computed) as client:
        streamed = await client.post("/v1/responses", json={"input": "Hi", "background": True, **STREAM})
        name = events_of(streamed.text)[0]["response"]["id"]
        followed = await client.get(f"/v1/responses/{name}?stream=true")
        assert followed.text == streamed.text
        checked.check("get", "/v1/responses/{response_id}", "text/event-stream", events_of(followed.text))
        stored = (await client.post("/v1/responses", json={"input": "Hi", "background": True})).json()
        known = {"{response_id}": stored["id"], "{model}": "tiny", "{model:path}": "tiny"}
        for method, path in (
            ("post", "/v1/responses/{response_id}/cancel"),
            ("get", "/v1/responses/{response_id}"),
            ("get", "/v1/responses/{response_id}/input_items"),
            ("delete", "/v1/responses/{response_id}"),
            *(("get", path) for path in ("/v1/models", "/v1/models/{model}", "/version", "/load")),
        ):
            where = path
            for name, value in known.items():
                where = where.replace(name, value)
            answer = await client.request(method, where)
            assert answer.status_code == 200, (where, answer.text)
            checked.check(method, path, "application/json", [answer.json()])
    # What has a type was held to it, answers of pooling models and transcripts in tests of theirs; what has none is
    # free in its form.
    free = {"/status.json", "/trace", "/invocations", "/metrics"}
    typed = {
        (method, path, kind)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        for kind in operation["responses"]["200"].get("content", ())
        if path not in free and operation["tags"][0] not in ("pooling", "scores", "audio")
    }
    assert typed == checked.seen

"""Routes that end in /derender: answers of /inference/v1/generate become those of OpenAI's routes."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
SAMPLED = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 4}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}]
SAID = 'Hm\n</think>\n\nWait.<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig())


@pytest.fixture(scope="module")
def parsing(chat_engine):
    switches = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "deepseek_r1"}
    return create_app(chat_engine, ServerConfig(**switches))


def events(answer):
    lines = answer.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def without(value, *names):
    return {name: each for name, each in value.items() if name not in names}


def rounded(value):
    """JSON with its numbers rounded: a batch of other rows may change the last bits of a log-probability."""
    return json.loads(json.dumps(value), parse_float=lambda number: round(float(number), 3))


def counted(answer):
    """The numbers of tokens; whether some were cached depends on what the engine was asked before."""
    return without(answer["usage"], "prompt_tokens_details")


async def test_rendered_generated_and_derendered_is_what_the_route_answers(app):
    """With log-probabilities, n, and stop strings; of chats and completions, whole and as streams."""
    chat = {"messages": MESSAGES, **SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    direct = (await post(app, CHAT, **chat, request_id="a")).json
    asked = (await post(app, f"{CHAT}/render", **chat, request_id="a")).json
    generated = (await post(app, GENERATE, **asked)).json
    found = (await post(app, f"{CHAT}/derender", generate_response=generated, chat_request=chat)).json
    assert rounded(without(found, "id", "created", "usage")) == rounded(without(direct, "id", "created", "usage"))
    assert found["usage"]["completion_tokens"] == 12 and counted(found) == counted(direct)
    # Without the request, in which case all is listed; the prompt's number is as given.
    plain = (await post(app, f"{CHAT}/derender", generate_response=generated, prompt_tokens=3)).json
    assert [each["message"] for each in plain["choices"]] == [each["message"] for each in direct["choices"]]
    assert len(plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) >= 2
    assert plain["usage"]["prompt_tokens"] == 3
    stop = direct["choices"][0]["message"]["content"][2]
    prompts = {"prompt": [[5], [5, 6]], **SAMPLED, "n": 2, "logprobs": 1, "stop": stop}
    direct = (await post(app, COMPLETIONS, **prompts)).json
    asked = (await post(app, f"{COMPLETIONS}/render", **prompts)).json
    generated = [(await post(app, GENERATE, **each)).json for each in asked]
    ids = [each["token_ids"] for each in asked]
    body = {"generate_responses": generated, "completion_request": prompts, "prompt_token_ids": ids}
    found = (await post(app, f"{COMPLETIONS}/derender", **body)).json
    assert rounded(found["choices"]) == rounded(direct["choices"]) and counted(found) == counted(direct)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_events_are_derendered_one_by_one(app, path):
    fields = {"messages": MESSAGES} if path == CHAT else {"prompt": "Hi"}
    asked = {**fields, **SAMPLED, "stream": True, "stream_options": {"include_usage": True}}
    direct = events(await post(app, path, **asked))
    rendered = (await post(app, f"{path}/render", **asked)).json
    (rendered,) = rendered if path == COMPLETIONS else [rendered]
    state, chunks = None, []
    name = "chat_request" if path == CHAT else "completion_request"
    for event in events(await post(app, GENERATE, **rendered)):
        body = {"generate_chunk": event, "stream_state": state, "prompt_token_ids": rendered["token_ids"], name: asked}
        answer = await post(app, f"{path}/derender", stream=True, **body)
        assert answer.status == 200, answer.body
        chunks.append(answer.json["chunk"])
        state = answer.json["stream_state"]

    def told(listed):
        choices = [choice for chunk in listed for choice in chunk["choices"]]
        texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
        return "".join(texts), choices[-1]["finish_reason"], listed[-1]["usage"]["completion_tokens"]

    assert told(chunks) == told(direct) and len(state["output_token_ids"]) == 6
    if path == CHAT:
        assert [choice["delta"].get("role") for choice in chunks[0]["choices"]] == ["assistant"]
        assert all("role" not in choice["delta"] for chunk in chunks[1:] for choice in chunk["choices"])


async def test_more_than_the_request_says(chat_engine):
    """Choices without a request have numbers of their own; forced token counts do not replace a chunk."""
    app = create_app(chat_engine, ServerConfig(enable_force_include_usage=True))
    encode = chat_engine.inputs.tokenizer.encode
    choices = [{"index": at, "token_ids": encode(text, add_special_tokens=False)} for at, text in enumerate("ab")]
    body = {"generate_responses": [{"request_id": "a", "choices": choices}] * 2}
    found = (await post(app, f"{COMPLETIONS}/derender", **body)).json["choices"]
    assert [(each["index"], each["text"]) for each in found] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    # Of two prompts, each with the second choice alone, beside a request for one; and one log-probability more than the
    # server's limit, as where the sampled token is not among the best.
    top = [{"token_id": each, "logprob": -1.0} for each in range(chat_engine.inputs.config.max_logprobs + 1)]
    logprobs = {"content": [{**top[0], "top_logprobs": top}]}
    second = {"index": 1, "token_ids": [0], "logprobs": logprobs}
    body = {"generate_responses": [{"request_id": "a", "choices": [second]}] * 2}
    for asked in ({}, {"completion_request": {"prompt": "a", "n": 1}}):
        found = (await post(app, f"{COMPLETIONS}/derender", **body, **asked)).json["choices"]
        assert [each["index"] for each in found] == [1, 3]
    answer = await post(app, f"{CHAT}/derender", generate_response={"request_id": "a", "choices": [second]})
    (listed,) = answer.json["choices"][0]["logprobs"]["content"]
    assert len(listed["top_logprobs"]) == len(top) - 1
    for path in (CHAT, COMPLETIONS):
        chunk = {"request_id": "a", "choices": choices[1:]}
        (choice,) = (await post(app, f"{path}/derender", generate_chunk=chunk, stream=True)).json["chunk"]["choices"]
        assert choice["index"] == 1 and (choice.get("text") or choice["delta"]["content"]) == "b"


async def test_reasoning_and_calls_are_parsed(parsing, chat_engine):
    """Whole, and with every token in an event of its own: the same message."""
    ids = chat_engine.inputs.tokenizer.encode(SAID, add_special_tokens=False)
    chat = {"messages": MESSAGES, "tools": TOOLS}
    given = {"request_id": "a", "choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
    body = {"prompt_token_ids": [5, 6], "chat_request": chat}
    (choice,) = (await post(parsing, f"{CHAT}/derender", generate_response=given, **body)).json["choices"]
    message = choice["message"]
    assert message["reasoning"].strip() == "Hm" and message["content"].strip() == "Wait."
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "it"}'}
    assert choice["finish_reason"] == "tool_calls"
    state, deltas, reasons = None, [], []
    for at, token_id in enumerate(ids):
        reason = "stop" if at == len(ids) - 1 else None
        event = {"request_id": "a", "choices": [{"index": 0, "token_ids": [token_id], "finish_reason": reason}]}
        answer = await post(parsing, f"{CHAT}/derender", stream=True, generate_chunk=event, stream_state=state, **body)
        state = answer.json["stream_state"]
        deltas += [each["delta"] for each in answer.json["chunk"]["choices"]]
        reasons += [each["finish_reason"] for each in answer.json["chunk"]["choices"]]
    calls = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert "".join(each["function"].get("arguments", "") for each in calls) == '{"at": "it"}'
    assert [each["id"] for each in calls if "id" in each] and reasons[-1] == "tool_calls"
    # All in one event, which has what several chunks would: the tokens of the first, the finish reason of the last.
    body["chat_request"] = {**chat, "return_token_ids": True}
    event = {**given, "metrics": {"queue_time_ms": 1.5}}
    answer = await post(parsing, f"{CHAT}/derender", stream=True, generate_chunk=event, **body)
    (choice,) = answer.json["chunk"]["choices"]
    assert choice["token_ids"] == ids and choice["finish_reason"] == "tool_calls"
    assert answer.json["chunk"]["metrics"] == event["metrics"]


async def test_a_nested_request_names_what_it_ignores_and_no_shared_thread_is_needed(app):
    """Derendering and detokenizing go on while the event loop's default threads are all busy."""
    busy, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    loop.run_in_executor(None, busy.wait)
    given = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5, 6]}]}
    try:
        async with asyncio.timeout(60):
            for path, field, response in (
                (CHAT, "chat_request", {"generate_response": given}),
                (COMPLETIONS, "completion_request", {"generate_responses": [given]}),
            ):
                asked = {"messages": MESSAGES, "prompt": "a", "temprature": 1, "service_tier": "auto"}
                del asked["prompt" if path == CHAT else "messages"]
                answer = await post(app, f"{path}/derender", **response, **{field: asked})
                assert answer.headers["x-unknown-fields"] == f"{field}.temprature"
                assert answer.headers["x-ignored-fields"] == f"{field}.service_tier"
            assert (await post(app, "/detokenize", tokens=[5, 6])).status == 200
    finally:
        busy.set()


async def test_what_cannot_be_derendered_is_refused_by_name(app, parsing):
    choice = {"index": 0, "token_ids": [5, 6]}
    given = {"request_id": "a", "choices": [choice]}
    wrong = {"content": [{"token_id": 7, "logprob": -1.0}]}
    chat = {"generate_response": given}
    rows = [
        (app, CHAT, {}, "generate_response"),
        (app, CHAT, {**chat, "stream": True}, "generate_chunk"),
        (app, CHAT, {**chat, "stream_state": {}}, "stream_state"),
        (app, CHAT, {"generate_response": {**given, "output_mode": "text"}}, "output_mode"),
        (app, CHAT, {"generate_response": {**given, "choices": []}}, "generate_response"),
        (app, CHAT, {**chat, "prompt_token_ids": [-1]}, "prompt_token_ids"),
        (app, CHAT, {**chat, "chat_request": {"messages": MESSAGES, "echo": True}}, "echo"),
        (app, CHAT, {**chat, "chat_request": {"messages": MESSAGES, "n": "x"}}, "n"),
        (app, CHAT, {"stream": True, "generate_chunk": {**given, "choices": [choice, choice]}}, "generate_chunk"),
        (parsing, CHAT, chat, "chat_request"),
        (app, CHAT, {"generate_response": {**given, "choices": [choice] * 1000}}, "generate_response"),
        (app, CHAT, {"generate_response": {**given, "choices": [choice, choice]}}, "generate_response"),
        (app, CHAT, {"generate_response": {**given, "choices": [{**choice, "index": 1000}]}}, "generate_response"),
        (app, COMPLETIONS, {"generate_responses": []}, "generate_responses"),
        (app, COMPLETIONS, {"generate_responses": [{**given, "choices": [choice] * 2}]}, "generate_responses"),
        (app, COMPLETIONS, {"generate_responses": [given] * 9999}, "generate_responses"),
        (app, COMPLETIONS, {"generate_responses": [given], "prompt_token_ids": [[5], [6]]}, "prompt_token_ids"),
        (app, COMPLETIONS, {"generate_responses": [given], "prompt_tokens": 4}, "prompt_tokens"),
        (app, COMPLETIONS, {"generate_chunk": given, "stream": True, "prompt_tokens": [4]}, "prompt_tokens"),
    ]
    for changes in ({"token_ids": [10**9]}, {"token_ids": [5] * 9999}, {"logprobs": wrong}):
        body = {"generate_response": {**given, "choices": [{**choice, **changes}]}}
        rows.append((app, CHAT, body, "generate_response"))
    found = []
    for one, path, body, param in rows:
        answer = await post(one, f"{path}/derender", **body)
        if (answer.status, answer.json["error"]["param"]) != (400, param):
            found.append((param, body, answer.body[:300]))
    assert not found

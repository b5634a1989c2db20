"""/v1/responses through the real OpenAI client: answers, streams, conversations, work in the background."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json

import numpy as np
import openai
import pytest
from PIL import Image

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import RequestTimes
from jaxengine.server.http.app import create_app
from jaxengine.server.http.responses.input import named_items, read_input
from jaxengine.server.http.responses.keeping import Asked, Memory
from jaxengine.server.stored.documents import Joiner
from tests.jaxengine.server.asgi_client import Recorder, http_client, idle, post
from tests.jaxengine.server.openai_client import openai_client
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

PATH = "/v1/responses"
ASK = {"model": "tiny", "input": "Hi", "max_output_tokens": 8, "extra_body": {"seed": 5, "ignore_eos": True}}
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
THINKS_AND_CALLS = (
    '<think>Hm, ü.</think>Yes.<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
)


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name="tiny"))


@pytest.fixture
def client(app):
    return openai_client(app)


@pytest.fixture
def scripted(chat_engine):
    def build(*texts: str, **options):
        engine = ScriptedEngine(chat_engine, *texts)
        return openai_client(create_app(engine, ServerConfig(served_model_name="tiny", **options))), engine

    return build


async def test_a_response_is_a_chat_completion(client, chat_engine):
    response = await client.responses.create(**ASK, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, extra_body=ASK["extra_body"]
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.id.startswith("resp_") and response.object == "response" and response.model == "tiny"
    # Eight tokens were not enough, and the response says so.
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.max_output_tokens) == ("Be brief.", 8)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 8
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")


async def test_a_stream_tells_the_whole_story(client):
    whole = await client.responses.create(**ASK)
    events = [event async for event in await client.responses.create(**ASK, stream=True)]
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert events[2].item.content == [] and events[3].part.text == ""


async def test_a_response_has_its_tokens_and_times_if_asked(client, chat_engine):
    """vLLM's enable_response_messages, and the server's enable_per_request_metrics."""
    ask = {**ASK, "extra_body": {**ASK["extra_body"], "enable_response_messages": True}}
    plain = await client.responses.create(**ASK)
    assert plain.input_messages is plain.output_messages is None and "metrics" not in plain.model_extra
    options = ServerConfig(served_model_name="tiny", enable_per_request_metrics=True)
    timed = openai_client(create_app(chat_engine, options))
    whole = await timed.responses.create(**ask)
    events = [event async for event in await timed.responses.create(**ask, stream=True)]
    assert events[0].response.input_messages is None
    for found in (whole, events[-1].response):
        (asked,), (said,) = found.input_messages, found.output_messages
        assert asked["type"] == said["type"] == "raw_message_tokens"
        assert len(asked["tokens"]) == found.usage.input_tokens and "Hi" in asked["message"]
        assert (len(said["tokens"]), said["message"]) == (found.usage.output_tokens, found.output_text)
        assert set(found.metrics) == {*RequestTimes.model_fields} and min(found.metrics.values()) >= 0


async def test_reasoning_text_and_calls_are_items(scripted):
    client, _ = scripted(THINKS_AND_CALLS, **PARSERS)
    ask = {"model": "tiny", "input": "Hi", "tools": [TOOL]}
    whole = await client.responses.create(**ask)
    thought, message, call = whole.output
    assert whole.status == "completed"
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm, ü.")
    assert (message.type, message.content[0].text) == ("message", "Yes.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Zürich"})
    assert call.call_id and whole.usage.output_tokens_details.reasoning_tokens > 0
    # The client puts the pieces of a stream together itself.
    async with client.responses.stream(**ask) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == call.arguments and final.output_text == "Yes."
    for kind in ("reasoning_text.delta", "reasoning_text.done", "function_call_arguments.delta"):
        assert f"response.{kind}" in kinds
    assert kinds[-1] == "response.completed"


async def test_logprobs_are_included_when_asked_for(client):
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await client.responses.create(**ASK, **include)
    tokens = whole.output[0].content[0].logprobs
    assert len(tokens) == 8 and all(len(token.top_logprobs) == 2 for token in tokens)
    events = [event async for event in await client.responses.create(**ASK, **include, stream=True)]
    done = next(event for event in events if event.type == "response.output_text.done")
    streamed = [
        token.token for event in events if event.type == "response.output_text.delta" for token in event.logprobs
    ]
    assert [token.token for token in done.logprobs] == [token.token for token in tokens]
    assert streamed == [token.token for token in tokens][: len(streamed)]


async def test_a_conversation_goes_on(scripted):
    client, engine = scripted("One.", "Two.")
    first = await client.responses.create(model="tiny", input="Count", instructions="Slowly.")
    second = await client.responses.create(model="tiny", input="On", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = engine.calls[-1][0]["prompt"]
    assert [prompt.count(word) for word in ("Count", "One.", "On<", "Slowly.")] == [1, 1, 1, 0]
    assert (await client.responses.retrieve(second.id)).output_text == second.output_text
    await client.responses.delete(first.id)
    for response_id in (first.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="tiny", input="On", previous_response_id=first.id)


async def test_calls_and_their_outputs_are_sent_back(scripted):
    client, engine = scripted(THINKS_AND_CALLS, **PARSERS)
    first = await client.responses.create(model="tiny", input="Hi", tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    # A conversation that the client keeps: every item of the answer goes back as it came.
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, *first.output, result]
    await client.responses.create(model="tiny", input=items, tools=[TOOL], store=False)
    kept = engine.calls[-1][0]["prompt"]
    await client.responses.create(model="tiny", input=[result], tools=[TOOL], previous_response_id=first.id)
    assert engine.calls[-1][0]["prompt"] == kept
    assert kept.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n") and "Yes." in kept
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    await client.responses.create(model="tiny", input=[refused, *items], tools=[TOOL], store=False)
    assert "<|im_start|>assistant\nI will not.<|im_end|>" in engine.calls[-1][0]["prompt"]


async def test_responses_that_are_not_stored(client, chat_engine):
    response = await client.responses.create(**ASK, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_a_key_opens_its_own_responses_only(chat_engine):
    app = create_app(chat_engine, ServerConfig(api_key=("one", "two"), served_model_name="tiny"))
    one, two = (openai_client(app).with_options(api_key=key) for key in ("one", "two"))
    response = await one.responses.create(**ASK)
    assert (await one.responses.retrieve(response.id)).id == response.id
    for call in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await call(response.id)


async def test_work_in_the_background(client):
    begun = await client.responses.create(**ASK, background=True)
    assert begun.status == "queued" and begun.background
    while (found := await client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    assert found.output_text == (await client.responses.create(**ASK)).output_text
    assert (await client.responses.cancel(begun.id)).status == found.status


async def test_work_in_the_background_is_cancelled(client, chat_engine, app):
    ask = {**ASK, "max_output_tokens": 200}
    begun = await client.responses.create(**ask, background=True)
    assert app.state.traffic.num_running == 1
    assert (await client.responses.cancel(begun.id)).status == "cancelled"
    assert (await client.responses.retrieve(begun.id)).status == "cancelled"
    await idle(chat_engine)
    assert app.state.traffic.num_running == 0
    at_once = await client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(at_once.id)


async def begun(client, name, **ask):
    """The task of a stream in the background, of which something is stored."""
    more = {**ASK["extra_body"], "ignore_eos": True, "request_id": name}
    task = asyncio.ensure_future(
        client.responses.create(**{**ASK, **ask, "extra_body": more}, background=True, stream=True)
    )
    while True:
        with contextlib.suppress(openai.NotFoundError):
            await client.responses.retrieve(name)
            return task
        await asyncio.sleep(0)


async def test_a_stream_of_work_in_the_background_is_left_and_followed_again(client, app, chat_engine):
    """From any event on, while it is made and later."""
    task = await begun(client, "resp_left", max_output_tokens=40)
    task.cancel()
    events = [event async for event in await client.responses.retrieve("resp_left", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    rest = [event async for event in await client.responses.retrieve("resp_left", stream=True, starting_after=4)]
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[5:]]
    assert [
        event async for event in await client.responses.retrieve("resp_left", stream=True, starting_after=10**6)
    ] == []
    whole = await client.responses.retrieve("resp_left")
    assert whole.background and whole.usage.output_tokens == 40 and whole == events[-1].response
    assert app.state.traffic.num_running == 0
    plain = await client.responses.create(**ASK)
    for of, query in ((plain.id, {"stream": "true"}), ("resp_left", {"starting_after": 1})):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.retrieve(of, extra_query=query)
        assert refused.value.param == [*query][0]
    await client.responses.delete("resp_left")
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_left", stream=True)
    await idle(chat_engine)


async def test_a_stream_in_the_background_ends_with_its_cancellation(client, chat_engine):
    """It has its first events, though it may be cancelled before the first token."""
    task = await begun(client, "resp_cancelled", max_output_tokens=200)
    assert (await client.responses.cancel("resp_cancelled")).status == "cancelled"
    events = [event async for event in await task]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.failed" and events[-1].response.status == "cancelled"
    await idle(chat_engine)


async def test_work_that_is_cancelled_before_it_has_begun_ends(client, app, monkeypatch):
    store = app.state.store

    def cancelled_first(work):
        loop = asyncio.get_running_loop()
        workers = [(worker, name, owner) for (owner, name), worker in store._workers.items()]
        loop.call_soon(lambda: [worker.cancel(name, owner) for worker, name, owner in workers])
        return loop.create_task(work)

    monkeypatch.setattr("jaxengine.server.http.responses.endpoint.asyncio.create_task", cancelled_first)
    queued = await client.responses.create(**ASK, background=True)
    monkeypatch.undo()
    assert (await asyncio.wait_for(client.responses.cancel(queued.id), 30)).status == "cancelled"


async def test_a_stream_in_the_background_that_fails_at_once_has_begun(chat_engine):
    """A client that follows a response whose process was lost gets an error, however much it has read."""
    engine = Recorder(chat_engine)
    engine.fail_after, engine.failure = 0, EngineDeadError("the device is gone")
    client = openai_client(app := create_app(engine, ServerConfig(served_model_name="tiny")))
    stream = await client.responses.create(**ASK, background=True, stream=True)
    events = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == ["created", "in_progress", "failed"]
    store = app.state.store
    store._logs[next(iter(store._logs))]._is_cut = True  # as after ResponseStore.lose
    with pytest.raises(openai.APIError):
        [event async for event in await client.responses.retrieve(events[0].response.id, stream=True, starting_after=2)]
    await idle(chat_engine)


async def test_a_failure_in_the_background_is_told(chat_engine):
    engine = Recorder(chat_engine)
    engine.fail_after, engine.failure = 0, EngineDeadError("the device is gone")
    client = openai_client(create_app(engine, ServerConfig(served_model_name="tiny")))
    begun = await client.responses.create(**ASK, background=True)
    found = await client.responses.retrieve(begun.id)
    assert found.status == "failed" and found.error.code == "server_error"
    assert "device" not in found.error.message
    await idle(chat_engine)


async def test_a_deadline_fails_the_response(app):
    answer = await post(app, PATH, input="Hi", max_output_tokens=200, ignore_eos=True, timeout=0.02)
    assert answer.json["status"] == "failed" and "time" in answer.json["error"]["message"]


@each_row(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": ["function_call"]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": {}}]}, "input"),
        ({"input": "word " * 300}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["file_search_call.everything"]}, "include"),
        ({"text": {"verbosity": "higher"}}, "text"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
        ({"tools": [{"type": "search_web"}]}, "tools"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "call_id": "1", "input": {}}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": "", "namespace": 1}]}, "input"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"background": True, "store": False}, "background"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
    ],
)
async def test_what_is_wrong_is_named(app, fields, param):
    answer = await post(app, PATH, **{"input": "Hi", **fields})
    assert answer.status in (400, 404) and answer.error["param"] == param, answer.body


async def test_a_name_that_is_taken_is_refused(app, client):
    taken = await client.responses.create(**{**ASK, "extra_body": {"request_id": "resp_mine"}})
    assert taken.id == "resp_mine"
    with pytest.raises(openai.BadRequestError, match="in use"):
        await client.responses.create(**{**ASK, "extra_body": {"request_id": "resp_mine"}})
    with pytest.raises(openai.BadRequestError, match="stream"):
        await client.responses.retrieve("resp_mine", stream=True)


async def test_what_a_response_was_asked_with(client, app):
    items = [{"role": "user", "content": f"Say {number}", "id": None} for number in range(3)]
    fields = {"presence_penalty": 0.5, **ASK["extra_body"]}
    response = await client.responses.create(**{**ASK, "input": items, "extra_body": fields}, top_logprobs=0)
    shown = response.model_dump()
    assert (shown["presence_penalty"], shown["frequency_penalty"], shown["top_logprobs"]) == (0.5, 0.0, 0)
    listed = [item async for item in client.responses.input_items.list(response.id, order="asc", limit=2)]
    assert [item.content for item in listed] == ["Say 0", "Say 1", "Say 2"] and len({item.id for item in listed}) == 3
    newest = await client.responses.input_items.list(response.id, limit=1)
    assert (newest.data[0].content, newest.has_more) == ("Say 2", True)
    for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=item_x", "after")):
        async with http_client(app, "none") as plain:
            answer = await plain.get(f"{PATH}/{response.id}/input_items?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    async with http_client(app, "none") as plain:
        assert (await plain.get(PATH + "/resp_none/input_items")).status_code == 404


async def test_tokens_are_counted_before_they_are_paid_for(client):
    response = await client.responses.create(**ASK, instructions="Be brief.")
    ask = {"model": "tiny", "input": "Hi", "instructions": "Be brief."}
    assert (await client.responses.input_tokens.count(**ask)).input_tokens == response.usage.input_tokens
    more = await client.responses.input_tokens.count(model="tiny", input="So?", previous_response_id=response.id)
    assert more.input_tokens > response.usage.total_tokens - 20


async def test_hidden_reasoning_is_in_no_field(scripted):
    client, _ = scripted(THINKS_AND_CALLS, **PARSERS)
    ask = {"model": "tiny", "input": "Hi", "tools": [TOOL]}
    for include in (False, True):
        extra = {"include_reasoning": include, "enable_response_messages": True}
        whole = await client.responses.create(**ask, extra_body=extra)
        last = [event async for event in await client.responses.create(**ask, extra_body=extra, stream=True)][-1]
        for found in (whole, last.response):
            assert found.input_messages and (found.output_messages is not None) is include
            assert ("Hm, ü." in str(found)) is include


async def test_reasoning_comes_back_without_its_text(scripted):
    client, engine = scripted(THINKS_AND_CALLS, **PARSERS)
    ask = {"model": "tiny", "input": "Hi", "store": False}
    plain = await client.responses.create(**ask)
    assert plain.output[0].encrypted_content is None
    response = await client.responses.create(**ask, include=["reasoning.encrypted_content"])
    thought, message, *_ = (item.to_dict() for item in response.output)
    assert thought["encrypted_content"] and "Hm" not in thought["encrypted_content"]
    prompts = []
    for sent in (thought, {**thought, "content": [], "summary": []}, {**thought, "content": []}):
        await client.responses.create(**{**ask, "input": [{"role": "user", "content": "Hi"}, sent, message]})
        prompts.append(engine.calls[-1][0]["prompt_token_ids"])
    assert prompts[0] == prompts[1] == prompts[2]
    with pytest.raises(openai.BadRequestError, match="encrypted_content"):
        broken = {"type": "reasoning", "encrypted_content": "?", "summary": []}
        await client.responses.create(**{**ask, "input": [broken, message]})


async def test_pictures_are_kept_once_and_without_what_is_behind_them(chat_engine):
    picture = io.BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(picture, "PNG")
    urls = [
        f"data:image/png;base64,{base64.b64encode(picture.getvalue() + junk).decode()}"
        for junk in (b"", b"x" * 400_000)
    ]
    question = [{"role": "user", "content": [{"type": "input_image", "image_url": urls[1]}]}]
    asked = await Asked.of(read_input(question), named_items(question))
    (item,), (message,) = (Joiner(asked.texts).join(each) for each in (asked.input, asked.question))
    assert item["content"][0]["image_url"] == message["content"][0]["image_url"] == urls[0]
    assert asked.num_bytes < 1000 and question[0]["content"][0]["image_url"] == urls[1]


def test_what_requests_hold_is_bounded():
    memory = Memory(100)
    with pytest.raises(OverloadedError, match="allowed: 100"):
        held, other = memory.hold(), memory.hold()
        held.take(150)
        other.take(1)
    held.release()
    other.take(60)
    del other
    held.take(100)
    assert memory.hold().take(0) is None

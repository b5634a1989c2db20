"""/v1/chat/completions through the real OpenAI client, over a real engine."""

from __future__ import annotations

import json

import openai
import pytest

from jaxengine.config.engine_config import ConfigError
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import Connection, Recorder, idle, post
from tests.jaxengine.server.openai_client import openai_client
from tests.tables import each_row

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
ASK = {"model": "tiny", "messages": HI, "max_tokens": 8, "seed": 5, "temperature": 1.0}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name="tiny"))


@pytest.fixture
def client(app):
    return openai_client(app)


@pytest.fixture
def recorder(chat_engine):
    return Recorder(chat_engine)


async def joined(stream) -> tuple[dict[int, dict], list]:
    """(by index: role, content, finish_reason, number of chunks), chunks; the order of chunks is checked."""
    choices: dict[int, dict] = {}
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index not in choices:
                assert choice.delta.role == "assistant" and choice.delta.content == ""
                choices[choice.index] = {"content": "", "finish_reason": None}
                continue
            found = choices[choice.index]
            assert choice.delta.role is None and found["finish_reason"] is None
            found["content"] += choice.delta.content or ""
            found["finish_reason"] = choice.finish_reason
    return choices, chunks


async def test_an_answer_is_what_the_engine_says(client, chat_engine):
    params = SamplingParams(seed=5, max_tokens=8)
    prompt = chat_engine.inputs.chat_prompt(HI)
    (expected,) = [output async for output in chat_engine.generate(prompt, params)][-1:]
    answer = await client.chat.completions.create(**ASK)
    (choice,) = answer.choices
    assert choice.message.content == expected.outputs[0].text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(prompt["prompt_token_ids"])
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_a_stream_of_several_answers_joined_is_the_whole(client):
    whole = await client.chat.completions.create(**ASK, n=3)
    stream = await client.chat.completions.create(**ASK, n=3, stream=True, stream_options={"include_usage": True})
    choices, chunks = await joined(stream)
    assert len({choice.message.content for choice in whole.choices}) == 3
    for choice in whole.choices:
        assert choices[choice.index] == {"content": choice.message.content, "finish_reason": choice.finish_reason}
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_usage_tells_what_was_found_in_the_prefix_cache_and_what_was_added(app, chat_engine):
    """In vLLM's words, Anthropic's and OpenAI's: whole pages of the prompt that were not found there are added."""
    prompt, size = chat_engine.inputs.chat_prompt(HI)["prompt_token_ids"], chat_engine.inputs.config.block_size
    whole = len(prompt) - len(prompt) % size
    ask = {"model": "tiny", "cache_salt": "its own", "max_tokens": 2}
    first, again = [
        (await post(app, "/v1/chat/completions", **ask, messages=HI)).json["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    found = again["cached_tokens"]
    assert (first["cached_tokens"], first["created_cache_tokens"]) == (0, whole) and found > 0
    assert again["created_cache_tokens"] == whole - found
    message = (await post(app, "/v1/messages", **ask, messages=HI)).json["usage"]
    assert message["cache_read_input_tokens"] == found and message["cache_creation_input_tokens"] == whole - found
    assert message["input_tokens"] == len(prompt) - whole
    response = (await post(app, "/v1/responses", model="tiny", cache_salt="its own", input="Hi")).json["usage"]
    assert response["input_tokens_details"] == {"cached_tokens": found, "cache_write_tokens": whole - found}


async def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(**ASK, stream=True, stream_options=options)
    _, chunks = await joined(stream)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 0


async def test_logprobs(client, chat_engine):
    tokenizer = chat_engine.inputs.tokenizer
    answer = await client.chat.completions.create(
        **ASK, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}
    )
    (choice,) = answer.choices
    tokens = choice.logprobs.content
    assert len(tokens) == answer.usage.completion_tokens == len(choice.token_ids)
    assert answer.prompt_token_ids == chat_engine.inputs.chat_prompt(HI)["prompt_token_ids"]
    for token_id, token in zip(choice.token_ids, tokens, strict=True):
        assert token.token == tokenizer.decode([token_id], skip_special_tokens=False)
        assert bytes(token.bytes) == tokenizer.token_bytes(token_id)
        values = [other.logprob for other in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True) and token.logprob <= values[0] <= 0
    stream = await client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3, stream=True)
    parts = [part async for part in stream]
    streamed = [
        token for part in parts for choice in part.choices if choice.logprobs for token in choice.logprobs.content
    ]
    assert [token.token for token in streamed] == [token.token for token in tokens]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in tokens], abs=1e-4)


async def test_logprobs_without_top_and_tokens_by_id(client):
    answer = await client.chat.completions.create(
        **ASK, logprobs=True, extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True}
    )
    (choice,) = answer.choices
    assert [token.token for token in choice.logprobs.content] == [f"token_id:{number}" for number in choice.token_ids]
    assert all(token.top_logprobs == [] for token in choice.logprobs.content)
    for streams in (False, True):
        fields = {"return_tokens_as_token_ids": True, "logprob_token_ids": [6, 5]}
        given = await client.chat.completions.create(
            **ASK, logprobs=True, top_logprobs=3, stream=streams, extra_body=fields
        )
        parts = [part async for part in given] if streams else [given]
        tokens = [token for part in parts for each in part.choices if each.logprobs for token in each.logprobs.content]
        assert [token.token for token in tokens] == [token.token for token in choice.logprobs.content]
        for token in tokens:
            values = [other.logprob for other in token.top_logprobs]
            assert {other.token for other in token.top_logprobs} == {"token_id:5", "token_id:6", token.token}
            assert values == sorted(values, reverse=True) and max(values) <= 0


async def test_a_message_is_continued_and_echoed(client, app, chat_engine):
    messages = [*HI, {"role": "assistant", "content": "Well, I"}]
    fields = {"messages": messages, "max_tokens": 4, "seed": 1, "continue_final_message": True}
    whole = (await post(app, PATH, **fields, echo=True, return_prompt_text=True)).json
    assert whole["prompt_text"].endswith("assistant\nWell, I")
    assert whole["choices"][0]["message"]["content"].startswith("Well, I")
    events = (await post(app, PATH, **fields, echo=True, return_prompt_text=True, stream=True)).events
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert [event.get("prompt_text") for event in events[:2]] == [whole["prompt_text"], None]
    without = (await post(app, PATH, **fields)).json["choices"][0]["message"]["content"]
    assert "Well, I" + without == text


async def test_prompt_logprobs(app):
    fields = {"messages": HI, "max_tokens": 1, "temperature": 0}
    asked = (await post(app, PATH, **fields, prompt_logprobs=1, return_token_ids=True)).json
    first, *rest = asked["prompt_logprobs"]
    assert first is None and len(rest) == len(asked["prompt_token_ids"]) - 1
    for token_id, position in zip(asked["prompt_token_ids"][1:], rest, strict=True):
        assert position[str(token_id)]["logprob"] <= 0
    echoed = (await post(app, PATH, **fields, echo=True, logprobs=True, top_logprobs=1)).json
    assert [set(position) for position in echoed["prompt_logprobs"][1:]] == [set(position) for position in rest]
    assert (await post(app, PATH, **fields)).json["prompt_logprobs"] is None


async def test_a_prompt_of_another_engine_replaces_the_messages(app):
    """kv_transfer_params.prompt_token_ids, as vLLM's routers send them to the decoding engine."""
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    whole = (await post(app, PATH, **asked, return_token_ids=True, temperature=0)).json
    asked["messages"] = [{"role": "user", "content": "another"}]
    given = {"prompt_token_ids": whole["prompt_token_ids"]}
    again = (await post(app, PATH, **asked, return_token_ids=True, temperature=0, kv_transfer_params=given)).json
    assert again["prompt_token_ids"] == whole["prompt_token_ids"]
    assert again["choices"][0]["message"]["content"] == whole["choices"][0]["message"]["content"]
    for wrong in ([], [[1]], "a", [10**6], ["a"], [True], {}):
        answer = await post(app, PATH, **asked, kv_transfer_params={"prompt_token_ids": wrong})
        assert answer.status == 400 and answer.error["param"] == "kv_transfer_params.prompt_token_ids", wrong


async def test_forwarded_tokens_are_cut_before_they_become_text(recorder, monkeypatch):
    """A body may hold millions of them, and decoding blocks the other clients."""
    asked = []
    monkeypatch.setattr(recorder.inputs.tokenizer, "decode", lambda ids, **_: asked.append(len(ids)) or "x")
    app = create_app(recorder, ServerConfig())
    given = {"messages": HI, "kv_transfer_params": {"prompt_token_ids": [*range(3, 90)] * 1000}}
    await post(app, PATH, **given, truncate_prompt_tokens=5)
    ((prompt, *_),) = recorder.calls
    assert prompt["prompt_token_ids"] == [85, 86, 87, 88, 89] and asked == [5]
    for keep in (None, 10**6):
        answer = await post(app, PATH, **given, truncate_prompt_tokens=keep)
        assert (answer.status, answer.error["param"]) == (400, "kv_transfer_params.prompt_token_ids")
    assert asked == [5]


async def test_what_the_engine_is_asked(recorder):
    app = create_app(recorder, ServerConfig(request_timeout=30))
    await post(app, PATH, messages=HI, max_completion_tokens=3, max_tokens=4, request_id="mine", cache_salt="s")
    await post(app, PATH, messages=HI, max_tokens=4, timeout=9, top_k=5, stop=["x"], logit_bias={"7": 1})
    await post(app, PATH, messages=[{"role": "user", "content": "word " * 200}], truncate_prompt_tokens=6, min_tokens=1)
    (first, second, third) = recorder.calls
    assert first[1].max_tokens == 3 and first[2] == "chatcmpl-mine" and first[0]["cache_salt"] == "s"
    assert first[4] == pytest.approx(30, abs=5)
    assert (second[1].top_k, second[1].stop, second[1].logit_bias) == (5, ("x",), {7: 1.0})
    assert second[4] == pytest.approx(9, abs=5)
    assert len(third[0]["prompt_token_ids"]) == 6 and third[1].max_tokens is None


async def test_special_tokens_are_added_when_asked_for(recorder, monkeypatch):
    """The tokenizer here has none to add: what it is asked for is looked at."""
    tokenizer = recorder.inputs.tokenizer
    asked = []

    def encode_batch(texts, add_special_tokens=True):
        asked.append(add_special_tokens)
        return [[1, 2] for _ in texts]

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    app = create_app(recorder, ServerConfig())
    for special in (None, False, True):
        assert (await post(app, PATH, messages=HI, max_tokens=1, add_special_tokens=special)).status == 200
    assert asked == [False, False, True]


async def test_templates_of_requests(chat_engine, recorder, monkeypatch):
    template = "{{ messages[0].content }}{{ mood }}{{ documents }}{{ reasoning_effort }}{{ enable_thinking }}"
    fields = {"messages": HI, "max_tokens": 1, "chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    refused = await post(create_app(chat_engine, ServerConfig()), PATH, **fields)
    assert refused.error["param"] == "chat_template"
    # No documents are not missed by a template without them.
    assert (await post(create_app(recorder, ServerConfig()), PATH, messages=HI, documents=[])).status == 200
    app = create_app(recorder, ServerConfig(trust_request_chat_template=True))
    fields |= {"documents": [{"title": "T", "text": "x"}], "reasoning_effort": "none"}
    assert (await post(app, PATH, **fields)).status == 200
    assert recorder.calls[-1][0]["prompt"] == "Hi![{'title': 'T', 'text': 'x'}]noneFalse"
    closed = create_app(chat_engine, ServerConfig(chat_template_kwargs_allowed=False))
    assert (await post(closed, PATH, messages=HI, chat_template_kwargs={"mood": "!"})).error["param"] == (
        "chat_template_kwargs"
    )
    defaults = {"mood": "?", "enable_thinking": True, "reasoning_effort": "high"}
    app = create_app(recorder, ServerConfig(trust_request_chat_template=True, default_chat_template_kwargs=defaults))
    for changes, expected in (
        ({}, "Hi![{'title': 'T', 'text': 'x'}]noneFalse"),
        ({"chat_template_kwargs": None, "reasoning_effort": None}, "Hi?[{'title': 'T', 'text': 'x'}]highTrue"),
    ):
        assert (await post(app, PATH, **{**fields, **changes})).status == 200
        assert recorder.calls[-1][0]["prompt"] == expected
    tools = {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "none"}
    asked = {"messages": HI, "max_tokens": 1, "chat_template": "{{ tools | length if tools else 'no' }}", **tools}
    for excluded, expected in ((False, "1"), (True, "no")):
        config = ServerConfig(trust_request_chat_template=True, exclude_tools_when_tool_choice_none=excluded)
        assert (await post(create_app(recorder, config), PATH, **asked)).status == 200
        assert recorder.calls[-1][0]["prompt"] == expected
    with pytest.raises(ConfigError, match="default_chat_template_kwargs has 'messages', a name that is reserved"):
        create_app(recorder, ServerConfig(default_chat_template_kwargs={"messages": []}))
    kind = "{{ 'text' if messages[0].content is string else 'parts' }}"
    for format_, expected in (("auto", "text"), ("openai", "parts")):
        monkeypatch.setattr(chat_engine.inputs.tokenizer, "content_format", format_)
        assert (await post(app, PATH, messages=HI, chat_template=kind, max_tokens=1)).status == 200
        assert recorder.calls[-1][0]["prompt"] == expected
    hostile = {"messages": HI, "chat_template": "{% for i in range(10**9) %}{{ i }}{% endfor %}"}
    assert (await post(app, PATH, **hostile)).status == 400


async def test_earlier_tool_calls_reach_the_template_as_objects(recorder):
    template = "{{ messages[1].tool_calls[0].function.arguments.city }}"
    app = create_app(recorder, ServerConfig(trust_request_chat_template=True))
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert (await post(app, PATH, messages=messages, chat_template=template, max_tokens=1)).status == 200
    assert recorder.calls[-1][0]["prompt"] == "Paris"
    call["function"]["arguments"] = '{"city": "Par'  # as this server itself cuts it at max_tokens
    assert (await post(app, PATH, messages=messages, chat_template=template, max_tokens=1)).status == 200
    assert recorder.calls[-1][0]["prompt"] == "Par"
    call["function"]["arguments"] = 3
    assert (await post(app, PATH, messages=messages, chat_template=template)).error["param"] == "messages"


@each_row(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "assistant", "content": 7}], "echo": True, "continue_final_message": True}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprobs": False, "logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [10**6]}, "logprob_token_ids"),
        ({"logprobs": True, "logprob_token_ids": [5], "use_beam_search": True, "max_tokens": 2}, "logprob_token_ids"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object", "triggers": ["x"]}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"priority": 1}, "priority"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"timeout": 0}, "timeout"),
    ],
)
async def test_what_is_wrong_is_named(app, fields, param):
    answer = await post(app, PATH, **{"messages": HI, **fields})
    assert answer.status == 400 and answer.error["param"] == param


async def test_values_that_ask_for_nothing_are_taken(client):
    answer = await client.chat.completions.create(
        **ASK, service_tier="auto", store=False, metadata={}, modalities=["text"], user="me", verbosity="medium"
    )
    assert answer.choices[0].message.content is not None


async def test_errors_as_the_client_knows_them(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{**ASK, "temperature": 9})
    assert caught.value.body["param"] == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(**{**ASK, "model": "other"})


async def test_who_leaves_frees_the_pages(chat_engine, app):
    connection = Connection.of_json(app, PATH, messages=HI, max_tokens=200, ignore_eos=True, stream=True)
    first = json.loads((await connection.chunks.get()).split(b"\n\n")[0].removeprefix(b"data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    await connection.leave()
    await idle(chat_engine)


async def test_a_deadline_ends_the_answer(app):
    answer = await post(app, PATH, messages=HI, max_tokens=200, ignore_eos=True, timeout=0.02)
    assert (answer.json["choices"][0]["finish_reason"], answer.json["choices"][0]["stop_reason"]) == (
        "abort",
        "timeout",
    )

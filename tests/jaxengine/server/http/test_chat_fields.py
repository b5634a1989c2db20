"""The fields of chat completions and of responses: every one acts or is refused, and none is forgotten here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.convert import RequestReader, Wanted
from jaxengine.server.http.app import create_app
from jaxengine.server.http.audio.protocol import TranscriptionRequest
from jaxengine.server.http.chat import prompt
from jaxengine.server.http.chat.cohere_protocol import CohereChatRequest
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.generate import GenerateRequest
from jaxengine.server.http.messages.protocol import MessagesRequest
from jaxengine.server.http.request.protocol import HINTS, usage_in_stream
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.http.tokenize import DetokenizeRequest, TokenizeRequest
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.field_matrix import check_acts, check_refused, outcome
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

TEXT = (
    '<think>Hm.</think>Yes.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
)
HI = [{"role": "user", "content": "Hi"}]
MODEL = SimpleNamespace(vocab_size=100)
ANSWER = [*HI, {"role": "assistant", "content": "Well"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    "{{ tools }}{{ mood }}{{ documents }}{{ reasoning_effort }}{{ thinking }}{{ 'begin' if add_generation_prompt }}"
)
SCHEMA = {"type": "object"}

SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": -1.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.25,
    "seed": 3,
    "stop": ["x"],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logit_bias": {"7": 1},
    "structured_outputs": {"regex": "a+"},
    "vllm_xargs": {"favour": 1.5},
    "priority": 3,
    "cache_salt": "salt",
    "timeout": 9,
    "request_id": "mine",
    "user": "me",
    "session_id": "talk",
    "stream": True,
}
# Field -> a value, or (value, fields that it needs beside it).
CHAT = {
    **SAMPLING,
    "messages": ANSWER,
    "model": ("alias", {}),
    "n": 2,
    "stop_token_ids": [5],
    "min_tokens": 2,
    "spaces_between_special_tokens": False,
    "allowed_token_ids": [5],
    "bad_words": ["no"],
    "prompt_logprobs": 1,
    "prompt_logprob_start": (2, {"prompt_logprobs": 1}),
    "prompt_logprob_token_ids": ([5, 6], {"prompt_logprobs": 1}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "echo": (True, {"messages": ANSWER, "continue_final_message": True}),
    "truncate_prompt_tokens": 3,
    "truncation_side": ("right", {"truncate_prompt_tokens": 3}),
    "return_token_ids": True,
    "return_weight_versions": True,
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
    "logprobs": True,
    "top_logprobs": (2, {"logprobs": True}),
    "logprob_token_ids": ([5, 6], {"logprobs": True}),
    "steer": [{"at": "residual:1", "vector": [1.0], "scale": 2}],
    "return_sampling_mass": True,
    "return_sampling_mask": True,
    "trace_decode_token_ids": [5, 6, 5],
    "routed_experts_prompt_start": 2,
    "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
    "stream_interval": 4,
    "max_tokens": 5,
    "max_completion_tokens": 6,
    "tools": TOOLS,
    "tool_choice": ("none", {"tools": TOOLS}),
    "parallel_tool_calls": (False, {"tools": TOOLS}),
    "reasoning_effort": "low",
    "thinking": True,
    "stop_in_reasoning": (True, {"stop": ["x"]}),
    "thinking_token_budget": 9,
    "include_reasoning": False,
    "add_generation_prompt": False,
    "continue_final_message": (True, {"messages": ANSWER}),
    "documents": [{"text": "x"}],
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"mood": "!"},
    "return_prompt_text": True,
    "use_beam_search": (True, {"max_tokens": 3}),
    "kv_transfer_params": {"do_remote_prefill": False},
}
FUNCTIONS = [{"type": "function", "name": "f"}]
RESPONSES = {
    **SAMPLING,
    "input": "Ho",
    "model": ("alias", {}),
    "instructions": "Be brief.",
    "store": False,
    "background": True,
    "max_output_tokens": 6,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": (2, {"include": ["message.output_text.logprobs"]}),
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "tools": FUNCTIONS,
    "tool_choice": ("none", {"tools": FUNCTIONS}),
    "parallel_tool_calls": (False, {"tools": FUNCTIONS}),
    "stop_token_ids": [5],
    "spaces_between_special_tokens": False,
    "include_reasoning": False,
    "truncation": ("auto", {"input": "word " * 300, "max_output_tokens": 9}),
    "metadata": {"a": "b"},
    "stop_in_reasoning": (True, {"stop": ["x"]}),
    "thinking_token_budget": 9,
    "reasoning": {"effort": "low"},
    "chat_template_kwargs": {"mood": "!"},
    "enable_response_messages": True,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
}
# Hints elsewhere, which a response keeps.
OWN_OF_RESPONSES = {"metadata", "store", "prompt_cache_key", "safety_identifier"}
# Shown by tests of their own: they need a tokenizer, a response, beams, a picture or activations that are not here.
ELSEWHERE = {"add_special_tokens", "previous_response_id", "length_penalty", "mm_processor_kwargs"}
ELSEWHERE |= {"capture", "return_hidden_states"}


@pytest.fixture(scope="module")
def engine(chat_engine):
    return ScriptedEngine(chat_engine, TEXT, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def app(engine):
    options = {"served_model_name": ("tiny", "alias"), "trust_request_chat_template": True}
    parsers = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    return create_app(engine, ServerConfig(**options, **parsers))


def test_no_field_is_forgotten():
    assert ChatRequest.model_fields.keys() - ELSEWHERE == CHAT.keys()
    # Where stream_options are accepted they have no effect: see test_coding_agents.
    assert ResponsesRequest.model_fields.keys() - ELSEWHERE == {*RESPONSES, "stream_options"}
    assert ResponsesRequest.model_fields.keys() >= OWN_OF_RESPONSES


def test_an_operators_max_new_tokens_is_a_limit():
    """A model's own file has only a default, as in vLLM."""
    for source, override, is_limit in (
        ("auto", {"max_new_tokens": 10}, True),
        ("vllm", {"max_new_tokens": 10}, True),
        ("folder", None, True),
        ("auto", {"top_k": 5}, False),
        ("auto", None, False),
    ):
        options = SimpleNamespace(generation_config=source, override_generation_config=override)
        inputs: Any = SimpleNamespace(config=options, generation_defaults={"max_tokens": 10}, model_config=MODEL)
        for asked, wanted in ((None, 10), (5, 5), (15, 10 if is_limit else 15)):
            fields = {} if asked is None else {"max_tokens": asked}
            generate = GenerateRequest.model_validate({"token_ids": [1], "sampling_params": fields})
            call = pb.GenerateRequest(text="Hi", stopping={"max_new_tokens": asked})
            found = [
                ChatRequest(messages=HI).sampling_params(inputs, ServerConfig(), **fields),
                generate.params(inputs, ServerConfig()),
                RequestReader(inputs, ServerConfig())._sampling_params(call, Wanted(), stream=False),
                TranscriptionRequest(model="tiny", max_completion_tokens=asked).params(inputs),
            ]
            assert [each.max_tokens for each in found] == [wanted] * 4, (source, asked)


def test_options_of_a_stream_that_set_nothing_need_none():
    for model, fields in (
        (ChatRequest, {"messages": HI}),
        (CompletionRequest, {"prompt": "Hi"}),
        (GenerateRequest, {"token_ids": [1], "sampling_params": {}}),
    ):
        model.model_validate({**fields, "stream_options": {}})
        with pytest.raises(ValidationError, match="only allowed with stream=true"):
            model.model_validate({**fields, "stream_options": {"include_usage": False}})


def test_what_completions_and_chats_alone_support_is_refused_elsewhere():
    own = {"logprob_token_ids", "prompt_logprob_start", "return_sampling_mass", "steer", "trace_decode_token_ids"}
    own |= {"routed_experts_prompt_start", "prompt_logprob_token_ids", "capture", "return_hidden_states"}
    own |= {"repetition_detection", "stream_interval", "return_sampling_mask"}
    for model in (CompletionRequest, ChatRequest):
        assert own <= model.model_fields.keys() and not own & model.refused.keys()
    for model in (MessagesRequest, ResponsesRequest):
        assert own <= model.refused.keys() and not own & model.model_fields.keys()


@each_row("name", CHAT)
async def test_a_field_of_chat_acts(app, engine, name, caplog):
    case = CHAT[name]
    value, beside = case if isinstance(case, tuple) else (case, {})
    await check_acts(app, engine, "/v1/chat/completions", {"messages": HI, **beside}, name, value, caplog)


@each_row("name", RESPONSES)
async def test_a_field_of_responses_acts(app, engine, name, caplog):
    case = RESPONSES[name]
    value, beside = case if isinstance(case, tuple) else (case, {})
    if name == "truncation":
        assert (await post(app, "/v1/responses", **beside)).error["param"] == "input"
        assert (await post(app, "/v1/responses", **beside, truncation=value)).status == 200
        return
    await check_acts(app, engine, "/v1/responses", {"input": "Hi", **beside}, name, value, caplog)


@each_row("name", ChatRequest.refused)
async def test_a_field_of_chat_is_refused(app, name):
    await check_refused(app, "/v1/chat/completions", {"messages": HI}, name, ChatRequest.refused[name])


@each_row("name", ResponsesRequest.refused)
async def test_a_field_of_responses_is_refused(app, name):
    await check_refused(app, "/v1/responses", {"input": "Hi"}, name, ResponsesRequest.refused[name])


async def test_a_field_nobody_knows_is_named_in_a_header(app):
    answer = await post(app, "/v1/chat/completions", messages=HI, cache_key="x", store=None)
    assert answer.status == 200 and answer.headers["x-unknown-fields"] == "cache_key"
    assert "x-ignored-fields" not in answer.headers
    answer = await post(app, "/v1/chat/completions", messages=HI, **{"": 1})
    assert answer.status == 200 and answer.headers["x-unknown-fields"] == "?"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [True, "high", {"a": "b"}])
async def test_hints_change_nothing_and_are_named(app, engine, value, stream, caplog):
    for path, base in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        base = {**base, "stream": stream}
        hints = dict.fromkeys(sorted(HINTS - (OWN_OF_RESPONSES if "input" in base else set())), value)
        plain = await outcome(app, engine, path, base, caplog)
        assert await outcome(app, engine, path, {**base, **hints}, caplog) == plain
        answer = await post(app, path, **base, **hints)
        assert answer.headers["x-ignored-fields"] == ", ".join(hints) and "x-unknown-fields" not in answer.headers


@pytest.mark.parametrize(
    ("template", "fields", "written", "ignored"),
    [
        ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, "high", None),
        ("{{ enable_thinking }}{{ thinking }}", {"reasoning_effort": "none"}, "FalseFalse", None),
        ("{{ enable_thinking }}{{ thinking }}", {"thinking": {"type": "enabled"}}, "TrueTrue", None),
        ("{{ thinking }}", {"thinking": False, "reasoning_effort": "low"}, "False", None),
        ("{{ thinking }}", {"thinking": True, "chat_template_kwargs": {"thinking": "!"}}, "!", None),
        ("{{ reasoning_effort }}.", {"thinking": True}, ".", "thinking"),
        ("plain", {"thinking": True, "reasoning_effort": "low"}, "plain", "reasoning_effort, thinking"),
    ],
)
async def test_reasoning_is_asked_for_as_the_template_knows_it(app, engine, template, fields, written, ignored):
    answer = await post(app, "/v1/chat/completions", messages=HI, chat_template=template, **fields)
    assert answer.status == 200 and engine.calls[-1][0]["prompt"] == written
    assert answer.headers.get("x-ignored-fields") == ignored


async def test_hints_of_responses_that_this_model_does_not_know(chat_engine):
    app = create_app(ScriptedEngine(chat_engine, "Yes."), ServerConfig())
    fields = {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}
    answer = await post(app, "/v1/responses", input="Hi", **fields)
    assert answer.status == 200 and answer.headers["x-ignored-fields"] == "text.verbosity, reasoning"


WRONG = (None, True, 7, 1.5, "x", [], [None], [[1]], {}, {"a": None}, -1, 1e308, 10**30)


@pytest.mark.parametrize(
    ("path", "model", "base"),
    [
        ("/v1/chat/completions", ChatRequest, {"messages": HI}),
        ("/v1/responses", ResponsesRequest, {"input": "Hi"}),
        ("/v1/completions", CompletionRequest, {"prompt": "Hi"}),
        ("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
        ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
        ("/inference/v1/generate", GenerateRequest, {"token_ids": [5, 6]}),
        ("/v1/messages", MessagesRequest, {"messages": HI, "max_tokens": 2}),
        ("/cohere/v2/chat", CohereChatRequest, {"messages": HI}),
    ],
)
async def test_wrong_types_end_in_no_server_error(app, path, model, base):
    """Every field with every kind of value: sound or a bad request that names a field, nothing else."""
    for name in model.model_fields:
        for value in WRONG:
            answer = await post(app, path, **{**base, name: value})
            assert answer.status in (200, 400, 404), (name, value, answer.body)
            if answer.status != 200 and model not in (MessagesRequest, CohereChatRequest):  # their errors lack it
                assert answer.error["param"] is not None, (name, value, answer.body)


async def test_usage_in_every_chunk_counts_what_has_been_said(app):
    """Of the choice in it, as in vLLM, and in the last one of all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, fields in (
        ("/v1/chat/completions", {"messages": HI, "n": 2}),
        ("/v1/completions", {"prompt": ["Hi", "Hi there, all"]}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"n": 2}}),
    ):
        *events, last = (await post(app, path, **fields, stream=True, stream_options=options)).events
        of = [[event["usage"] for event in events if event["choices"][0]["index"] == index] for index in (0, 1)]
        counts = [[each["completion_tokens"] for each in own] for own in of]
        assert counts[0] == counts[1] == sorted(counts[0]) and counts[0][0] <= 1 < counts[0][-1]
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * counts[0][-1]
        prompts = {own[0]["prompt_tokens"] for own in of}
        whole = last["usage"]["prompt_tokens"]
        assert sum(prompts) == whole and len(prompts) == 1 + (path == "/v1/completions")
    # As in vLLM, the server's option puts it into every event.
    assert usage_in_stream(None, ServerConfig(enable_force_include_usage=True)) == (True, True)
    assert usage_in_stream(None, ServerConfig()) == (False, False)


async def test_fields_that_clients_read_are_there(app):
    whole = (await post(app, "/v1/chat/completions", messages=HI)).json
    assert whole["prompt_logprobs"] is whole["prompt_token_ids"] is None
    (choice,) = (await post(app, "/v1/completions", prompt="Hi")).json["choices"]
    assert choice["prompt_logprobs"] is choice["prompt_token_ids"] is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"n": 0}, "allowed: 1 to 128"), ({"logit_bias": {"7": 1, "seven": 1}}, "logit_bias has the key 'seven'")],
)
async def test_advice_can_be_followed(app, fields, said):
    assert said in (await post(app, "/v1/chat/completions", messages=HI, **fields)).error["message"]


def test_variables_of_a_template_are_not_keys_of_messages():
    template = "{% if thinking %}{{ message.enable_thinking }}{{ part['reasoning_effort'] }}{% endif %}"
    assert {*prompt._THINKING.findall(template)} == {"thinking"}

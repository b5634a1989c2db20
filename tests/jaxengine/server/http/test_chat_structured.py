"""Schemas, forced calls and parse() through the real OpenAI client: a model of random weights keeps to all of them."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.openai_client import openai_client

HI = [{"role": "user", "content": "Hi"}]


class Weather(BaseModel):
    """Everything in it is short: what random weights would say of a text has no end."""

    city: Literal["Paris", "Rome"]
    degrees: int = Field(ge=-50, le=50)
    rain: bool


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
# White space between the parts of JSON has no end either: its tokens are made unlikely.
ASK = {"model": "tiny", "temperature": 1.0}


@pytest.fixture(scope="module")
def app(chat_engine):
    tokenizer = chat_engine.inputs.tokenizer
    spaces = [number for number in range(tokenizer.vocab_size) if tokenizer.decode([number]).isspace()]
    ASK["logit_bias"] = {str(number): -100 for number in spaces}
    return create_app(chat_engine, ServerConfig(served_model_name="tiny"))


@pytest.fixture
def client(app):
    return openai_client(app)


async def test_chat_parses_into_a_model(client):
    answer = await client.chat.completions.parse(**ASK, messages=HI, n=3, seed=1, response_format=Weather)
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Weather)


async def test_responses_parse_into_a_model(client):
    response = await client.responses.parse(
        model="tiny", input="Hi", text_format=Weather, extra_body={"seed": 2, "logit_bias": ASK["logit_bias"]}
    )
    assert response.status == "completed" and isinstance(response.output_parsed, Weather)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends", [True, False])
async def test_a_schema_holds_behind_the_reasoning(chat_engine, app, stream, ends):
    """ends: before the tokens do."""
    config = ServerConfig(served_model_name="tiny", reasoning_parser="deepseek_r1")
    client, tokenizer = openai_client(create_app(chat_engine, config)), chat_engine.inputs.tokenizer
    likely = {str(number): 11 for number in tokenizer.encode("</think>", add_special_tokens=False)} if ends else {}
    ask = {**ASK, "messages": HI, "response_format": {"type": "json_schema", "json_schema": ANSWER_SCHEMA}}
    ask |= {"logit_bias": {**ASK["logit_bias"], **likely}, "max_tokens": 150 if ends else 9, "seed": 3}
    if stream:
        parts = [chunk.choices[0] async for chunk in await client.chat.completions.create(**ask, stream=True)]
        content = "".join(part.delta.content or "" for part in parts)
        reasoning = "".join(getattr(part.delta, "reasoning", None) or "" for part in parts)
        reason = parts[-1].finish_reason
    else:
        (choice,) = (await client.chat.completions.create(**ask)).choices
        content, reasoning, reason = choice.message.content, choice.message.reasoning, choice.finish_reason
    assert reasoning and "{" not in reasoning[:1]
    if ends:
        assert reason == "stop" and set(json.loads(content)) == {"sure"}
    else:
        assert (reason, content or "") == ("length", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_is_made(client, stream):
    for seed in range(3):
        ask = {**ASK, "messages": HI, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        if stream:
            async with client.chat.completions.stream(**ask, seed=seed) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**ask, seed=seed)
        (choice,) = answer.choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "now" else Weather.model_validate(arguments)


async def test_a_named_call_is_made(client):
    named = {"type": "function", "function": {"name": "weather"}}
    for temperature in (0, 1):  # greedy, these weights would write white space for ever
        answer = await client.chat.completions.create(
            model="tiny", messages=HI, tools=TOOLS, tool_choice=named, seed=4, temperature=temperature
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather" and Weather.model_validate_json(call.function.arguments)


async def outcomes(ask, answers: str, seeds: int = 8) -> set[str]:
    """What the model did under several seeds, each time one of the two and nothing else."""
    found = set()
    for seed in range(seeds):
        content, calls = await ask(seed)
        if calls:
            assert not content
            found |= {name for name, _ in calls}
            for name, arguments in calls:
                assert json.loads(arguments) == {} if name == "now" else Weather.model_validate_json(arguments)
        else:
            found.add("answer")
            assert set(json.loads(content)) == {answers}
    return found


ANSWER = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("parser", ["hermes", "pythonic"])
async def test_an_answer_keeps_to_its_schema_where_tools_may_be_called(chat_engine, parser):
    options = ServerConfig(served_model_name="tiny", enable_auto_tool_choice=True, tool_call_parser=parser)
    client = openai_client(create_app(chat_engine, options))
    tokenizer = chat_engine.inputs.tokenizer
    braces = [number for number in range(tokenizer.vocab_size) if tokenizer.decode([number]).startswith("{")]
    ask = {**ASK, "messages": HI}

    def bias(seed):
        """Every other time an answer is unlikely."""
        return {**ASK["logit_bias"], **({str(number): -100 for number in braces} if seed % 2 else {})}

    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}

    async def chat(seed):
        answer = await client.chat.completions.create(
            **{**ask, "logit_bias": bias(seed)},
            tools=TOOLS,
            response_format=format_,
            seed=seed,
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]

    async def respond(seed):
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        text = {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}}
        extra = {"seed": seed, "logit_bias": bias(seed)}
        response = await client.responses.create(
            model="tiny", input="Hi", tools=tools, text=text, parallel_tool_calls=False, extra_body=extra
        )
        calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
        return response.output_text, calls

    for way in (chat, respond):
        found = await outcomes(way, "sure")
        assert "answer" in found and len(found) > 1, found


async def test_a_json_object_and_a_choice(client):
    answer = await client.chat.completions.create(
        **ASK, messages=HI, seed=5, max_tokens=60, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.startswith("{")
    chosen = await client.chat.completions.create(
        **ASK, messages=HI, n=4, seed=6, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert {choice.message.content for choice in chosen.choices} <= {"yes", "no"}


ANSWER_SCHEMA = {"name": "a", "schema": ANSWER}
BAD = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}, "required": ["a"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_cannot_be_used_is_refused(app, stream):
    function = {"type": "function", "function": {"name": "f", "parameters": BAD}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}}
    for fields, param in (
        ({"response_format": wrapped}, "response_format"),
        ({"structured_outputs": {"json": BAD}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"tools": [function], "tool_choice": "required"}, "tools"),
    ):
        answer = await post(app, "/v1/chat/completions", messages=HI, stream=stream, **fields)
        assert answer.status == 400 and answer.error["param"] == param, answer.body
    text = {"format": {"type": "json_schema", "name": "a", "schema": BAD}}
    assert (await post(app, "/v1/responses", input="Hi", stream=stream, text=text)).error["param"] == "text"


async def test_what_is_cut_short_is_no_model(client):
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(**ASK, messages=HI, seed=7, max_tokens=2, response_format=Weather)

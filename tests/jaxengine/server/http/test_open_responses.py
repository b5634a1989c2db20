"""Needs of clients of /v1/responses other than OpenAI's: all fields, references to items, tools that are allowed."""

from __future__ import annotations

import openai
import pytest

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.http.test_responses import PARSERS, THINKS_AND_CALLS, TOOL
from tests.jaxengine.server.openai_client import openai_client
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

# Fields that the Open Responses specification requires of a response.
REQUIRED = (
    "background completed_at created_at error frequency_penalty id incomplete_details instructions max_output_tokens "
    "max_tool_calls metadata model object output parallel_tool_calls presence_penalty previous_response_id "
    "prompt_cache_key reasoning safety_identifier service_tier status store temperature text tool_choice tools "
    "top_logprobs top_p truncation usage"
)


@pytest.fixture
def scripted(chat_engine):
    """scripted(texts): a client, and the engine behind it."""

    def build(*texts: str):
        engine = ScriptedEngine(chat_engine, *texts)
        return openai_client(create_app(engine, ServerConfig(served_model_name="tiny", **PARSERS))), engine

    return build


async def test_a_response_has_every_field(scripted):
    """That Open Responses requires: in the answer and in the first and the last event of a stream."""
    client, _ = scripted("Fine.")
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "string"}}
    ask = {"model": "tiny", "input": "Hi", "tools": [{"type": "function", "name": "now"}], "text": {"format": schema}}
    ask |= {"prompt_cache_key": "k", "safety_identifier": "s"}
    whole = await client.responses.create(**ask)
    events = [event async for event in await client.responses.create(**ask, stream=True)]
    for found in (whole, events[0].response, events[-1].response):
        shown = found.model_dump(exclude_unset=True, by_alias=True)
        assert not set(REQUIRED.split()) - shown.keys()
        assert shown["tools"][0].keys() >= {"type", "name", "description", "parameters", "strict"}
        assert shown["text"]["format"] == {**schema, "description": None, "strict": True}
        assert (found.prompt_cache_key, found.safety_identifier) == ("k", "s")
    assert events[0].response.completed_at is None
    assert whole.created_at <= whole.completed_at <= events[-1].response.completed_at


@each_row(
    ("choice", "forced", "called"),
    [
        ({"mode": "auto", "tools": [{"type": "function", "name": "now"}]}, False, []),
        ({"tools": [{"type": "function", "name": "weather"}, {"type": "web_search"}]}, False, ["weather"]),
        ({"mode": "required", "tools": [{"type": "function", "name": "weather"}]}, True, []),
        ({"mode": "auto", "tools": [{"type": "image_generation"}]}, False, []),
    ],
)
async def test_only_tools_that_are_allowed_are_called(scripted, choice, forced, called):
    client, engine = scripted(THINKS_AND_CALLS)
    tools = [TOOL, {"type": "function", "name": "now"}]
    choice = {"type": "allowed_tools", **choice}
    whole = await client.responses.create(model="tiny", input="Hi", tools=tools, tool_choice=choice)
    assert (engine.calls[-1][1].structured_outputs is not None) == forced
    if not forced:
        assert [item.name for item in whole.output if item.type == "function_call"] == called


async def test_items_of_stored_responses_are_referred_to(scripted):
    """As the AI SDK does by default; also without a type, as Open Responses allows."""
    client, engine = scripted(THINKS_AND_CALLS)
    first = await client.responses.create(model="tiny", input="Hi", tools=[TOOL])
    whole = [item.model_dump(exclude_none=True) for item in first.output]
    thought, message, call = first.output
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    hi, ask = {"role": "user", "content": "Hi"}, {"model": "tiny", "tools": [TOOL]}
    await client.responses.create(**ask, input=[hi, *whole, told])
    references = [{"type": "item_reference", "id": thought.id}, {"id": message.id}, whole[2]]
    second = await client.responses.create(**ask, input=[hi, *references, told])
    assert engine.calls[-1][0]["prompt"] == engine.calls[-2][0]["prompt"] and "Yes." in engine.calls[-1][0]["prompt"]
    shown = (await client.responses.input_items.list(second.id, order="asc")).data
    assert [item.type for item in shown] == ["message", "reasoning", "message", "function_call", "function_call_output"]
    counted = [
        await client.responses.input_tokens.count(**ask, input=[hi, *each, told]) for each in (whole, references)
    ]
    assert counted[0].input_tokens == counted[1].input_tokens
    with pytest.raises(openai.BadRequestError, match="given twice"):
        await client.responses.create(**ask, input=[*references[:1], *references[:2]])
    gone = await client.responses.create(model="tiny", input="Hi", store=False)
    for item_id in (gone.output[0].id, message.id + "0", "msg_x", ""):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.create(**ask, input=[{"type": "item_reference", "id": item_id}])
        assert caught.value.param == "input"

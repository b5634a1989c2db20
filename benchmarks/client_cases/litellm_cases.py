"""litellm: OpenAI's endpoint, and Anthropic's as a separate provider."""

import json

import litellm
from case import BASE, KEY, MODEL, QUESTION, Place, Weather, get_weather, report

PACKAGES = ["litellm"]
HI = [{"role": "user", "content": QUESTION}]
WAYS = (
    {"model": f"openai/{MODEL}", "api_base": BASE + "/v1", "api_key": KEY, "temperature": 0},
    {"model": f"anthropic/{MODEL}", "api_base": BASE, "api_key": KEY},
)
ASK = {"messages": HI, "max_tokens": 200, "num_retries": 0}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": Place.model_json_schema()}}


async def chat():
    for way in WAYS:
        assert (await litellm.acompletion(**ASK, **way)).choices[0].message.content


async def stream():
    for way in WAYS:
        chunks = [chunk async for chunk in await litellm.acompletion(**ASK, **way, stream=True)]
        assert len(chunks) > 3 and "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def tools():
    for way in WAYS:
        answer = await litellm.acompletion(**ASK, **way, tools=[TOOL], tool_choice="required")
        calls = answer.choices[0].message.tool_calls
        assert calls and all(Place.model_validate_json(call.function.arguments) for call in calls)


async def streamed_tools():
    for way in WAYS:
        options = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "stream": True}
        chunks = [chunk async for chunk in await litellm.acompletion(**ASK, **way, **options)]
        (call,) = litellm.stream_chunk_builder(chunks, messages=HI).choices[0].message.tool_calls
        assert Place.model_validate_json(call.function.arguments)


async def structured():
    answer = await litellm.acompletion(**ASK, **WAYS[0], response_format=Weather)
    assert Weather.model_validate_json(answer.choices[0].message.content)


async def second_turn():
    for way in WAYS:
        forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        first = (await litellm.acompletion(**ASK, **way, **forced)).choices[0].message
        (call,) = first.tool_calls
        told = {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}
        ask = {**ASK, "messages": [*HI, first.model_dump(), told]}
        last = (await litellm.acompletion(**ask, **way, tools=[TOOL], tool_choice="none")).choices[0]
        assert isinstance(last.message.content, str) and last.finish_reason in ("stop", "length")


async def tools_and_schema():
    answer = await litellm.acompletion(**ASK, **WAYS[0], tools=[TOOL], response_format=Weather)
    message = answer.choices[0].message
    assert message.tool_calls or Weather.model_validate_json(message.content)


report(globals())

"""OpenAI's Python client: chat completions, its `.stream()` and `.parse()` helpers, and /v1/responses."""

import json

import openai
from case import BASE, KEY, MODEL, QUESTION, Place, Weather, get_weather, report

PACKAGES = ["openai"]
HI = [{"role": "user", "content": QUESTION}]
ASK = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 64}
TOOL = openai.pydantic_function_tool(Place, name="get_weather")
client = openai.AsyncOpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)


async def chat():
    answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0
    response = await client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64)
    assert response.output_text == answer.choices[0].message.content


async def stream():
    whole = await client.chat.completions.create(**ASK)
    async with client.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as events:
        deltas = [event.delta async for event in events if event.type == "content.delta"]
        answer = await events.get_final_completion()
    assert "".join(deltas) == answer.choices[0].message.content == whole.choices[0].message.content
    assert answer.usage == whole.usage
    async with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=64) as events:
        response = await events.get_final_response() if [event async for event in events] else None
    assert response.output_text == whole.choices[0].message.content


async def tools():
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = await client.chat.completions.create(**ASK, tools=[TOOL], tool_choice=choice)
        for call in answer.choices[0].message.tool_calls:
            assert call.function.name == "get_weather" and Place.model_validate_json(call.function.arguments)


async def streamed_tools():
    ask = {**ASK, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    async with client.chat.completions.stream(**ask) as events:
        kinds = {event.type async for event in events}
        answer = await events.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert Place.model_validate(call.function.parsed_arguments) and "tool_calls.function.arguments.done" in kinds


async def structured():
    answer = await client.chat.completions.parse(**ASK, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    response = await client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, temperature=0)
    assert isinstance(response.output_parsed, Weather)


async def second_turn():
    """Check that the model answers with text after the result of a forced tool call, further calls being ruled out, in
    chat completions and in /v1/responses.

    /v1/responses gets the first turn once by `previous_response_id` and once in the input.
    """
    first = await client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    messages = [*HI, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    second = await client.chat.completions.create(**{**ASK, "messages": messages}, tools=[TOOL], tool_choice="none")
    assert second.choices[0].message.content
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    ask = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 64}
    response = await client.responses.create(**ask, input=QUESTION, tool_choice="required", parallel_tool_calls=False)
    (call,) = (item for item in response.output if item.type == "function_call")
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    for way in (
        {"previous_response_id": response.id, "input": [told]},
        {"input": [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in response.output), told]},
    ):
        assert (await client.responses.create(**ask, **way, tool_choice="none")).output_text


async def tools_and_schema():
    answer = await client.chat.completions.parse(**ASK, tools=[TOOL], response_format=Weather)
    message = answer.choices[0].message
    assert isinstance(message.parsed, Weather) or all(
        Place.model_validate(call.function.parsed_arguments) for call in message.tool_calls
    )


report(globals())

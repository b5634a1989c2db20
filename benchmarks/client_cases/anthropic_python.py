"""Anthropic's Python client: messages, its `.stream()` and `.parse()` helpers, counting."""

import anthropic
from case import BASE, KEY, MODEL, QUESTION, Place, Weather, get_weather, report

PACKAGES = ["anthropic"]
HI = [{"role": "user", "content": QUESTION}]
ASK = {"model": MODEL, "messages": HI, "max_tokens": 64, "extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": Place.model_json_schema()}
SCHEMA = Weather.model_json_schema() | {"additionalProperties": False}
BY_SCHEMA = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
client = anthropic.AsyncAnthropic(base_url=BASE, api_key=KEY, max_retries=0)


async def chat():
    answer = await client.messages.create(**ASK, system="Be brief.")
    assert answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
    counted = await client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.")
    usage = answer.usage
    cached = usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens == usage.input_tokens + cached
    try:
        await anthropic.AsyncAnthropic(base_url=BASE, api_key="wrong", max_retries=0).messages.create(**ASK)
        raise AssertionError("a wrong key is let in")
    except anthropic.AuthenticationError as error:
        assert error.body["type"] == "error"


async def stream():
    whole = await client.messages.create(**ASK)
    async with client.messages.stream(**ASK) as events:
        text = "".join([text async for text in events.text_stream])
        message = await events.get_final_message()
    assert text == message.content[0].text == whole.content[0].text
    assert message.usage.output_tokens == whole.usage.output_tokens and message.stop_reason == whole.stop_reason


async def tools():
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = await client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
        assert answer.stop_reason == "tool_use"
        assert all(Place.model_validate(block.input) for block in answer.content)


async def streamed_tools():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    async with client.messages.stream(**ASK, tools=[TOOL], tool_choice=choice) as events:
        message = await events.get_final_message()
    (block,) = message.content
    assert block.type == "tool_use" and Place.model_validate(block.input) and message.stop_reason == "tool_use"


async def structured():
    answer = await client.messages.create(**ASK, **BY_SCHEMA)
    assert Weather.model_validate_json(answer.content[0].text)
    parsed = await client.messages.parse(**ASK, output_format=Weather)
    assert isinstance(parsed.parsed_output, Weather)


async def second_turn():
    first = await client.messages.create(
        **ASK, tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    (block,) = first.content
    result = {"type": "tool_result", "tool_use_id": block.id, "content": get_weather(**block.input)}
    messages = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await client.messages.create(**{**ASK, "messages": messages}, tools=[TOOL], tool_choice={"type": "none"})
    assert second.content[0].text


async def tools_and_schema():
    answer = await client.messages.create(**ASK, **BY_SCHEMA, tools=[TOOL])
    for block in answer.content:
        assert Weather.model_validate_json(block.text) if block.type == "text" else Place.model_validate(block.input)


report(globals())

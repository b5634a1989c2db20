"""LangChain over OpenAI's chat completions, and over Anthropic's messages with the same cases."""

from case import BASE, KEY, MODEL, QUESTION, Place, Weather, get_weather, report
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

PACKAGES = ["langchain-core", "langchain-openai", "langchain-anthropic"]
weather = tool(get_weather)
models = [
    ChatOpenAI(base_url=BASE + "/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=64, max_retries=0),
    ChatAnthropic(base_url=BASE, api_key=KEY, model=MODEL, max_tokens=64, max_retries=0),
]


async def chat():
    for model in models:
        answer = await model.ainvoke(QUESTION)
        assert answer.text and answer.usage_metadata["output_tokens"] > 0


async def stream():
    for model in models:
        chunks = [chunk async for chunk in model.astream(QUESTION)]
        assert len(chunks) > 3 and "".join(chunk.text for chunk in chunks)


async def tools():
    for model in models:
        answer = await model.bind_tools([weather], tool_choice="any").ainvoke(QUESTION)
        assert answer.tool_calls and all(call["args"]["city"] in ("Paris", "Rome") for call in answer.tool_calls)


async def streamed_tools():
    for model in models:
        whole = None
        bound = model.bind_tools([weather], tool_choice="get_weather", parallel_tool_calls=False)
        async for chunk in bound.astream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        (call,) = whole.tool_calls
        assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome")


async def structured():
    for model, method in ((models[0], "json_schema"), (models[0], "function_calling"), (models[1], "function_calling")):
        assert isinstance(await model.with_structured_output(Weather, method=method).ainvoke(QUESTION), Weather)


async def second_turn():
    for model in models:
        first = await model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).ainvoke(QUESTION)
        (call,) = first.tool_calls
        told = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
        assert (await model.ainvoke([HumanMessage(QUESTION), first, told])).text


async def tools_and_schema():
    bound = models[0].bind_tools([weather], response_format=Weather, strict=True, parallel_tool_calls=False)
    answer = await bound.ainvoke(QUESTION)
    assert answer.tool_calls or isinstance(answer.additional_kwargs["parsed"], Weather)
    assert all(Place.model_validate(call["args"]) for call in answer.tool_calls)


report(globals())

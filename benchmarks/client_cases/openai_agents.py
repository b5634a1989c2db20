"""OpenAI's Agents SDK, over chat completions and over /v1/responses: agents that call a tool and answer by a schema."""

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.agent_output import AgentOutputSchema
from case import BASE, KEY, MODEL, QUESTION, Weather, get_weather, report

PACKAGES = ["openai-agents"]
set_tracing_disabled(True)
FORCED = {
    "tools": [function_tool(get_weather)],
    "settings": {"tool_choice": "required", "parallel_tool_calls": False},
}
client = openai.AsyncOpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)
models = [kind(MODEL, openai_client=client) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)]


def agent(model, **options):
    """Return an Agent over a model, at temperature 0 with at most 200 tokens.

    options: keyword arguments of Agent, except `settings`, a dict of further arguments of ModelSettings.
    """
    # Over /v1/responses the SDK treats an answer that was cut off at max_tokens as an error.
    settings = ModelSettings(temperature=0, max_tokens=200, **options.pop("settings", {}))
    return Agent(name="weather", instructions="Be brief.", model=model, model_settings=settings, **options)


async def chat():
    for model in models:
        assert (await Runner.run(agent(model), QUESTION)).final_output


async def stream():
    for model in models:
        run = Runner.run_streamed(agent(model), QUESTION)
        kinds = [event.type async for event in run.stream_events()]
        assert run.final_output and kinds.count("raw_response_event") > 3


async def tools():
    for model in models:
        run = await Runner.run(agent(model, **FORCED, tool_use_behavior="stop_on_first_tool"), QUESTION)
        assert "20 degrees" in run.final_output


async def streamed_tools():
    for model in models:
        run = Runner.run_streamed(agent(model, **FORCED, tool_use_behavior="stop_on_first_tool"), QUESTION)
        assert [event async for event in run.stream_events()] and "20 degrees" in run.final_output


async def structured():
    for model in models:
        run = await Runner.run(agent(model, output_type=AgentOutputSchema(Weather)), QUESTION)
        assert isinstance(run.final_output, Weather)


async def second_turn():
    """Check, for each of `models`, that an agent that was forced to call a tool gives a final answer after the call."""
    for model in models:
        run = await Runner.run(agent(model, **FORCED), QUESTION)
        assert run.final_output


async def tools_and_schema():
    for model in models:
        run = await Runner.run(agent(model, **FORCED, output_type=Weather), QUESTION)
        assert isinstance(run.final_output, Weather)


report(globals())

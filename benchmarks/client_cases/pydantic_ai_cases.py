"""pydantic-ai over OpenAI's chat completions and responses, and Anthropic's messages."""

from case import BASE, KEY, MODEL, QUESTION, Weather, get_weather, report
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

PACKAGES = ["pydantic-ai-slim"]
provider = OpenAIProvider(base_url=BASE + "/v1", api_key=KEY)
chat_model = OpenAIChatModel(MODEL, provider=provider)
models = [
    chat_model,
    OpenAIResponsesModel(MODEL, provider=provider),
    AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE, api_key=KEY)),
]
SETTINGS = {"max_tokens": 200}


def calling(model, settings, **options):
    """Return an agent with the tool `weather`, which always answers for Paris, and the list to which each call of the
    tool appends its `city`.

    settings: model settings that are merged over SETTINGS. options: further arguments of Agent.
    """
    agent = Agent(model, model_settings={**SETTINGS, **settings}, **options)
    called = []

    @agent.tool_plain
    def weather(city: str, days: int) -> str:
        called.append(city)
        return get_weather("Paris", days)

    return agent, called


async def chat():
    for model in models:
        assert (await Agent(model, model_settings=SETTINGS).run(QUESTION)).output


async def stream():
    for model in models:
        async with Agent(model, model_settings=SETTINGS).run_stream(QUESTION) as run:
            assert "".join([text async for text in run.stream_text(delta=True, debounce_by=None)])


async def tools():
    """Check structured output by pydantic-ai's default method: a tool that the model must call."""
    for model in models:
        run = await Agent(model, output_type=ToolOutput(Weather), model_settings=SETTINGS).run(QUESTION)
        assert isinstance(run.output, Weather)


async def streamed_tools():
    for model in models:
        async with Agent(model, output_type=ToolOutput(Weather), model_settings=SETTINGS).run_stream(QUESTION) as run:
            assert isinstance(await run.get_output(), Weather)


async def structured():
    for model in models[:2]:
        run = await Agent(model, output_type=NativeOutput(Weather), model_settings=SETTINGS).run(QUESTION)
        assert isinstance(run.output, Weather)


async def second_turn():
    for model in models:
        agent = Agent(model, model_settings=SETTINGS)
        first = await agent.run(QUESTION)
        assert (await agent.run("And in Rome?", message_history=first.all_messages())).output


async def tools_and_schema():
    for model in models[:2]:
        agent, _ = calling(model, {"parallel_tool_calls": False}, output_type=NativeOutput(Weather))
        run = await agent.run(QUESTION)
        assert isinstance(run.output, Weather)


report(globals())

"""instructor: pydantic models from forced tool calls and from schemas, whole and streamed."""

import instructor
import openai
from case import BASE, KEY, MODEL, QUESTION, Weather, report

PACKAGES = ["instructor"]
HI = [{"role": "user", "content": QUESTION}]
ASK = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 200, "max_retries": 0}
plain = openai.AsyncOpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)


async def made(mode, **options):
    """Request a Weather in an instructor mode, and return it. options: passed on to `create`."""
    client = instructor.from_openai(plain, mode=mode)
    return await client.chat.completions.create(**ASK, response_model=Weather, **options)


async def tools():
    assert isinstance(await made(instructor.Mode.TOOLS), Weather)


async def streamed_tools():
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    whole = await made(instructor.Mode.TOOLS)
    parts = client.chat.completions.create_partial(**ASK, response_model=Weather)
    states = [part async for part in parts]
    assert states[-1].model_dump() == whole.model_dump()


async def structured():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        assert isinstance(await made(mode), Weather)


report(globals())

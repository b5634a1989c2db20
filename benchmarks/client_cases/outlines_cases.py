"""outlines: text, and answers by a schema, a choice, a regular expression, over OpenAI's fields and over vLLM's."""

import re
from typing import Literal

import openai
import outlines
from case import BASE, KEY, MODEL, QUESTION, Weather, report
from outlines.types import Regex

PACKAGES = ["outlines"]
ASK = {"temperature": 0, "max_tokens": 64}
plain = openai.AsyncOpenAI(base_url=BASE + "/v1", api_key=KEY, max_retries=0)
by_openai, by_vllm = outlines.from_openai(plain, MODEL), outlines.from_vllm(plain, MODEL)


class Closed(Weather, extra="forbid"):
    """Weather without additional properties, which vLLM's structured_outputs would otherwise let a model write."""


async def chat():
    assert await by_vllm(QUESTION, **ASK) == await by_openai(QUESTION, **ASK)


async def stream():
    whole = await by_vllm(QUESTION, **ASK)
    assert "".join([piece async for piece in by_vllm.stream(QUESTION, **ASK)]) == whole


async def structured():
    for model in (by_openai, by_vllm):
        Closed.model_validate_json(await model(QUESTION, Closed, **ASK))
    assert await by_vllm(QUESTION, Literal["sun", "rain"], **ASK) in ("sun", "rain")
    assert re.fullmatch("[0-9]{2} degrees", await by_vllm(QUESTION, Regex("[0-9]{2} degrees"), **ASK))
    pieces = [piece async for piece in by_vllm.stream(QUESTION, Closed, **ASK)]
    Closed.model_validate_json("".join(pieces))


report(globals())

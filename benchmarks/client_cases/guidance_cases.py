"""guidance's models for OpenAI's chat completions, and for vLLM's with whole grammars."""

import re

from case import BASE, KEY, MODEL, QUESTION, Weather, report
from guidance import assistant, gen, guidance, json, select, user
from guidance.models import OpenAI
from guidance.models.experimental import VLLMModel

PACKAGES = ["guidance"]
WAY = {"base_url": BASE + "/v1", "api_key": KEY, "echo": False}
by_openai, by_vllm = OpenAI(MODEL, **WAY), VLLMModel(MODEL, **WAY)


def asked(model, grammar):
    """Return the model after the question and an answer that follows a grammar."""
    with user():
        model += QUESTION
    with assistant():
        model += grammar
    return model


async def chat():
    for model in (by_openai, by_vllm):
        assert asked(model, gen("text", max_tokens=32))["text"]


@guidance
def answer(model):
    """Return the model after the question and a generated answer, in guidance blocks opened here.

    guidance streams in a thread of its own, in which none of the caller's blocks is open.
    """
    return asked(model, gen("text", max_tokens=32))


async def stream():
    pieces = [str(state) for state in by_vllm.stream() + answer()]
    assert len(pieces) > 3 and all(one in other for one, other in zip(pieces, pieces[1:], strict=False))


async def structured():
    for model in (by_openai, by_vllm):
        Weather.model_validate_json(asked(model, json("weather", schema=Weather))["weather"])
    assert asked(by_vllm, select(["sun", "rain"], name="sky"))["sky"] in ("sun", "rain")
    degrees = asked(by_vllm, "It is " + gen("degrees", regex="[0-9]{2}") + " degrees")
    assert re.fullmatch("[0-9]{2}", degrees["degrees"])


async def second_turn():
    model = asked(asked(by_vllm, gen("first", max_tokens=16)), select(["sun", "rain"], name="second"))
    assert model["first"] and model["second"] in ("sun", "rain")


report(globals())

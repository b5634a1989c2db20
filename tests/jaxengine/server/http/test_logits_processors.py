"""Parameters of logits processors in requests to a server whose engine has one."""

from __future__ import annotations

import pytest

from jaxengine import AsyncLLM
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.engine.test_logits_processors import OPTIONS, PROMPT, TINY, MaxRepeats
from tests.jaxengine.server.asgi_client import post

BODY = {"prompt": PROMPT["prompt_token_ids"], "max_tokens": 12, "temperature": 0, "ignore_eos": True} | {
    "return_token_ids": True
}


@pytest.fixture(scope="module")
def app():
    engine = AsyncLLM(str(TINY), logits_processors=[MaxRepeats], **OPTIONS)
    yield create_app(engine, ServerConfig(served_model_name=("tiny",)))
    engine.shutdown()


async def test_vllm_xargs_reach_the_processor(app):
    plain = await post(app, "/v1/completions", **BODY)
    limited = await post(app, "/v1/completions", **BODY, vllm_xargs={"max_repeats": 1})
    ids = [answer.json["choices"][0]["token_ids"] for answer in (plain, limited)]
    assert len(set(ids[0])) < 12 and len(set(ids[1])) == 12


async def test_an_error_names_the_field_of_http(app):
    wrong = await post(app, "/v1/completions", **BODY, vllm_xargs={"max_repeats": -1})
    assert (wrong.status, wrong.error["param"]) == (400, "vllm_xargs.max_repeats")
    assert wrong.error["message"] == "vllm_xargs.max_repeats must be an int from 0 to 1000, got -1"

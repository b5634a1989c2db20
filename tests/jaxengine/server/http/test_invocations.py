"""/invocations answers as the path that the body is for does, with its checks."""

from __future__ import annotations

import pytest

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post

HI = [{"role": "user", "content": "Hi"}]
LIMIT = {"max_tokens": 3, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name="tiny", return_tokens_as_token_ids=True))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HI, **LIMIT}),
        ("/v1/completions", {"prompt": "Hi", **LIMIT}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 3, "seed": 1, "ignore_eos": True}),
    ],
)
async def test_an_invocation_is_the_request_that_its_body_says(app, path, fields):
    for asked in (fields, {**fields, "nothing": 1}, {**fields, "seed": "x"}):
        direct, passed_on = await post(app, path, **asked), await post(app, "/invocations", **asked)
        assert passed_on.status == direct.status == (400 if asked.get("seed") == "x" else 200)
        assert passed_on.headers.get("x-unknown-fields") == direct.headers.get("x-unknown-fields")
        if direct.status == 200:
            assert [passed_on.json[key] for key in ("object", "model")] == [
                direct.json[key] for key in ("object", "model")
            ]
        else:
            assert passed_on.json == direct.json
    if path != "/v1/responses":
        assert (await post(app, "/invocations", **fields, stream=True)).events


async def test_its_errors_are_those_of_other_routes_with_a_body(app):
    paths = app.openapi()["paths"]
    passed_on, direct = (paths[path]["post"] for path in ("/invocations", "/v1/completions"))
    assert passed_on["responses"].keys() == direct["responses"].keys() and passed_on["requestBody"]["required"]


async def test_a_body_for_no_path_is_refused(app):
    for fields in ({}, {"messages": HI, "prompt": "Hi"}):
        answer = await post(app, "/invocations", **fields)
        assert answer.status == 400 and "messages, prompt, input" in answer.error["message"]


async def test_tokens_are_named_by_id_where_the_server_says_so(app):
    for asked, by_id in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
        answer = await post(app, "/v1/completions", prompt="Hi", **LIMIT, logprobs=0, **asked)
        assert answer.json["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:") == by_id
        answer = await post(app, "/v1/chat/completions", messages=HI, **LIMIT, logprobs=True, **asked)
        assert answer.json["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:") == by_id

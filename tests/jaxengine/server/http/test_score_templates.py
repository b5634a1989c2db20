"""Requests of /score and /rerank: variables of the chat template that makes the prompt of a pair, and one document."""

from __future__ import annotations

import dataclasses

import pytest

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post

TEMPLATE = "{% for each in messages %}{{ each.content }} {% endfor %}{{ instruction | default('w7') }}"
PAIR = {"text_1": "w5", "text_2": "w6"}


@pytest.fixture(scope="module")
def classifier(pooling_folder, pooling_options):
    engine = AsyncLLM(pooling_folder("one_label"), **pooling_options)
    yield engine
    engine.shutdown()


async def test_variables_of_the_template_of_pairs(classifier, monkeypatch):
    app = create_app(classifier, ServerConfig())
    for fields in ({"instruction": "w8"}, {"chat_template_kwargs": {"more": "w8"}}):
        answer = await post(app, "/score", **PAIR, **fields)
        assert answer.status == 400 and answer.error["param"] == next(iter(fields)), answer.body
    config = dataclasses.replace(classifier.inputs.config, chat_template=TEMPLATE)
    monkeypatch.setattr(classifier.inputs, "config", config)
    for fields, last in (
        ({}, "w7"),
        ({"instruction": "w8"}, "w8"),
        ({"chat_template_kwargs": {"instruction": "w9"}}, "w9"),
        ({"instruction": "w8", "chat_template_kwargs": {"instruction": "w9"}}, "w9"),
    ):
        (expected,) = (await post(app, "/classify", input=f"w5 w6 {last}")).json["data"]
        (found,) = (await post(app, "/score", **PAIR, **fields)).json["data"]
        (ranked,) = (await post(app, "/rerank", query="w5", documents="w6", **fields)).json["results"]
        assert [found["score"]] == [ranked["relevance_score"]] == expected["probs"]
    closed = create_app(classifier, ServerConfig(chat_template_kwargs_allowed=False))
    for server, given in ((app, {"tools": []}), (closed, {"instruction": "w9"})):
        refused = await post(server, "/score", **PAIR, chat_template_kwargs=given)
        assert refused.status == 400 and refused.error["param"] == "chat_template_kwargs", refused.body
    assert (await post(closed, "/score", **PAIR, instruction="w9")).status == 200


async def test_a_single_document_is_a_list_of_one(classifier):
    app, content = create_app(classifier, ServerConfig()), [{"type": "text", "text": "w6"}]
    for document in ("w6", {"text": "w6"}, {"content": content}):
        one, listed = [
            await post(app, "/rerank", query="w5", documents=each, request_id="a") for each in (document, [document])
        ]
        assert one.status == 200 and one.json == listed.json
        (entry,) = one.json["results"]
        (text, parts) = (None, content) if "content" in document else ("w6", None)
        assert entry["document"] == {"text": text, "multi_modal": parts}

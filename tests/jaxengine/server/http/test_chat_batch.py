"""/v1/chat/completions/batch: each choice is what its conversation gets alone."""

from __future__ import annotations

import asyncio

import pytest

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.chat.batch import BatchChatRequest
from tests.jaxengine.server.asgi_client import Connection, idle, post
from tests.tables import each_row

PATH = "/v1/chat/completions/batch"
TALKS = [[{"role": "user", "content": text}] for text in ("Hi", "One two three", "A cat sat", "Hi")]
FIELDS = {"model": "tiny", "max_tokens": 6, "seed": 3, "temperature": 1.0}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name="tiny", max_prompts=5))


def plain(choice):
    """Without its place, and without numbers, whose last bits depend on what is computed beside."""
    tokens = [(each["token"], len(each["top_logprobs"])) for each in (choice["logprobs"] or {}).get("content", ())]
    return {**choice, "index": 0, "logprobs": tokens}


async def alone(app, messages, **fields):
    return (await post(app, PATH.removesuffix("/batch"), messages=messages, **FIELDS, **fields)).json


@each_row(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"structured_outputs": {"regex": "[0-9]{4}"}},
    ],
)
async def test_a_choice_for_each_conversation(app, fields):
    answer = await post(app, PATH, messages=TALKS, **FIELDS, **fields)
    assert answer.status == 200, answer.json
    singles = [await alone(app, each, **fields) for each in TALKS]
    choices = answer.json["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2, 3]
    assert [plain(each) for each in choices] == [plain(each["choices"][0]) for each in singles]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.json["usage"][name] == sum(each["usage"][name] for each in singles)
    assert answer.json.keys() == singles[0].keys() and answer.json["object"] == "chat.completion"


async def test_one_conversation(app):
    answer, single = await post(app, PATH, messages=TALKS[:1], **FIELDS), await alone(app, TALKS[0])
    assert answer.json["choices"] == single["choices"]


@each_row(
    "messages, message",
    [
        ([], "messages is empty"),
        ([[]], r"messages\[0\] is empty"),
        ([TALKS[0], []], r"messages\[1\] is empty"),
        (TALKS[0], "messages"),
        ("Hi", "messages"),
        ([[{"content": "x"}]], "role"),
        ([TALKS[0], [{"role": "user", "content": "word " * 5000}]], "max_model_len"),
        ([TALKS[0]] * 6, "allowed: 1 to 5"),
    ],
)
async def test_one_wrong_conversation_fails_the_whole(app, chat_engine, messages, message):
    answer = await post(app, PATH, messages=messages, **FIELDS)
    assert answer.status == 400 and answer.json["error"]["param"] in ("messages", "prompt"), answer.json
    assert message.replace("\\", "") in str(answer.json)
    await idle(chat_engine)


@each_row("name", BatchChatRequest.refused)
async def test_a_field_is_refused(app, name):
    answer = await post(app, PATH, messages=TALKS, **{**FIELDS, name: {"a": 1}})
    assert answer.status == 400 and name in str(answer.json), answer.json


async def test_a_client_that_leaves_ends_all(app, chat_engine):
    connection = Connection.of_json(app, PATH, messages=TALKS, **{**FIELDS, "max_tokens": 200})
    while not chat_engine.core.has_unfinished:
        await asyncio.sleep(0.005)
    await connection.leave()
    await idle(chat_engine)
    assert connection.status in (None, 499)

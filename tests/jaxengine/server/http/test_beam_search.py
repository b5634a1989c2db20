"""Beam search of completions and chat completions."""

from __future__ import annotations

import pytest

from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post

COMPLETION = {"prompt": "The quick brown fox", "max_tokens": 4, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig())


def texts(answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer.json["choices"]]


@pytest.mark.parametrize("path", PATHS)
async def test_beams_are_the_choices(app, chat_engine, path):
    greedy = texts(await post(app, path, **PATHS[path], temperature=0))
    assert texts(await post(app, path, **PATHS[path], use_beam_search=True)) == greedy  # of one beam
    first, again = [await post(app, path, **PATHS[path], use_beam_search=True, n=3) for _ in range(2)]
    assert texts(first) == texts(again) and len(set(texts(first))) == 3
    same = {"temperature": 0, "skip_special_tokens": False}  # there are none
    assert texts(await post(app, path, **PATHS[path], use_beam_search=True, n=3, **same)) == texts(first)
    assert first.json["usage"]["completion_tokens"] == 12
    assert [choice["index"] for choice in first.json["choices"]] == [0, 1, 2]
    assert not chat_engine.core.has_unfinished


async def test_more_beams_than_choices(app):
    fields = {**COMPLETION, "use_beam_search": True}
    three = texts(await post(app, "/v1/completions", **fields, n=3))
    assert texts(await post(app, "/v1/completions", **fields, n=1, best_of=3)) == three[:1]


@pytest.mark.parametrize("path", PATHS)
async def test_what_does_not_go_with_beams_is_refused(app, path):
    wrong = {"stream": True, "top_p": 0.5, "seed": 1, "stop": ["a"], "logprobs": True if "chat" in path else 1}
    for name, value in wrong.items():
        answer = await post(app, path, **PATHS[path], use_beam_search=True, **{name: value})
        assert answer.status == 400 and answer.error["param"] == name
        assert f"{name} is not allowed with use_beam_search=true" in answer.error["message"]
    for name, value in {"n": 11, "temperature": 0.5, **({} if "chat" in path else {"best_of": 11})}.items():
        answer = await post(app, path, **PATHS[path], use_beam_search=True, **{name: value})
        assert answer.status == 400 and answer.error["param"] == name, answer.body
        assert answer.error["message"].startswith(f"{name} is ")
    answer = await post(app, path, **PATHS[path], length_penalty=0.5)
    assert answer.status == 400 and answer.error["param"] == "length_penalty"


async def test_a_search_that_takes_too_long_ends_with_what_it_has(app, chat_engine):
    answer = await post(app, "/v1/completions", **{**COMPLETION, "max_tokens": 200}, use_beam_search=True, timeout=0.01)
    (choice,) = answer.json["choices"]
    assert choice["finish_reason"] == "abort" and choice["stop_reason"] == "timeout"

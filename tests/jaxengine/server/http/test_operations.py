"""Options of operators: profiles of the running engine, log lines of requests, streams in larger pieces, middleware of
their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math

import pytest
from fastapi import Response

from jaxengine.config.engine_config import ConfigError
from jaxengine.config.execution.profiler_config import ProfilerConfig
from jaxengine.engine.profiler import Profiler
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.keys import digest_of
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.lines import BatchLine
from jaxengine.server.batch.run import call
from jaxengine.server.http.app import create_app
from jaxengine.server.link.request_log import log_request
from tests.jaxengine.server.asgi_client import http_client

PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture
def operated(chat_engine, tmp_path, monkeypatch):
    """The engine as if started with profiler_config, and a server's options with a key for operators."""
    (tmp_path / "keys").write_text("root\n")
    profiler = ProfilerConfig(str(tmp_path / "profiles"))
    config = dataclasses.replace(chat_engine.inputs.config, profiler_config=profiler)
    monkeypatch.setattr(chat_engine.inputs, "config", config)
    monkeypatch.setattr(chat_engine.core, "_profiler", Profiler(profiler.profiler_dir))
    return ServerConfig(api_key=("client",), enable_admin=True, admin_key_file=str(tmp_path / "keys"))


async def test_operators_take_profiles(chat_engine, operated, tmp_path):
    async with http_client(create_app(chat_engine, operated), "client") as client:
        assert (await client.post("/start_profile")).status_code in (401, 403)
    async with http_client(create_app(chat_engine, operated), "root") as client:
        assert (await client.post("/stop_profile")).status_code == 400  # there is none
        refused = await client.post("/start_profile", json={"max_iterations": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_iterations")
        assert (await client.post("/start_profile")).json() == {"success": True}
        assert (await client.post("/start_profile")).status_code == 400  # one at a time
        assert [each async for each in chat_engine.generate(PROMPT, GREEDY)]
        assert (await client.post("/stop_profile")).json() == {"success": True}
        assert list((tmp_path / "profiles").rglob("*.xplane.pb"))


async def test_without_the_option_there_are_no_profiles(chat_engine, tmp_path):
    (tmp_path / "keys").write_text("root\n")
    config = ServerConfig(enable_admin=True, admin_key_file=str(tmp_path / "keys"))
    async with http_client(create_app(chat_engine, config), "root") as client:
        assert (await client.post("/start_profile")).status_code == 404
    with pytest.raises(RequestError, match="profiling is not enabled"):
        await chat_engine.start_profile()


async def test_a_stream_interval_sends_tokens_together(chat_engine, monkeypatch):
    async def pieces():
        params = GREEDY.clone_with(output_kind=RequestOutputKind.DELTA)
        return [output.outputs[0] async for output in chat_engine.generate(PROMPT, params)]

    each_token = await pieces()
    monkeypatch.setattr(chat_engine.core._processor, "_stream_interval", 5)
    together = await pieces()
    assert "".join(piece.text for piece in together) == "".join(piece.text for piece in each_token)
    assert sum((piece.token_ids for piece in together), []) == sum((piece.token_ids for piece in each_token), [])
    # After the first token and every five more; a reader that comes late gets several of these at once.
    *before, last = itertools.accumulate(len(piece.token_ids) for piece in together)
    assert all(count % 5 == 1 for count in before) and last == 24
    assert len(together) <= 1 + math.ceil((last - 1) / 5) and together[-1].finish_reason == "length"


def test_a_request_is_logged_without_its_prompt_unless_asked(chat_engine, caplog):
    params = SamplingParams(stop=["x" * 5000], max_tokens=7)
    prepared = chat_engine.inputs.prepare("secret words", params, request_id="r1", options=RequestOptions())
    lines = []
    with caplog.at_level(logging.INFO, "jaxengine"):
        for length in (None, 0, 4):
            caplog.clear()
            log_request(prepared, RequestOptions(lora="mine"), length)
            lines.append(caplog.messages[0])
    assert all(line.startswith("request r1: ") and "'mine'" in line and len(line) < 1500 for line in lines)
    assert all("secr" not in line and "prompt_token_ids" not in line for line in lines[:2])
    assert "prompt 'secr...'" in lines[2] and "secret" not in lines[2]


class Numbered:
    """ASGI middleware that numbers answers; also those that have no key."""

    def __init__(self, app):
        self.app, self.count = app, 0

    async def __call__(self, scope, receive, send):
        async def numbered(message):
            if message["type"] == "http.response.start":
                self.count += 1
                message["headers"] = [*message["headers"], (b"x-number", str(self.count).encode())]
            await send(message)

        await self.app(scope, receive, numbered)


async def closed(request, call_next):
    """Middleware as a function: one path is closed, the others pass."""
    return Response(status_code=418) if request.url.path == "/closed" else await call_next(request)


async def test_middleware_of_the_operators_own(chat_engine):
    """vLLM's --middleware; the last one given is the outermost."""
    names = tuple(f"{__name__}.{each.__name__}" for each in (closed, Numbered))
    config = ServerConfig(api_key=("k",), middleware=names)
    async with http_client(create_app(chat_engine, config)) as client:
        answers = [await client.get(path) for path in ("/health", "/closed", "/v1/models")]
    assert [(each.status_code, each.headers["x-number"]) for each in answers] == [(200, "1"), (418, "2"), (401, "3")]
    # A line of a batch has no client's headers: it is passed around them, with its owner's key.
    line = BatchLine(1, "a", "/closed", b"{}")
    assert (await call(create_app(chat_engine, config), line, {"holder": digest_of(b"k")}))[0] == 404
    assert "is not JSON" in (await call(create_app(chat_engine, config), line))[1]["error"]["message"]
    for name in ("Numbered", "..Numbered", "no_such_module.X", f"{__name__}.gone", f"{__name__}.PROMPT"):
        with pytest.raises(ConfigError, match="middleware") as caught:
            create_app(chat_engine, ServerConfig(middleware=(name,)))
        assert name in str(caught.value)

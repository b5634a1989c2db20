"""X-Session-ID and /v1/sessions: a session is its key's own."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from jaxengine.requests.params.options import session_key
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import Recorder, http_client

BODY = {"prompt": "The", "max_tokens": 1}


class Keeping(Recorder):
    """An engine that keeps sessions, by the names that it gets."""

    def __init__(self, engine, size: float | None):
        super().__init__(engine)
        self.inputs = copy.copy(engine.inputs)
        self.inputs.config = dataclasses.replace(engine.inputs.config, kv_offloading_size=size)
        self.kept: set[str] = set()

    async def stream(self, prompt, sampling_params=None, request_id=None, options=None):
        assert options is not None
        async for output in super().stream(prompt, sampling_params, request_id, options):
            if key := session_key(options.owner, options.session):
                self.kept.add(key)
            yield output

    async def utility(self, name, *arguments):
        if name != "drop_session":
            return await super().utility(name, *arguments)
        (session,) = arguments
        found = session in self.kept
        self.kept.discard(session)
        return found


@pytest.mark.parametrize("size", [1.0, None])
async def test_a_session_is_its_keys_own(chat_engine, size):
    engine = Keeping(chat_engine, size)
    app = create_app(engine, ServerConfig(api_key=("one", "two")))
    async with http_client(app, "one") as one, http_client(app, "two") as two:
        for client in (one, two):
            for fields, header in (
                (BODY, "talk"),
                ({**BODY, "session_id": "talk"}, "other"),
                ({**BODY, "vllm_xargs": {"session_id": "other"}}, "talk"),
                ({**BODY, "session_id": "", "vllm_xargs": {"session_id": "talk"}}, ""),
            ):
                answer = await client.post("/v1/completions", json=fields, headers={"X-Session-ID": header})
                assert answer.status_code == 200
        await one.post("/v1/completions", json=BODY)
        assert len(engine.kept) == 2  # of the same name
        bad = await one.post("/v1/completions", json=BODY, headers={"X-Session-ID": "a/b"})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "X-Session-Id"
        for given, name in (
            ({"session_id": "a/b"}, "session_id"),
            ({"vllm_xargs": {"session_id": "a/b"}}, "vllm_xargs.session_id"),
            ({"vllm_xargs": {"session_id": 0}}, "vllm_xargs.session_id"),
        ):
            bad = await one.post("/v1/completions", json={**BODY, **given})
            assert bad.status_code == 400 and bad.json()["error"]["param"] == name
            value = "0" if name.startswith("vllm") and given["vllm_xargs"]["session_id"] == 0 else "'a/b'"
            assert bad.json()["error"]["message"].startswith(f"{name} is {value}; allowed: 1 to 128")
        if size is None:
            assert (await one.delete("/v1/sessions/talk")).status_code == 404
            return
        answer = await one.delete("/v1/sessions/talk")
        assert (answer.status_code, answer.json()) == (200, {"id": "talk", "deleted": True})
        assert (await one.delete("/v1/sessions/talk")).status_code == 404
        assert len(engine.kept) == 1  # the other's
        assert (await one.delete("/v1/sessions/..%2Ftalk")).status_code == 404
        assert (await two.delete("/v1/sessions/talk")).status_code == 200 and not engine.kept
    async with http_client(app) as stranger:
        assert (await stranger.delete("/v1/sessions/talk")).status_code == 401

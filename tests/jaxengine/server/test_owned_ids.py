"""Request ids of one key: another key may use the same ones, and sees none of them; a key is one owner."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import httpx
import pytest

from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.adapters.owned_ids import OwnedEngine, Viewer, owned
from jaxengine.server.base.keys import bearer_key
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import http_client
from tests.tables import each_row


class Engine:
    """Runs a request until it is aborted, and refuses an id that runs."""

    inputs = SimpleNamespace()

    def __init__(self):
        self.running = {}

    async def stream(self, prompt, params, request_id, options):
        if request_id in self.running:
            raise RequestError(f"request_id {request_id!r} is in use", param="request_id", value=request_id)
        self.running[request_id] = asyncio.Event()
        try:
            yield SimpleNamespace(request_id=request_id, finished=False)
            await self.running[request_id].wait()
            yield SimpleNamespace(request_id=request_id, finished=True)
        finally:
            del self.running[request_id]

    pool = stream

    async def abort(self, request_id):
        if request_id in self.running:
            self.running[request_id].set()
            await asyncio.sleep(0.01)  # its reader may see the end meanwhile


async def test_owners_may_use_one_id():
    inner = Engine()
    engine = OwnedEngine(inner)
    assert owned(engine) is engine
    streams = {}
    for run in (engine.stream, engine.pool):
        for owner in ("a", "b", ""):
            streams[owner] = run("Hi", None, f"x-{run.__name__}", RequestOptions(owner=owner))
            assert (await anext(streams[owner])).request_id == f"x-{run.__name__}"
            with pytest.raises(RequestError, match=f"request_id '{'x-' + run.__name__}' is in use") as caught:
                await anext(run("Hi", None, f"x-{run.__name__}", RequestOptions(owner=owner)))
            assert caught.value.value == f"x-{run.__name__}"
        await engine.abort(f"x-{run.__name__}@a")
        assert (await anext(streams["a"])).finished
        await engine.abort(f"x-{run.__name__}")
        assert (await anext(streams["b"])).finished
        for stream in streams.values():
            await stream.aclose()
    assert not inner.running and not engine._running


async def test_an_abort_reaches_the_requests_of_all_owners():
    engine = OwnedEngine(Engine())
    streams = [engine.stream("Hi", None, "x", RequestOptions(owner=owner)) for owner in ("a", "b", "c", "")]
    for stream in streams:
        await anext(stream)
    ends = [asyncio.ensure_future(anext(stream)) for stream in streams]
    for end, stream in zip(ends, streams, strict=True):  # a request that has ended is no longer in the list
        end.add_done_callback(lambda _, stream=stream: asyncio.ensure_future(stream.aclose()))
    await engine.abort("x")
    assert [end.done() and end.result().finished for end in ends] == [True] * 4


def test_a_viewer_sees_its_own_ids():
    ids = ["x@a", "x@b", "0_y@b"]
    step = dict.fromkeys(("admitted", "preempted", "first_tokens", "finished"), ids) | {"chunks": [(ids[1], 3)]}
    timeline = {"now": 1, "steps": [step], "requests": [{"id": each, "age": 2} for each in ids]}
    for owner, names in (
        ("a", ["x", "other-1", "other-2"]),
        ("b", ["other-1", "x", "0_y"]),
        ("c", ["other-1", "other-2", "other-3"]),
        (None, ids),
    ):
        seen = Viewer(owner).timeline(timeline)
        assert [each["id"] for each in seen["requests"]] == names or owner == "c"
        (shown,) = seen["steps"]
        assert shown["admitted"] == shown["finished"] == names
        assert set(shown["preempted"]) == set(shown["first_tokens"]) == {each["id"] for each in seen["requests"]}
        assert shown["chunks"] == [(names[1], 3)]
        assert [each["id"] for each in Viewer(owner).status(timeline)["requests"]] == names


KEYS = {"api_key": ("one", "two"), "served_model_name": "tiny"}


async def test_a_key_sees_no_ids_of_another(chat_engine, tmp_path):
    (tmp_path / "admins").write_text("operator\n")
    app = create_app(chat_engine, ServerConfig(**KEYS, admin_key_file=str(tmp_path / "admins")))
    ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "ignore_eos": True, "request_id": "same"}
    clients = {key: http_client(app, key) for key in ("one", "two", "operator")}
    answers = await asyncio.gather(*[clients[key].post("/v1/chat/completions", json=ask) for key in ("one", "two")])
    assert [(each.status_code, each.json()["id"]) for each in answers] == [(200, "chatcmpl-same")] * 2
    await clients["two"].post("/v1/chat/completions", json={**ask, "request_id": "hers"})
    for key, count, others in (("one", 1, 0), ("two", 1, 1), ("operator", 2, 1)):
        trace = (await clients[key].get("/trace?seconds=60")).text
        names = [each["args"].get("name", "") for each in json.loads(trace)["traceEvents"] if each["ph"] == "M"]
        assert len([name for name in names if "chatcmpl-same" in name]) == count, key
        assert trace.count("chatcmpl-hers") == others
    for client in clients.values():
        await client.aclose()


SPELLINGS = [
    [("Authorization", "Bearer one")],
    [("authorization", "bearer   one ")],
    [("AUTHORIZATION", "BEARER\tone")],
    [("Authorization", "Bearer one"), ("Authorization", "bearer one")],
    [("X-Api-Key", "one")],
    [("X-Api-Key", " one"), ("x-api-key", "one ")],
    [("Authorization", "Bearer one"), ("X-Api-Key", "another")],
]


async def test_a_key_is_one_owner_however_it_is_spelled(chat_engine):
    for options in (KEYS, {"served_model_name": "tiny"}):
        app = create_app(chat_engine, ServerConfig(**options))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            ask = {"input": "Hi", "max_output_tokens": 1}
            made = (await client.post("/v1/responses", json=ask, headers=SPELLINGS[0])).json()
            for headers in SPELLINGS:
                found = await client.get(f"/v1/responses/{made['id']}", headers=headers)
                assert found.status_code == 200, headers
            for headers in ([("Authorization", "Bearer two")], [("Authorization", "Bearer One")]):
                found = await client.get(f"/v1/responses/{made['id']}", headers=headers)
                assert found.status_code in (401, 404), headers


@each_row(
    ("values", "key"),
    [
        ([], b""),
        ([b"Bearer a"], b"a"),
        ([b"bEaReR \t a b "], b"a b"),
        ([b"Bearer a", b"bearer a"], b"a"),
        ([b"Bearer a", b"Bearer b"], b""),
        ([b"Bearer a", b"Basic b"], b""),
        ([b"Basic a"], b""),
        ([b"Bearer"], b""),
    ],
)
def test_a_key_is_read(values, key):
    assert bearer_key(values) == key

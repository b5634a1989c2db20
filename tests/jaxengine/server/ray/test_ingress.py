"""Requests between an ingress and replicas, in one process: what they say, and what happens when replicas are lost."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="pip install 'jaxengine[ray]'")

from jaxengine.api.engine_client import EngineDeadError, EngineWrapper  # noqa: E402
from jaxengine.checkpoint import model_source  # noqa: E402
from jaxengine.config.base.errors import ConfigError  # noqa: E402
from jaxengine.server.base.keys import NO_KEY  # noqa: E402
from jaxengine.server.base.options import MIB, ServerConfig  # noqa: E402
from jaxengine.server.base.routing import Replicas, prompt_digests  # noqa: E402
from jaxengine.server.http.app import create_app  # noqa: E402
from jaxengine.server.link.open_inputs import packed_source  # noqa: E402
from jaxengine.server.ray import ingress, messages, request_router  # noqa: E402
from jaxengine.server.ray.ingress import Front  # noqa: E402
from jaxengine.server.ray.messages import Hint  # noqa: E402
from jaxengine.server.ray.prompts import PromptReader  # noqa: E402
from jaxengine.server.ray.replica import Node, Responder  # noqa: E402
from jaxengine.server.ray_serve import app  # noqa: E402
from jaxengine.server.stored.records import StoreBounds  # noqa: E402
from jaxengine.server.stored.store import ResponseStore  # noqa: E402
from tests.jaxengine.server.asgi_client import Connection, http_client  # noqa: E402
from tests.jaxengine.server.scripted_engine import ScriptedEngine  # noqa: E402
from tests.tables import each_row  # noqa: E402

TEXT = "A dog."
BODY = {"prompt": "What is it?", "max_tokens": 8}


class Handle:
    """Ray Serve's handle of replicas that are objects in this process.

    Attributes:
      hints: of the calls so far.
      faults: for each of the next calls, how many pieces come before which error.
    """

    def __init__(self, responder):
        self._responder = responder
        self.hints, self.faults = [], []
        self.num_cancelled = 0

    def options(self, **_):
        return self

    @property
    def respond(self):
        return self

    def remote(self, hint, call, parts):
        self.hints.append(hint)
        fault = self.faults.pop(0) if self.faults else (1 << 30, None)
        return Stream(self, self._responder.respond(copy.copy(hint), call, parts), *fault)


class Stream:
    def __init__(self, handle, pieces, most, error):
        self._handle, self._pieces, self._most, self._error = handle, pieces, most, error

    def cancel(self):
        self._handle.num_cancelled += 1

    async def __aiter__(self):
        number = 0
        try:
            while number < self._most and (piece := await anext(self._pieces, None)) is not None:
                number += 1
                yield piece
        except EngineDeadError as error:
            raise ray.exceptions.RayTaskError("", "", error, pid=1, ip="").as_instanceof_cause() from None
        finally:
            await self._pieces.aclose()
        if self._error is not None:
            raise self._error


class Failing(EngineWrapper):
    """An engine that fails at the first request."""

    errored = False

    async def stream(self, *_, **__):
        self.errored = True
        raise EngineDeadError("the engine has failed")
        yield


@pytest.fixture
def make_front(chat_engine):
    def make(*, engine=None, reads=False, num_attempts=3, **options):
        server = ServerConfig(served_model_name=("tiny",), **options)
        engine = ScriptedEngine(chat_engine, TEXT) if engine is None else engine
        apart = dataclasses.replace(server, allowed_origins=())
        handle = Handle(Responder(engine, create_app(engine, apart)))
        inputs = copy.copy(chat_engine.inputs)
        inputs.config = dataclasses.replace(inputs.config, enable_lora=True)
        reader = PromptReader(inputs, server) if reads else None
        front = Front(handle, ("tiny",), server, num_attempts, reader)
        return http_client(front.app), handle, front

    return make


LOST = ray.exceptions.ActorDiedError()


async def test_answers_pass_as_they_are(make_front):
    client, handle, front = make_front()
    answer = await client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == TEXT
    assert answer.headers.get_list("x-request-id") == ["mine"]
    stream = await client.post("/v1/completions", json={**BODY, "stream": True, "nonsense": 1})
    assert stream.text.endswith("data: [DONE]\n\n") and stream.text.count("data: ") > 2
    assert stream.headers["x-unknown-fields"] == "nonsense" and len(stream.headers.get_list("x-request-id")) == 1
    for method, path, status in (("GET", "/v1/models", 200), ("GET", "/nothing", 404), ("PUT", "/v1/models", 405)):
        assert (await client.request(method, path)).status_code == status
    assert (await client.post("/v1/completions", content=b"{")).status_code == 415
    assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 400
    large = await client.post("/v1/completions", content=b" " * (33 * MIB))
    assert large.status_code == 413 and len(handle.hints) == 7  # no replica has seen it
    said = []
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    await front.app({"type": "lifespan"}, _from(messages), _into(said))
    assert [each["type"] for each in said] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def _from(messages):
    async def receive():
        return messages.pop(0)

    return receive


def _into(said):
    async def send(message):
        said.append(message)

    return send


async def test_browsers_may_read_errors_of_an_ingress(make_front):
    client, handle, _ = make_front(allowed_origins=("https://a.example",))
    headers = {"Origin": "https://a.example"}
    asked = await client.options("/v1/completions", headers={**headers, "Access-Control-Request-Method": "POST"})
    assert asked.status_code == 200 and not handle.hints
    handle.faults = [(0, LOST)] * 3
    for status in (503, 200):
        found = await client.post("/v1/completions", json=BODY, headers=headers)
        assert found.status_code == status
        assert found.headers.get_list("access-control-allow-origin") == ["https://a.example"]
    other = await client.post("/v1/completions", json=BODY, headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


class Slow(ScriptedEngine):
    """An engine whose tokens come one by one."""

    async def stream(self, *arguments, **options):
        async for output in super().stream(*arguments, **options):
            yield output
            await asyncio.sleep(0.01)


async def test_a_lost_replica_costs_what_had_begun(make_front, chat_engine):
    client, handle, _ = make_front(engine=Slow(chat_engine, TEXT))
    handle.faults = [(0, LOST), (0, ray.exceptions.RayTaskError("", "", EngineDeadError("x"), pid=1, ip=""))]
    assert (await client.post("/v1/completions", json=BODY)).status_code == 200 and len(handle.hints) == 3
    handle.faults = [(0, LOST)] * 3
    gone = await client.post("/v1/completions", json=BODY)
    assert gone.status_code == 503 and len(handle.hints) == 6 and gone.headers["retry-after"]
    handle.faults = [(1, LOST)]  # after all of the response
    assert (await client.post("/v1/completions", json=BODY)).json()["choices"][0]["text"] == TEXT
    handle.faults = [(1, LOST)]
    broken = await client.post("/v1/completions", json={**BODY, "stream": True})
    *_, error, end = broken.text.split("\n\n")
    assert broken.status_code == 200 and "the engine cannot answer" in error and not end and len(handle.hints) == 8
    # A fault of ours is not tried again, and neither is what would be created twice.
    handle.faults = [(0, ray.exceptions.RayTaskError("", "", ValueError("x"), pid=1, ip=""))]
    assert (await client.post("/v1/completions", json=BODY)).status_code == 500 and len(handle.hints) == 9
    handle.faults = [(0, LOST)]
    assert (await client.post("/v1/batches", json={})).status_code == 503 and len(handle.hints) == 10
    handle.faults = [(0, ray.serve.exceptions.ReplicaUnavailableError("r"))]
    assert (await client.post("/v1/completions", json=BODY)).status_code == 200 and len(handle.hints) == 12
    handle.faults = [(0, ray.serve.exceptions.BackPressureError(1, 1))]
    full = await client.post("/v1/completions", json=BODY)
    assert full.status_code == 429 and full.headers["retry-after"] == "1"


async def test_an_engine_that_fails_is_a_lost_replica(make_front, chat_engine):
    engine = Failing(chat_engine)
    client, handle, _ = make_front(engine=engine)
    assert (await client.post("/v1/completions", json=BODY)).status_code == 503 and len(handle.hints) == 3


async def test_a_client_that_leaves_ends_its_request(make_front):
    stopped = asyncio.Event()

    class Endless(ScriptedEngine):
        async def stream(self, *arguments, **options):
            try:
                await asyncio.Event().wait()
                yield
            finally:
                stopped.set()

    _, handle, front = make_front()
    handle._responder = Responder(
        engine := Endless(handle._responder._engine._engine, TEXT), create_app(engine, ServerConfig())
    )
    connection = Connection.of_json(front.app, "/v1/completions", **BODY)
    while not handle.hints:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await connection.leave()
    assert handle.num_cancelled == 1
    async with asyncio.timeout(60):
        await stopped.wait()
        while handle._responder._running:
            await asyncio.sleep(0.01)


class WaitingStore(ResponseStore):
    """A store in another process, whose replies take time."""

    def __init__(self):
        super().__init__(StoreBounds(**ServerConfig().store_bounds()))
        self.begun, self.replies = asyncio.Event(), asyncio.Event()

    async def put(self, *arguments):
        needs = await super().put(*arguments)
        self.begun.set()
        await self.replies.wait()
        return needs


async def test_a_client_that_leaves_leaves_no_response_without_work(make_front):
    """Nobody would end it: it would count as running for as long as the store runs."""
    _, handle, front = make_front()
    store, engine = WaitingStore(), handle._responder._engine
    handle._responder = Responder(engine, create_app(engine, ServerConfig(), store))
    async with asyncio.timeout(60):
        connection = Connection.of_json(front.app, "/v1/responses", input="Hi", background=True)
        await store.begun.wait()
        await connection.leave()
        assert store._workers
        store.replies.set()
        while store._workers:
            await asyncio.sleep(0.01)


async def test_those_without_a_key_are_refused_before_their_body_is_read(make_front):
    client, handle, _ = make_front(api_key=("secret",), reads=True)

    async def endless():
        yield b"x"
        raise AssertionError("the body is read")

    refused = await client.post("/v1/files", content=endless(), headers={"Content-Type": "multipart/form-data"})
    assert refused.status_code == 401 and len(handle.hints) == 1
    known = await client.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer secret"})
    assert known.status_code == 200 and handle.hints[-1].token_ids
    assert (await client.get("/health")).status_code == 200


async def test_uploads_are_counted_before_ray_stores_them(make_front):
    client, handle, front = make_front()
    form = {"file": ("x.jsonl", b"{}")}
    with contextlib.ExitStack() as others:
        for _ in range(8):
            others.enter_context(front._uploads.one_of(NO_KEY.hex()))
        full = await client.post("/v1/files", files=form)
        assert full.status_code == 429 and "allowed: 32 and 8" in full.text and not handle.hints
    assert (await client.post("/v1/files", files=form)).status_code == 404 and len(handle.hints) == 1


PROMPTS = {
    "/v1/completions": {"prompt": "What is it?", "cache_salt": "s"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is it?"}], "stream": True},
    "/v1/responses": {"input": "What is it?"},
    "/v1/messages": {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/skyrl/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}


async def test_prompts_are_read_as_replicas_read_them(make_front, chat_engine):
    client, handle, _ = make_front(reads=True, lora_routes='{"ab": [["a", 1]], "cd": [["c", 1], ["d", 1]]}')
    recorded = handle._responder._engine
    for path, body in PROMPTS.items():
        headers = {"X-Session-ID": "s1", "X-Request-Id": "mine"}
        assert (await client.post(path, json=body, headers=headers)).status_code == 200, path
        hint, prompt = handle.hints[-1], recorded.calls[-1][0]
        assert list(hint.token_ids) == chat_engine.inputs.read_prompt(prompt)[1], path
        assert (hint.cache_salt, hint.adapter, hint.key) == (body.get("cache_salt"), None, "mine")
        assert hint.session == f"{hint.session.partition('/')[0]}/s1"
    count = len(recorded.calls)
    for model, adapter in (("tiny", None), ("", None), ("ab", "a"), ("b", "b")):
        await client.post("/v1/completions", json={**BODY, "model": model})
        assert handle.hints[-1].adapter == adapter and bool(handle.hints[-1].token_ids)
    for _ in range(6):  # without a session the request's id decides, which the ingress has made
        await client.post("/v1/completions", json={**BODY, "model": "cd"})
        assert handle.hints[-1].adapter in ("c", "d") and bool(handle.hints[-1].token_ids)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    for path, body in (
        ("/v1/chat/completions", {"messages": image}),
        ("/v1/responses", {"input": "x", "background": True, "store": False}),
        ("/v1/completions", {"prompt": "x", "nonsense": 1, "temperature": "hot"}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/completions", [1]),
        ("/v1/completions", {"model": [1], "prompt": 3}),
    ):
        num_asked, answer = len(handle.hints), await client.post(path, json=body)
        assert len(handle.hints) == num_asked + 1 and answer.status_code < 500, path
        assert not handle.hints[-1].token_ids, path
    assert len(recorded.calls) == count + 2
    for headers in ([], [("X-Session-ID", "s1"), ("X-Session-ID", "s2")]):  # a replica takes the first, too
        await client.delete("/v1/sessions/s1" if not headers else "/v1/models", headers=headers)
        assert handle.hints[-1].session == hint.session


@pytest.mark.parametrize("is_here", [True, False])
def test_an_ingress_opens_the_model_only_if_a_replica_is_elsewhere(chat_engine, chat_options, monkeypatch, is_here):
    opened, source = [], chat_engine.core.source
    monkeypatch.setattr(model_source, "open_model", lambda config: opened.append(config) or source)
    described = packed_source(source if is_here else dataclasses.replace(source, path=source.path / "elsewhere"))
    inputs = ingress._inputs(described, chat_engine.inputs.config, chat_options)
    assert inputs.read_prompt("Hi there")[1] == chat_engine.inputs.read_prompt("Hi there")[1]
    assert [each.load_format for each in opened] == ([] if is_here else ["dummy"])


def test_pages_that_a_replica_may_have_are_forgotten():
    """Also of a replica that is alone, whose state nobody reads."""
    known = request_router._Known(index := Replicas(), "r")
    for number in range(40):
        known.sent(list(range(number, number + 8192)), 60.0)
    assert {8230} == index.known("r") & {0, 8230} and known._num_recent <= request_router._MOST_RECENT
    late = 1 << 40
    for digests in ([7, 8230, late], [8230, late], []):  # those that were sent stay
        known.read(stats_of(digests))
        assert {7, 8230, late} & index.known("r") == {8230, *digests}
    read = known._stats
    known.read(stats_of([]))  # Ray makes others of equal ones
    assert known._stats is read


def stats_of(digests=(), **changed):
    """Statistics as a replica publishes them."""
    raw = np.array(digests, ">u8").tobytes()
    return {"digests": raw, "adapters": {}, "weights": "", "page_size": 4, "draining": False, **changed}


@dataclasses.dataclass(frozen=True)
class ReplicaName:
    unique_id: str


def candidate(name, *digests, **changed):
    return SimpleNamespace(replica_id=ReplicaName(name), routing_stats=stats_of(digests, **changed))


async def test_rays_router_keeps_an_index():
    """Replicas publish, are busy, are sent prompts, go, drain and load adapters."""
    queues: dict[ReplicaName, int] = {}

    class Router(request_router.Router):
        replica_queue_len_cache = SimpleNamespace(get=queues.get)

        def __init__(self):
            self.initialize_state()

    router, prompt = Router(), list(range(40))

    async def chosen(replicas, **hint):
        pending = SimpleNamespace(args=[Hint("k", **hint)], routing_context=SimpleNamespace())
        (first,), rest = await router.choose_replicas(replicas, pending)
        assert len(rest) == len(replicas) - 1 and first not in rest
        router.on_request_routed(pending, first.replica_id, None)
        return first.replica_id.unique_id

    three = [candidate("a"), candidate("b", prompt_digests(prompt, 4)[-1]), candidate("c")]
    assert await chosen(three, token_ids=prompt) == "b"
    queues[ReplicaName("b")] = 99
    second = await chosen(three, token_ids=prompt)
    assert second != "b"
    two = [each for each in three if each.replica_id.unique_id != second]
    assert await chosen(two, token_ids=prompt) != "b" and len(router._index) == 2
    queues.clear()
    draining = [candidate(each, draining=each == "b") for each in "abc"]
    assert await chosen(draining, token_ids=prompt) not in ("b", second)  # that has come anew, and knows nothing
    loaded = [candidate(each, adapters={"x": "01"} if each == "c" else {}) for each in "abc"]
    assert await chosen(loaded, adapter="x") == "c"


async def test_a_response_that_is_not_read_makes_the_application_wait():
    count, is_over = 0, asyncio.Event()

    async def endless(scope, receive, send):
        nonlocal count
        await receive()
        leaving = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not leaving.done() and count < 10_000:
            count += 1
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        is_over.set()

    call = messages.HttpCall("GET", "/", b"/", b"", [])
    pieces = Responder(SimpleNamespace(errored=False), endless).respond(Hint(), messages.encode(call))
    async with asyncio.timeout(60):
        await anext(pieces)
        for least in (60, 120):
            while count < least:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert count < least + 80
            await anext(pieces)
        await pieces.aclose()
        await is_over.wait()


def test_a_body_is_not_built_before_its_limits_are_checked():
    assert ingress._decode_body(b'{"model": "m", "prompt": [[[]]], "background": true}').model == "m"
    with pytest.raises(ValueError, match="Expected `str | null`, got `array`"):
        ingress._decode_body(b'{"model": [[], []]}')


def test_a_hint_stays_where_it_is():
    sent = copy.copy(Hint("k", "s", "a", [1, 2, 3], "salt"))  # as pickle does it
    assert (sent.key, sent.session, sent.adapter, list(sent.token_ids)) == ("", None, None, [])


REFUSED = (
    ({"port": 1}, "port is 1; allowed: 8000 under Ray Serve"),
    ({"enable_log_requests": True}, "whose proxies log"),
    ({"stream_write_timeout": 5}, "stream_write_timeout is 5; allowed: 60.0 under Ray Serve"),
    ({"batch_priority": 5}, "batch_priority is 5, and scheduling_policy is 'fcfs'"),
    ({"structured_outputs_config": {"reasoning_parser": "qwen3"}}, "reasoning_parser is for engines without a server"),
    ({"api_key": "12345"}, "api_key has a key that is empty or no text"),
    ({"max_num_queued_tokens": 5}, "max_num_queued_tokens is 5"),
    ({"min_replicas": 3, "max_replicas": 2}, "min_replicas is 3; allowed: 1 to max_replicas, 2"),
    ({"num_ingresses": 0}, "num_ingresses"),
    ({"num_attempts": 1.5}, "num_attempts"),
    ({"routing_imbalance": -1}, "routing_imbalance"),
    ({"routing_digest_bytes": 8}, "routing_digest_bytes"),
    ({"routing_period": 0}, "routing_period"),
    ({"upscale_delay": -1}, "upscale_delay is -1; allowed: 0 to"),
    ({"downscale_delay": "soon"}, "downscale_delay"),
    ({"placement_strategy": "X"}, "placement_strategy"),
    ({"resources": {"TPU": -1}}, "resources"),
    ({"resources": 3}, "resources"),
    ({"profiler_config": {"profiler_dir": "x"}}, "profiler_config"),
    ({"lora_routes": {"a": [["b", 1]]}}, "lora_routes is given without enable_lora"),
    ({"lora_routes": {"a": [["b", 0]]}, "enable_lora": True}, "lora_routes"),
)


@each_row("options, problem", REFUSED)
def test_options_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        app({"model": "m", **options})


def test_orders_need_a_single_replica(tmp_path):
    """Each would reach one of several, whichever is chosen."""
    (tmp_path / "keys").write_text("root")
    admin = {"model": "m", "enable_admin": True, "admin_key_file": str(tmp_path / "keys")}
    with pytest.raises(ConfigError, match="enable_admin is True; allowed: False with max_replicas 2"):
        app(admin | {"max_replicas": 2})
    for allowed in (admin, admin | {"enable_admin": False, "max_replicas": 2, "max_num_queued_reqs": 9}):
        app(allowed)


def test_a_host_that_was_not_started_ends_without_an_error():
    Node.__new__(Node).__del__()

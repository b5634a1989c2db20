"""Who counts as a client of the fair policy, over HTTP and gRPC: who has a key, whatever else a request says."""

from __future__ import annotations

import asyncio
import logging

import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.base.keys import Keys, digest_of
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.link import messages, submit_messages
from tests.jaxengine.server.asgi_client import Answer, Recorder, http_client, idle
from tests.jaxengine.server.grpc.grpc_rig import connected, request
from tests.jaxengine.server.processes.test_processes import LONG, collect
from tests.jaxengine.server.processes.test_processes import connected as connected_to
from tests.jaxengine.server.processes.test_processes import idle as idle_again

KEYS = ("first-secret", "second-secret")
BODIES = {
    "/v1/completions": {"prompt": ["Hello", "you"], "max_tokens": 2, "user": "somebody"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "user": "somebody"},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2, "user": "somebody"},
}


@pytest.fixture(scope="module")
def fair_engine(chat_options):
    engine = AsyncLLM(**chat_options, scheduling_policy="fair")
    yield engine
    engine.shutdown()


@pytest.fixture
def admin_file(tmp_path):
    path = tmp_path / "admin"
    path.write_text("operators-secret\n")
    return str(path)


async def ask(app, key, path, **body):
    async with http_client(app, key) as client:
        answer = Answer(await client.post(path, json=body))
    assert answer.status == 200, answer.body
    return answer


def test_keys_are_told_apart_by_their_numbers():
    keys = Keys((*KEYS, KEYS[0]), ("operators-secret",))
    named = [keys.name_of(digest_of(key.encode())) for key in (*KEYS, "operators-secret", "other", "")]
    assert named == ["key-0", "key-1", "admin-key-0", None, None]


@pytest.mark.parametrize("path", list(BODIES))
async def test_every_route_says_whose_request_it_is(fair_engine, admin_file, path, caplog):
    recorder = Recorder(fair_engine)
    app = create_app(recorder, ServerConfig(api_key=KEYS, admin_key_file=admin_file))
    with caplog.at_level(logging.DEBUG):
        for key in (*KEYS, "operators-secret"):
            await ask(app, key, path, **BODIES[path])
    each = 2 if path == "/v1/completions" else 1
    assert recorder.clients == ["key-0"] * each + ["key-1"] * each + ["admin-key-0"] * each
    assert "secret" not in caplog.text


@pytest.mark.parametrize("path", list(BODIES))
async def test_all_are_one_client_without_keys_or_without_the_policy(fair_engine, chat_engine, path):
    for engine, keys in ((fair_engine, ()), (chat_engine, KEYS)):
        recorder = Recorder(engine)
        await ask(create_app(recorder, ServerConfig(api_key=keys)), KEYS[0], path, **BODIES[path])
        assert set(recorder.clients) == {None}


async def test_grpc_calls_belong_to_their_keys(fair_engine, chat_engine):
    for engine, expected in ((fair_engine, ["key-0", "key-1", "key-1"]), (chat_engine, [None] * 3)):
        recorder = Recorder(engine)
        async with connected(recorder, api_key=KEYS) as (_, stub):
            for key in KEYS:
                metadata = (("authorization", f"Bearer {key}"),)
                await stub.Generate(request(stopping={"max_new_tokens": 2}), metadata=metadata)
            async for _ in stub.GenerateStream(request(stopping={"max_new_tokens": 2}), metadata=metadata):
                continue
        assert recorder.clients == expected
    recorder = Recorder(fair_engine)
    async with connected(recorder) as (_, stub):
        await stub.Generate(request(stopping={"max_new_tokens": 2}))
    assert recorder.clients == [None]


@pytest.mark.parametrize("num_keys", [2, 1])
async def test_a_key_does_not_wait_behind_anothers_flood(fair_engine, num_keys):
    app = create_app(fair_engine, ServerConfig(api_key=KEYS))
    ended: list[str] = []

    async def follow(name, key):
        body = {"prompt": name, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        await ask(app, key, "/v1/completions", **body)
        ended.append(name)

    flood = [asyncio.create_task(follow(f"flood {index}", KEYS[0])) for index in range(50)]
    scheduler = fair_engine.core.engine.scheduler
    while scheduler.num_waiting < 30:
        await asyncio.sleep(0.001)
    await follow("other", KEYS[num_keys - 1])
    before_other = ended.index("other")
    await asyncio.gather(*flood)
    await idle(fair_engine)
    # With a key of its own it gets the next place that is free; of one client, it would be the last.
    assert (before_other <= 35) == (num_keys == 2), before_other


def test_an_api_process_tells_the_engine_whose_request_it_is(fair_engine):
    prepared = fair_engine.inputs.prepare(
        "Hello", SamplingParams(n=2, max_tokens=2), options=RequestOptions(client="key-1")
    )
    sent = messages.decode_to_engine(messages.encode(submit_messages.submit(1, prepared, None)))
    assert isinstance(sent, submit_messages.Submit)
    assert [each.client for each in submit_messages.requests_of(sent, 0, None)] == ["key-1", "key-1"]


def test_one_client_cannot_fill_the_line_under_the_fair_policy(make_server):
    async def run():
        server = make_server(fresh=True, grpc_port=None, max_num_queued_reqs=8, scheduling_policy="fair")
        # It knows nothing of the limit: the engine is asked.
        async with connected_to(server, max_num_queued_reqs=1000) as engine:
            running = [asyncio.create_task(collect(engine, LONG, client="many")) for _ in range(8)]
            while (await engine.utility("status"))["num_running"] < 8:
                await asyncio.sleep(0.002)
            waiting = [asyncio.create_task(collect(engine, LONG, client="many")) for _ in range(8)]
            other = asyncio.create_task(collect(engine, client="another"))
            results = await asyncio.gather(*waiting, return_exceptions=True)
            refused = [result for result in results if isinstance(result, OverloadedError)]
            assert 1 <= len(refused) <= 4 and "of this client are waiting" in str(refused[0])
            await asyncio.gather(other, *running)
            await idle_again(engine)

    asyncio.run(run())

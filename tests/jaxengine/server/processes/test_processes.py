"""The processes of a server: the same answers as in one process, and what happens when one of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import OverloadedError, RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.link.remote_engine import RemoteEngine
from tests.jaxengine.server.server_process import is_alive, start_server

PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = GREEDY.clone_with(max_tokens=200)
# Beside those of the server itself.
INDEX = 50


@contextlib.asynccontextmanager
async def connected(server, index=INDEX, **options):
    engine = await asyncio.wait_for(RemoteEngine.connect(server.engine_address, ServerConfig(**options), index), 30)
    try:
        yield engine
    finally:
        engine.close()


async def collect(engine, params=GREEDY, prompt=PROMPT, request_id=None, **options):
    return [output async for output in engine.stream(prompt, params, request_id, RequestOptions(**options))]


async def idle(engine):
    """Waits until the engine runs nothing and every page is back."""
    for _ in range(500):
        status = await engine.utility("status")
        if not status["num_running"] and not status["num_waiting"] and not status["kv_usage"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("pages were not given back")


async def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def everything(outputs):
    """What a caller of a cumulative stream, or of its end only, has at last, but for times."""
    last = {each.index: each for output in outputs for each in output.outputs}
    found = [
        (each.index, each.text, each.token_ids, each.finish_reason, each.stop_reason, scores(each.logprobs))
        for _, each in sorted(last.items())
    ]
    return found, scores(outputs[-1].prompt_logprobs)


def scores(positions):
    if positions is None:
        return None
    return [
        entry and {token: (pytest.approx(each.logprob, abs=1e-5), each.rank) for token, each in entry.items()}
        for entry in positions
    ]


def kinds_of_params(text):
    """Sampling parameters by name; text: what a greedy request gets."""
    final = RequestOutputKind.FINAL_ONLY
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True, output_kind=final)
    return {
        "greedy": GREEDY.clone_with(output_kind=final),
        "cumulative": GREEDY,
        "seeded": seeded,
        "n": seeded.clone_with(n=3, output_kind=RequestOutputKind.CUMULATIVE),
        "n at the end": seeded.clone_with(n=2, top_k=5, presence_penalty=1.0),
        "logprobs": seeded.clone_with(logprobs=4, prompt_logprobs=2),
        "stop string": GREEDY.clone_with(stop=[text[20:26]]),
        "stop string kept": GREEDY.clone_with(stop=[text[20:26], "nowhere"], include_stop_str_in_output=True),
        "stop string later": GREEDY.clone_with(stop=[text[:1]], min_tokens=12),
        "bias": GREEDY.clone_with(logit_bias={17: 50.0}, bad_words=["fox", "two words"], min_tokens=5),
        "allowed": seeded.clone_with(allowed_token_ids=[300, 400, 500], top_p=0.9),
    }


def test_answers_equal_those_of_one_process(server, chat_engine):
    async def run():
        async with connected(server) as engine:
            text = (await collect(chat_engine))[-1].outputs[0].text
            for name, params in kinds_of_params(text).items():
                here, there = await collect(chat_engine, params), await collect(engine, params)
                assert everything(there) == everything(here), name
                assert [output.finished for output in there] == [False] * (len(there) - 1) + [True], name
                assert there[-1].prompt == PROMPT and there[-1].prompt_token_ids == here[-1].prompt_token_ids
            deltas = await collect(engine, GREEDY.clone_with(output_kind=RequestOutputKind.DELTA))
            assert "".join(output.outputs[0].text for output in deltas) == text
            metrics = deltas[-1].metrics
            assert metrics.arrival_time <= metrics.queued_time <= metrics.first_scheduled_time
            assert metrics.first_scheduled_time <= metrics.first_token_time
            assert deltas[-1].num_cached_tokens is not None
            await idle(engine)

    asyncio.run(run())


def test_metrics_have_a_port_of_their_own(server):
    """For pickers, which have no key; nothing else is served there."""
    found = httpx.get(server.metrics_url, timeout=60)
    assert found.status_code == 200 and "vllm:num_requests_waiting{" in found.text
    base = server.metrics_url.removesuffix("/metrics")
    assert httpx.get(f"{base}/health", timeout=60).status_code == 200
    for path in ("/v1/models", "/", "/status.json", "/server_info", "/v1/completions"):
        answer = httpx.get(base + path, timeout=60)
        assert answer.status_code == 404, path


def test_many_streams_at_once_equal_one_alone(server):
    async def run():
        async with connected(server) as engine, connected(server, INDEX + 1) as other:
            alone = (await collect(engine))[-1].outputs[0].token_ids
            scored = GREEDY.clone_with(logprobs=1)
            crowd = [collect(each, params) for each in (engine, other) for params in (GREEDY, scored) for _ in range(6)]
            for outputs in await asyncio.gather(*crowd):
                assert outputs[-1].outputs[0].token_ids == alone
                if (found := outputs[-1].outputs[0].logprobs) is not None:
                    assert [next(iter(entry)) for entry in found] == alone

    asyncio.run(run())


def test_seeds_of_several_processes_differ_and_those_of_one_do_not(server, chat_engine):
    async def run():
        async with connected(server) as engine:
            inputs = engine.inputs
            own = [inputs.prepare(PROMPT, GREEDY).requests[0].seed for _ in range(2)]
            local = chat_engine.inputs
            again = type(local)(local.config, local.model_config, local.tokenizer, {}, origin=INDEX)
            start = inputs._num_requests - 2
            again._num_requests = start
            assert [again.prepare(PROMPT, GREEDY).requests[0].seed for _ in range(2)] == own
            alone = type(local)(local.config, local.model_config, local.tokenizer, {})
            alone._num_requests = start
            assert alone.prepare(PROMPT, GREEDY).requests[0].seed not in own

    asyncio.run(run())


def test_leaving_and_aborting_free_pages(server):
    async def run():
        async with connected(server) as engine:
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            await stream.aclose()
            await idle(engine)
            stream = engine.stream(PROMPT, LONG.clone_with(n=2, temperature=1.0), "mine")
            await anext(stream)
            with pytest.raises(RequestError, match="in use"):
                await collect(engine, request_id="mine")
            await engine.abort("mine")
            outputs = [output async for output in stream]
            assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
            await engine.abort("nobody")
            # Nothing is reported before the end of such a request, and what it had by then is.
            final = LONG.clone_with(output_kind=RequestOutputKind.FINAL_ONLY)
            waiting = asyncio.create_task(collect(engine, final, request_id="final"))
            while (await engine.utility("status"))["num_running"] == 0:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)
            await engine.abort("final")
            (output,) = await waiting
            assert output.outputs[0].finish_reason == "abort" and output.outputs[0].token_ids
            task = asyncio.create_task(collect(engine, LONG))
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            timed_out = await collect(engine, LONG, timeout=1e-6)
            assert (timed_out[-1].outputs[0].finish_reason, timed_out[-1].outputs[0].stop_reason) == (
                "abort",
                "timeout",
            )
            await idle(engine)
        async with connected(server, request_timeout=0.001) as engine:
            (late,) = (await collect(engine, LONG))[-1].outputs
            assert (late.finish_reason, late.stop_reason) == ("abort", "timeout")
        # An API process that is gone leaves nothing running.
        async with connected(server) as engine:
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
        async with connected(server) as engine:
            await idle(engine)

    asyncio.run(run())


def test_refusals_and_calls(server):
    async def run():
        async with connected(server) as engine:
            with pytest.raises(RequestError, match="prompt_token_ids"):
                await collect(engine, prompt={"prompt_token_ids": [-1]})
            with pytest.raises(RequestError, match="too long: 6[0-9]{3} tokens"):
                await collect(engine, prompt="word of " * 3000)
            with pytest.raises(RequestError, match="nothing"):
                await engine.utility("nothing")
            assert await engine.utility("reset_prefix_cache") is True
            with pytest.raises(RuntimeError, match="trace failed"):
                await engine.utility("trace", "not a number")
            # What only the engine knows is refused there.
            async with connected(server, INDEX + 1) as other:
                stream = engine.stream(PROMPT, LONG, "shared")
                await anext(stream)
                with pytest.raises(RequestError, match="'shared' is in use"):
                    await collect(other, request_id="shared")
                await stream.aclose()
            await engine.check_health()
            await idle(engine)

    asyncio.run(run())


def test_a_killed_engine_ends_streams_and_is_started_again(make_server):
    async def run():
        server = make_server(fresh=True, api_server_count=2, grpc_port=None)
        async with connected(server) as engine, httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            assert (await client.get("/health")).status_code == 200
            before = (await collect(engine))[-1].outputs[0].token_ids
            streams = [engine.stream(PROMPT, LONG) for _ in range(3)]
            for stream in streams:
                await anext(stream)
            call = asyncio.create_task(engine.utility("status"))
            old = server.engine_pid
            os.kill(old, signal.SIGKILL)
            killed = time.monotonic()
            for stream in streams:
                with pytest.raises(EngineDeadError):
                    async for _ in stream:
                        assert time.monotonic() < killed + 60
            assert time.monotonic() < killed + 60 and engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            with pytest.raises(EngineDeadError):
                await collect(engine)
            with contextlib.suppress(EngineDeadError):  # it may have been answered just before
                await call
            while (await client.get("/health")).status_code != 503:
                assert time.monotonic() < killed + 60  # the test's own streams were looked at first
            await until(lambda: not engine.errored, 60)
            assert (await collect(engine))[-1].outputs[0].token_ids == before
            await idle(engine)
            assert server.engine_pid != old and not is_alive(old)
            while (await client.get("/health")).status_code != 200:
                assert time.monotonic() < killed + 60
            # An API process that is killed has a successor too, and disturbs nobody.
            victim = server.api_pids[0]
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            os.kill(victim, signal.SIGKILL)
            rest = [output async for output in stream]
            assert len(rest[-1].outputs[0].token_ids) == 200
            await until(lambda: len(server.api_pids) == 2 and victim not in server.api_pids)
            assert (await client.get("/health")).status_code == 200
            # However often: while the engine is well, nobody who can end API processes can end the server.
            for _ in range(4):
                victim = server.api_pids[-1]
                os.kill(victim, signal.SIGKILL)
                await until(lambda gone=victim: len(server.api_pids) == 2 and gone not in server.api_pids, 60)
            assert "giving up" not in server.errors() and "it is started again in " in server.errors()
            assert len((await collect(engine))[-1].outputs[0].token_ids) == 24
        children = [server.engine_pid, *server.api_pids]
        server.process.kill()
        await until(lambda: not any(map(is_alive, children)), 60)
        await until(lambda: not list(server.run_dir_parent.glob("jaxengine-*")), 60)

    asyncio.run(run())


def test_a_server_that_ends_lets_requests_finish(make_server):
    """Nothing that it logs of its end looks like a failure."""

    async def run():
        # Longer than processes take to end on a busy machine: one that is killed then is an error in the log.
        options = {"shutdown_timeout": 60.0, "enable_log_requests": True, "max_log_len": 5}
        server = make_server(fresh=True, grpc_port=None, api_server_count=2, **options)
        for pid in (server.engine_pid, *server.api_pids, *server.store_pids):
            assert os.getpgid(pid) == pid  # Ctrl-C reaches the supervisor only
        # An API process of a text model needs no jax, which would be more than half of its memory.
        for pid in server.api_pids:
            assert "jaxlib" not in Path(f"/proc/{pid}/maps").read_text()
        body = {"model": (await models(server))[0], "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=server.base_url, timeout=30) as client:
            running = await running_at_once(6, server, client, body)
            server.process.send_signal(signal.SIGTERM)
            # One after another, for those that come before the signal is seen are answered, in their turn.
            late = []

            def turned_away():
                done = [each.result() for each in late if each.done() and not each.exception()]
                return any(each.status_code == 503 for each in done)

            while not turned_away() and len(late) < 80:
                late.append(asyncio.create_task(client.post("/v1/completions", json={**body, "max_tokens": 1})))
                await asyncio.sleep(0.01)
            await asyncio.gather(*late, return_exceptions=True)
            assert turned_away()
            for response in await asyncio.gather(*running):
                assert response.json()["choices"][0]["finish_reason"] == "length"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert not list(server.run_dir_parent.glob("jaxengine-*"))
        assert "prompt 'The q...'" in server.errors()
        assert "ERROR" not in server.errors() and "Traceback" not in server.errors()

    asyncio.run(run())


async def running_at_once(count, server, client, body) -> list[asyncio.Task[httpx.Response]]:
    """So many requests, all of which run; others follow those that have ended before the last one ran."""
    asked: list[asyncio.Task[httpx.Response]] = []
    async with connected(server) as engine:
        while (await engine.utility("status"))["num_running"] < count:
            missing = count - sum(not task.done() for task in asked)
            asked += [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(missing)]
            await asyncio.sleep(0.002)
    return [task for task in asked if not task.done()]


async def models(server):
    async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
        return [each["id"] for each in (await client.get("/v1/models")).json()["data"]]


async def overloaded(engine) -> OverloadedError:
    """The refusal of a request, at the latest when no place was just becoming free."""
    for _ in range(20):
        try:
            await collect(engine, GREEDY.clone_with(max_tokens=1))
        except OverloadedError as error:
            return error
    raise AssertionError("nobody was refused")


async def refused(client, body) -> httpx.Response:
    """The same over HTTP."""
    for _ in range(20):
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 429:
            return response
    raise AssertionError(f"nobody was refused: {response.status_code}")


async def rejections(client) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:admission_rejections_total{")]
    return float(line.split()[-1])


def test_a_server_that_ends_at_once_aborts_requests(make_server):
    async def run():
        server = make_server(fresh=True, grpc_port=None, max_num_queued_reqs=4)
        name = (await models(server))[0]
        # Eight run, four wait, and the next is refused at once.
        async with connected(server, max_num_queued_reqs=4) as engine:
            over = False

            async def visitor():
                while not over:
                    try:
                        await collect(engine, LONG)
                    except OverloadedError:
                        await asyncio.sleep(0.002)

            tasks = [asyncio.create_task(visitor()) for _ in range(16)]
            while (await engine.utility("status"))["num_waiting"] < 4:
                await asyncio.sleep(0.002)
            error = await overloaded(engine)
            assert 1 <= error.retry_after <= 60
            # One that knows nothing of these asks the engine.
            async with connected(server, INDEX + 1, max_num_queued_reqs=1000) as other:
                await overloaded(other)
            async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
                response = await refused(client, {"model": name, "prompt": PROMPT})
                assert int(response.headers["retry-after"]) >= 1
                # Whoever refused: the metrics are one engine's.
                while await rejections(client) < 3:
                    await asyncio.sleep(0.02)
            over = True
            await asyncio.gather(*tasks)
            await idle(engine)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=30) as client:
            body = {"model": name, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
            running = await running_at_once(4, server, client, body)
            server.process.send_signal(signal.SIGHUP)  # the terminal is closed
            start = time.monotonic()
            for response in await asyncio.gather(*running):
                assert response.json()["choices"][0]["finish_reason"] == "abort"
            assert time.monotonic() < start + 60
        assert await asyncio.to_thread(server.process.wait, 10) == 0

    asyncio.run(run())


def test_a_server_that_cannot_start_says_why_and_leaves_nobody(chat_options, tmp_path):
    with pytest.raises(AssertionError) as error:
        start_server(chat_options, max_model_len=100_000)
    assert "ended with 2: jaxengine: error: max_model_len is 100000" in str(error.value)
    assert str(error.value).count("error") == 1
    with pytest.raises(AssertionError, match="ended with 2: jaxengine: error: api_key_file"):
        start_server(chat_options, api_key_file=str(tmp_path / "none"))

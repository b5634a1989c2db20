"""Ray Serve: two replicas behind one endpoint, one of which is killed while both work; an engine over two hosts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket

import httpx
import numpy as np
import pytest

from jaxengine import ConfigError, SamplingParams
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.outputs import SAMPLING_FIELDS, CompletionOutput, RequestOutput
from jaxengine.requests.sampling_params import RequestOutputKind
from jaxengine.scheduler.errors import RequestError

ray = pytest.importorskip("ray", reason="pip install 'jaxengine[ray]'")

NUM_REQUESTS = 100


@pytest.fixture(scope="module")
def url():
    """Of Ray Serve's HTTP proxy."""
    from ray import serve

    # On a busy machine a proxy takes long to start; Serve would end it and fail.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("READY", "HEALTH"):
            patch.setenv(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "120")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


async def ask(client, prompt):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


PARAMS = {
    "none": SamplingParams(),
    "lists": SamplingParams(temperature=0, stop=["a"], stop_token_ids=[3, 4], bad_words=["b"], allowed_token_ids=[5]),
    "draws": SamplingParams(n=3, seed=-5, top_p=0.5, logit_bias={7: 1.5}, output_kind=RequestOutputKind.DELTA),
    "a schema": SamplingParams(structured_outputs={"json": {"type": "object"}, "reasoning_end": ["a", ["b", "c"]]}),
    "activations": SamplingParams(
        steer=[{"at": "residual:1", "vector": [1, 2]}, {"vector": "calm"}], capture=["final_norm"]
    ),
    "a choice": SamplingParams(structured_outputs={"choice": ["a", "b"]}),
}


@pytest.mark.parametrize("name", PARAMS)
def test_parameters_cross_as_they_are(name):
    from jaxengine.server import ray_serve

    packed = ray_serve._pack_params(PARAMS[name])
    call = ray_serve._decode_call(ray_serve._encode(ray_serve.Call([1], packed)))
    assert ray_serve._unpack_params(call.params) == PARAMS[name]


def test_arrays_of_an_output_cross_as_they_are():
    from jaxengine.server import ray_serve

    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays = {
        "hidden_states": rows.astype("bfloat16").T,
        "captured": {"final_norm": rows[:, ::2], "empty": rows[:0]},
        **{name: rows[0] + index for index, name in enumerate(SAMPLING_FIELDS)},
    }
    sent = RequestOutput("a", None, [1], [CompletionOutput(0, "t", [1], **arrays)], finished=True)
    (got,) = ray_serve._decode_answer(ray_serve._encode(ray_serve.Answer(sent))).output.outputs
    pairs = [(getattr(got, name), each) for name, each in arrays.items() if name != "captured"]
    pairs += [(got.captured[name], each) for name, each in arrays["captured"].items()]
    for received, given in pairs:
        assert received.dtype == given.dtype and received.flags.writeable
        np.testing.assert_array_equal(received, given)
    call = ray_serve.Call([1], {"output_kind": RequestOutputKind.DELTA})
    (last,) = ray_serve._last_of_aborted(call, {0: got}).outputs
    assert [getattr(last, name) for name in arrays] == [None] * len(arrays)


def test_orders_need_a_single_replica(tmp_path):
    """Each would reach one of several, whichever Ray picks."""
    from jaxengine.server import ray_serve

    (tmp_path / "keys").write_text("root")
    admin = {"model": "m", "enable_admin": True, "admin_key_file": str(tmp_path / "keys")}
    with pytest.raises(ConfigError, match="enable_admin is True; allowed: False with max_replicas 2"):
        ray_serve.app(admin | {"max_replicas": 2})
    for allowed in (admin, admin | {"enable_admin": False, "max_replicas": 2}):
        ray_serve.app(allowed)


@pytest.mark.parametrize("finished", [True, False])
async def test_a_replica_lost_after_the_last_output_costs_nothing(finished):
    from jaxengine.server import ray_serve

    class Replicas:
        """Gives one output, and is lost before the stream ends."""

        generate = property(lambda self: self)

        def options(self, **_):
            return self

        async def remote(self, call):
            outputs = [CompletionOutput(0, "x", (5,), finish_reason="stop" if finished else None)]
            yield ray_serve._encode(ray_serve.Answer(RequestOutput("a", None, (1,), outputs, finished)))
            raise ray.exceptions.ActorDiedError

    engine = ray_serve.RayEngine(Replicas(), None, num_attempts=5)
    stream = engine._attempts("a", ray_serve.Call([1], {}, options=RequestOptions(arrival=0.0)))
    assert (await anext(stream)).finished == finished
    with pytest.raises(StopAsyncIteration if finished else EngineDeadError):
        await anext(stream)


async def test_what_a_replica_raises_is_raised_and_a_lost_one_is_told():
    from jaxengine.server import ray_serve

    class Replicas:
        """Raises on each call, of a utility and of a request."""

        generate = utility = property(lambda self: self)
        num_calls = 0

        def options(self, **_):
            return self

        def remote(self, *_):
            self.num_calls += 1
            return self

        def __await__(self):
            raise self.error
            yield

        async def __aiter__(self):
            raise self.error
            yield

    replicas = Replicas()
    engine = ray_serve.RayEngine(replicas, None, num_attempts=2)
    wrong = RequestError("no adapter is named x", param="name")
    call = ray_serve.Call([1], {}, options=RequestOptions(arrival=0.0))
    lost = ray.exceptions.ActorDiedError()
    for error, raised, num_attempts in [
        (ray.exceptions.RayTaskError("generate", "", wrong, pid=1, ip="").as_instanceof_cause(), RequestError, 1),
        (lost, EngineDeadError, 2),
    ]:
        replicas.error, replicas.num_calls = error, 0
        with pytest.raises(raised) as caught:
            await engine.utility("load_lora", "x")
        assert type(caught.value) is raised and replicas.num_calls == 1
        with pytest.raises(raised):
            await anext(engine._attempts("a", call))
        assert replicas.num_calls == 1 + num_attempts


@pytest.mark.parametrize("num_outputs", [0, 1])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_an_aborted_request_ends_and_is_not_sent_again(kind, num_outputs):
    from jaxengine.server import ray_serve

    class Replicas:
        """Gives an output of which one choice has ended, or none, and then waits to be cancelled."""

        num_calls = 0
        generate = property(lambda self: self)

        def options(self, **_):
            return self

        def remote(self, call):
            self.num_calls += 1
            self.cancelled = asyncio.Event()
            return self

        def cancel(self):
            self.cancelled.set()

        async def __aiter__(self):
            for _ in range(num_outputs):
                outputs = [CompletionOutput(0, "x", [5], finish_reason="stop"), CompletionOutput(1, "y", [6])]
                yield ray_serve._encode(ray_serve.Answer(RequestOutput("a", None, [1], outputs, False)))
            await self.cancelled.wait()
            raise ray.exceptions.TaskCancelledError

    replicas = Replicas()
    engine = ray_serve.RayEngine(replicas, None, num_attempts=5)
    call = ray_serve.Call([1], ray_serve._pack_params(SamplingParams(n=2, output_kind=kind)), None, None)
    stream = engine._attempts("a", call)
    for _ in range(num_outputs):
        await anext(stream)
    last = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await engine.abort("a")
    ended = await last
    assert ended.finished and replicas.num_calls == 1
    seen = [(each.index, each.text, each.token_ids, each.finish_reason) for each in ended.outputs]
    if not num_outputs:
        assert seen == [(0, "", [], "abort"), (1, "", [], "abort")]
    else:
        assert seen == [(1, *(("", []) if kind is RequestOutputKind.DELTA else ("y", [6])), "abort")]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.fixture(scope="module")
def two(url, chat_options):
    """Processes of two replicas."""
    from ray import serve

    from jaxengine.server.ray_serve import app

    serve.run(app({**chat_options, "min_replicas": "2", "max_replicas": 2, "target_ongoing_requests": 8}), name="two")
    handle = serve.get_deployment_handle("Replica", "two")
    pids: set[int] = set()
    while len(pids) < 2:
        pids.add(json.loads(handle.describe.remote().result(timeout_s=60))["pid"])
    return pids


@pytest.fixture(scope="module")
def tokens(url, two):
    """What an engine on one host answers."""
    return tokens_of(url)


def tokens_of(url) -> list[int]:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["token_ids"]


def test_a_killed_replica_costs_no_request_that_had_not_begun(url, two, tokens):
    prompts = [[number % 97 + 3, number % 89 + 5, 7] for number in range(NUM_REQUESTS)]

    async def ask_all(kill):
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            tasks = [asyncio.ensure_future(ask(client, prompt)) for prompt in prompts]
            if kill:
                while sum(task.done() for task in tasks) < NUM_REQUESTS // 10:
                    await asyncio.sleep(0.01)
                os.kill(min(two), signal.SIGKILL)
            return await asyncio.gather(*tasks)

    killed = asyncio.run(ask_all(kill=True))
    assert killed == asyncio.run(ask_all(kill=False))


@pytest.mark.thorough("tests/jaxengine/cluster has engines over two hosts, and the tests above replicas")
def test_an_engine_over_two_hosts_is_one_replica(url, chat_options, tokens):
    from ray import serve

    from jaxengine.server.ray_serve import app

    serve.delete("two")
    over_two = {"nnodes": 2, "master_port": free_port(), "tensor_parallel_size": 2, "placement_strategy": "PACK"}
    serve.run(app({**chat_options, **over_two}), name="over two")
    assert tokens_of(url) == tokens
    serve.delete("over two")

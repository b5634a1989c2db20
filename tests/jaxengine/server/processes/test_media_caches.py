"""Pictures of requests between an API process and the engine's: answers, bytes over the socket, and who keeps what."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from PIL import Image

from jaxengine.api.async_llm import AsyncLLM
from jaxengine.api.core import EngineCore
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.api.fair_lock import FairLock
from jaxengine.api.llm import LLM
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.inputs.encoder import KEY_REPLICATED, OFF, PROCESSOR, SHARED_MEMORY
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.link.remote_engine import RemoteEngine
from jaxengine.server.processes.engine_process import EngineServer
from tests.fixtures.picture_checkpoints import picture, whole_checkpoint
from tests.jaxengine.media.pictures import data_url, saved
from tests.jaxengine.server.server_process import start_server

OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "compilation_config": {"prefill_sizes": [], "cudagraph_capture_sizes": []},
    "disable_log_stats": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
LONG = GREEDY.clone_with(max_tokens=120, output_kind=RequestOutputKind.CUMULATIVE)
# What pictures of 40 x 48 pixels take: 120 patches, filled up to 256, of 96 numbers, with four columns and a row.
NUM_PATCHES = 256
PIXELS = NUM_PATCHES * (96 * 4 + 4 * 4 + 1)


@pytest.fixture(scope="module")
def options(tmp_path_factory, executables_dir):
    model = whole_checkpoint("qwen2_5_vl_vision", tmp_path_factory.mktemp("sees"))
    return {**OPTIONS, "model": str(model), "compile_cache_dir": executables_dir}


@pytest.fixture(scope="module")
def core(options):
    core = EngineCore(EngineConfig(**options))
    yield core
    core.shutdown()


class Process:
    """An API process, with what it sends counted at its socket."""

    def __init__(self, engine):
        self.engine, self.sent = engine, 0
        send = engine._link.send_encoded

        def count(message):
            self.sent += len(message)
            send(message)

        engine._link.send_encoded = count

    async def ask(self, *pictures, params=GREEDY, request_id=None):
        """The tokens of an answer."""
        outputs = [output async for output in self.engine.stream(prompt(*pictures), params, request_id)]
        return outputs[-1].outputs[0].token_ids

    async def sent_by(self, *pictures):
        before = self.sent
        await self.ask(*pictures)
        return self.sent - before

    async def metrics(self):
        found = await self.engine.utility("metrics")
        return {(each["name"], *each.get("labels", {}).values()): each.get("value") for each in found}


def prompt(*pictures):
    text = "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures) + "What?"
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


@contextlib.asynccontextmanager
async def serving(core, tmp_path, count=1, **changes):
    """RemoteEngines of so many API processes in front of an engine with changed options."""
    config, address = core.config, f"ipc://{tmp_path}/engine"
    core.config = replace(config, **changes)
    server_config = ServerConfig(api_server_count=count)
    server = EngineServer(core, address, server_config, lambda event: None)
    thread = threading.Thread(target=server.run)
    thread.start()
    engines = [await RemoteEngine.connect(address, server_config, index) for index in range(count)]
    try:
        yield server, *map(Process, engines)
    finally:
        for engine in engines:
            engine.close()
        server.order({"order": "stop"})
        await asyncio.to_thread(thread.join)
        server._context.destroy(linger=0)
        core.config = config
        core.utility("reset_mm_cache")
        core.utility("reset_prefix_cache")


@pytest.mark.parametrize(
    ("kind", "changes", "count"),
    [
        (KEY_REPLICATED, {}, 1),
        (SHARED_MEMORY, {"mm_processor_cache_type": "shm"}, 1),
        (PROCESSOR, {"mm_processor_cache_type": "shm"}, 2),
        (OFF, {"mm_processor_cache_gb": 0}, 1),
    ],
)
def test_what_is_sent_and_kept(core, tmp_path, kind, changes, count):
    async def run():
        async with serving(core, tmp_path, count, **changes) as (server, one, *_):
            await one.engine.utility("reset_prefix_cache")
            shown = picture(1, 40, 48)
            before = await one.metrics()
            first, again = await one.sent_by(shown), await one.sent_by(shown)
            answer = await one.ask(shown)
            # In shared memory pixels are never sent, and a replicated key once.
            assert (first > PIXELS) == (kind != SHARED_MEMORY)
            assert (again > PIXELS) == (kind in (PROCESSOR, OFF))
            assert again < 2000 or kind in (PROCESSOR, OFF)
            after = await one.metrics()
            counted = {name: after[name] - before[name] for name in after if name in before and after[name] is not None}
            assert counted["vllm:mm_cache_queries",] == (0 if kind == OFF else 3)
            assert counted["vllm:mm_cache_hits",] == (0 if kind == OFF else 2)
            whole = {KEY_REPLICATED: 1, SHARED_MEMORY: 0, PROCESSOR: 3, OFF: 3}[kind]
            assert counted["jaxengine:mm_ipc_bytes", "socket"] == PIXELS * whole
            assert counted["jaxengine:mm_ipc_bytes", "shared_memory"] == PIXELS * 3 * (kind == SHARED_MEMORY)
            # The prefix cache serves the others.
            assert counted["jaxengine:encoder_calls",] == counted["jaxengine:encoder_items",] == 1
            assert counted["jaxengine:encoder_patches",] == NUM_PATCHES
            assert after["jaxengine:encoder_cache_embeddings_kept",] >= 30
            told = await one.engine.utility("mm_cache")
            assert told["kind"] == kind and told["max_bytes"] == core.config.mm_processor_cache_bytes * count
            (receiver, *_) = [client.media for client in server._clients.values()]
            assert told["engine_bytes"] == receiver.num_bytes == PIXELS * (kind == KEY_REPLICATED)
            cache = one.engine.inputs.media.cache
            if kind == KEY_REPLICATED:
                assert cache.get(next(iter(receiver._kept._values))).patches.nbytes == 0
            elif kind != OFF:
                assert cache.num_bytes >= PIXELS
            # Nobody has it after it was given up, neither side believes so, and the answer stays the same.
            await one.engine.utility("reset_mm_cache")
            assert (await one.engine.utility("mm_cache"))["engine_bytes"] == 0
            assert cache is None or cache.num_bytes == 0
            assert core.engine.scheduler.extension("pictures").rows[0].num_kept == 0
            await one.engine.utility("reset_prefix_cache")
            assert await one.ask(shown) == answer
            assert (await one.metrics())["vllm:mm_cache_hits",] == after["vllm:mm_cache_hits",]

    asyncio.run(run())


def test_in_one_process(core):
    """LLM's cache of values, its figures, and what forgets it."""
    llm = object.__new__(LLM)
    llm._core, llm._lock, llm._calls = core, FairLock(), {}
    shown = picture(8, 40, 48)
    before = {metric.name: metric.value for metric in llm.get_metrics()}

    def ask():
        (output,) = llm.generate(prompt(shown), GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids

    answer = ask()
    assert ask() == answer and core.inputs.media.cache.num_bytes == PIXELS
    assert core.utility("mm_cache") == {
        "kind": PROCESSOR,
        "api_process": "keys and values",
        "engine": "nothing",
        "max_bytes": 4 << 30,
        "engine_bytes": PIXELS,
    }
    llm.reset_mm_cache()
    assert core.inputs.media.cache.num_bytes == core.engine.scheduler.extension("pictures").rows[0].num_kept == 0
    assert ask() == answer
    after = {metric.name: metric.value for metric in llm.get_metrics()}
    assert after["vllm:mm_cache_queries"] - before["vllm:mm_cache_queries"] == 3
    assert after["vllm:mm_cache_hits"] - before["vllm:mm_cache_hits"] == 1


def test_async_forgets_too():
    called = []

    async def utility(name):
        called.append(name)

    engine = object.__new__(AsyncLLM)
    engine.utility = utility
    asyncio.run(engine.reset_mm_cache())
    assert called == ["reset_mm_cache"]


def test_every_api_process_forgets(core, tmp_path):
    async def run():
        async with serving(core, tmp_path, 2) as (_, one, other):
            for each in (one, other):
                await each.ask(picture(2, 16, 16))
                assert each.engine.inputs.media.cache.num_bytes > 0
            await one.engine.utility("reset_mm_cache")
            for _ in range(500):
                if not other.engine.inputs.media.cache.num_bytes:
                    break
                await asyncio.sleep(0.01)
            assert one.engine.inputs.media.cache.num_bytes == other.engine.inputs.media.cache.num_bytes == 0

    asyncio.run(run())


def test_an_engine_without_the_picture_asks_for_it(core, tmp_path):
    """As after its caches were emptied by another process; also when the request was aborted meanwhile."""

    async def run():
        async with serving(core, tmp_path) as (server, one):
            shown, other = picture(3, 40, 48), picture(4, 40, 48)
            answer = await one.ask(shown, other)
            (receiver,) = [client.media for client in server._clients.values()]
            receiver.clear()
            before = one.sent
            assert await one.ask(shown, other) == answer
            assert one.sent - before > 2 * PIXELS
            assert await one.sent_by(shown) < 2000
            receiver.clear()
            answers = await asyncio.gather(*[one.ask(shown, other) for _ in range(6)])
            assert answers == [answer] * 6
            receiver.clear()
            stream = one.engine.stream(prompt(shown), LONG, "mine")
            waiting = asyncio.ensure_future(anext(stream))
            while "mine" not in one.engine._streams:
                await asyncio.sleep(0)
            await one.engine.abort("mine")
            outputs = [await waiting, *[output async for output in stream]]
            assert outputs[-1].outputs[0].finish_reason == "abort" and len(outputs[-1].outputs[0].token_ids) < 120
            # What cannot be told to the engine was not sent.
            ghost = one.engine.inputs.prepare(prompt(shown), GREEDY, request_id="ghost")
            ghost.requests[0].priority = 2**64
            await one.engine._send_queue.media.complete(ghost)
            with pytest.raises(OverflowError):
                one.engine._send_queue.message(ghost)
            assert await one.ask(shown, other) == answer
            # What is refused has come all the same, and counts.
            limits, server._limits = server._limits, replace(server._limits, num_slots=0, max_requests=0)
            fresh = picture(5, 40, 48)
            with pytest.raises(RequestError, match="n is 1"):
                await one.ask(fresh)
            server._limits = limits
            assert await one.sent_by(fresh) < 2000

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["lru", "shm"])
def test_a_new_connection_believes_nothing(core, tmp_path, kind):
    async def run():
        async with serving(core, tmp_path, mm_processor_cache_type=kind) as (_, one):
            shown = picture(6, 40, 48)
            answer = await one.ask(shown)
            stream = one.engine.stream(prompt(shown), LONG)
            await anext(stream)
            one.engine._link.reopen()
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            while one.engine.errored:
                await asyncio.sleep(0.01)
            assert one.engine._send_queue.media.num_bytes == 0
            assert await one.ask(shown) == answer
            assert await one.sent_by(shown) < 2000

    asyncio.run(run())


@pytest.mark.thorough("starts a server, and parts of it again, for each kind of cache")
@pytest.mark.parametrize("kind", ["lru", "shm"])
def test_killed_processes_leave_nothing_behind(options, kind):
    async def run():
        server = start_server(options, mm_processor_cache_type=kind)
        try:
            async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
                answer = await asked(client)
                assert await asked(client) == answer
                for kind_of_victim in ("engine", "api", "engine"):
                    victim = server.engine_pid if kind_of_victim == "engine" else server.api_pids[0]
                    running = asyncio.create_task(asked(client))
                    await asyncio.sleep(0.05)
                    os.kill(victim, signal.SIGKILL)
                    with contextlib.suppress(httpx.HTTPError, AssertionError):
                        await running
                    deadline = time.monotonic() + 60
                    while True:
                        with contextlib.suppress(httpx.HTTPError, AssertionError):
                            assert await asked(client) == answer
                            break
                        assert time.monotonic() < deadline
                        await asyncio.sleep(0.1)
                    assert await asked(client) == answer
                text = (await client.get("/metrics")).text
                assert 'jaxengine:mm_ipc_bytes_total{engine="0"' in text
            shared = [pid for pid in (server.engine_pid, *server.api_pids) if maps_pictures(pid)]
            assert len(shared) == (2 if kind == "shm" else 0)
            server.process.kill()
            deadline = time.monotonic() + 60
            while any(maps_pictures(pid) for pid in shared):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert not [name for name in os.listdir("/dev/shm") if "jaxengine" in name]
        finally:
            server.remove()

    asyncio.run(run())


def maps_pictures(pid):
    try:
        return "jaxengine-pictures" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


async def asked(client):
    url = data_url(saved(Image.fromarray(picture(7, 40, 48)), "PNG"))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]

"""An engine that stands still without having ended: it says at what, is killed, and has a successor."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.checkpoint.input_source import InputSource
from jaxengine.config.inputs.encoder import EncoderOptions
from jaxengine.engine.stats.timeline import StepRecord, Timeline
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.link import messages
from jaxengine.server.processes.child import Child
from jaxengine.server.processes.engine_process import EngineServer
from tests.jaxengine.server.processes.test_processes import LONG, PROMPT, collect, connected, until
from tests.jaxengine.server.server_process import is_alive
from tests.models.tiny import TINY


def test_an_engine_that_hangs_is_killed_and_started_again(make_server):
    async def run():
        server = make_server(fresh=True, grpc_port=None, engine_hang_timeout=4.0, api_hang_timeout=5.0)
        async with connected(server) as engine, httpx.AsyncClient(base_url=server.base_url, timeout=10) as client:
            old = server.engine_pid
            # To have nothing to do is not to hang.
            await asyncio.sleep(7)
            assert server.engine_pid == old and "not finished" not in server.errors()
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            os.kill(old, signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(EngineDeadError):
                async for _ in stream:
                    pass
            assert 4 < time.monotonic() - stopped < 60
            while (await client.get("/health")).status_code != 503:
                assert time.monotonic() < stopped + 60
            await until(lambda: not engine.errored, 60)
            assert len((await collect(engine, LONG))[-1].outputs[0].token_ids) == 200
            assert server.engine_pid != old and not is_alive(old)
            # Nor does one that speaks with clients stand still for ever.
            (old,) = server.api_pids
            os.kill(old, signal.SIGSTOP)
            await until(lambda: server.api_pids not in ([], [old]), 60)
            assert not is_alive(old)
            await until_healthy(client)
        assert "the engine hangs; its process is killed" in server.errors()
        assert "was killed by signal 9; it is started again" in server.errors()
        assert "API process 0 hangs; its process is killed" in server.errors()

    asyncio.run(run())


async def until_healthy(client):
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                await asyncio.sleep(0.05)


def test_an_engine_that_hangs_says_at_what(tmp_path, caplog, capfd):
    timeline, now = Timeline(), time.monotonic()
    for number in (6, 7):
        step = StepRecord(number, now, now, now, now - 3, None, Bucket(4, 4), 3, 4, 3, 100, 3, 0, 3, [], [], [])
        timeline._steps.append(step)
    timeline._steps[0].updated = now
    scheduler = SimpleNamespace(config=SimpleNamespace(max_num_seqs=4, num_ranks=1))
    engine = SimpleNamespace(scheduler=scheduler, timeline=timeline)
    source = InputSource(path=tmp_path, config=TINY, generation_defaults={})
    core: Any = SimpleNamespace(engine=engine, config=EncoderOptions(), source=source)
    server = EngineServer(core, f"ipc://{tmp_path}/engine", ServerConfig(), lambda event: None)
    try:
        with caplog.at_level("ERROR", "jaxengine"):
            # As the thread of orders does, while the one that steps does not come to read any.
            server.order({"order": "explain"})
    finally:  # a failure would keep it until sockets are collected behind their context, which then waits for them
        server._context.destroy()
    (message,) = [record.message for record in caplog.records]
    found = re.fullmatch(r"step 7 \(decode S=4, 3 rows\) was dispatched ([0-9.]+) s ago", message)
    assert found and float(found[1]) >= 3, message
    assert "test_an_engine_that_hangs_says_at_what" in capfd.readouterr().err


def test_early_orders_are_followed_once():
    child: Any = Child.__new__(Child)
    early, late = list[Any](), list[Any]()
    child._orders, child._lock, child._early = io.BytesIO(b'{"order": "stop"}\n'), threading.Lock(), []
    child._handle, child._orphaned = child._early.append, lambda: None
    child._read()
    child.follow(early.append)
    child.follow(late.append)
    assert (early, late) == ([{"order": "stop"}], [])


def test_an_api_process_that_dies_before_it_is_answered_is_dropped(tmp_path, caplog):
    running = SimpleNamespace(num_running=0, num_waiting=0, num_waiting_tokens=0)
    scheduler = SimpleNamespace(config=SimpleNamespace(max_num_seqs=4, num_ranks=1), **vars(running))
    extensions = SimpleNamespace(media_stats=lambda: None)
    engine = SimpleNamespace(scheduler=scheduler, extensions=extensions)
    source = InputSource(path=tmp_path, config=TINY, generation_defaults={})
    core: Any = SimpleNamespace(engine=engine, config=EncoderOptions(), source=source, has_unfinished=True)
    address = f"ipc://{tmp_path}/engine"
    server = EngineServer(core, address, ServerConfig(), lambda event: None)
    try:
        events = server._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        events.rcvtimeo = 10_000
        process, another = (server._context.socket(zmq.DEALER) for _ in range(2))
        process.connect(address)
        process.send(messages.encode(messages.Hello(3)))
        process.close(1000)
        assert [recv_monitor_message(events)["event"] for _ in range(2)] == [zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED]
        # What accepts another connection has told the server's socket by then that the first one has ended.
        another.connect(address)
        assert recv_monitor_message(events)["event"] == zmq.EVENT_ACCEPTED
        assert server._receive()
    finally:
        server._context.destroy(0)
    assert "API process 3 is lost: " in caplog.text
    assert not server._clients and not server._by_number

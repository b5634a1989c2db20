"""Storms of clients, of which some leave: afterwards nothing is left behind, and who stayed got what it gets alone."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import uvicorn

from jaxengine.bench.serve_client import Server
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.conftest import use_scheduler
from tests.jaxengine.server.processes.storm import CHOICES, differences, storm, visits

# A pool of 256 tokens for eight requests of about 80 each, and room in the queue for everybody.
NUM_PAGES = 32
SMALL_POOL = {"num_gpu_blocks_override": NUM_PAGES, "scheduling_policy": "priority"}


class AppThread:
    """The application on an event loop and a thread of its own, at a real port."""

    def __init__(self, engine, config):
        self.app = create_app(engine, config)
        self._server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="warning", access_log=False))
        self._thread = threading.Thread(target=self._run)
        self._ready = threading.Event()

    def _run(self):
        async def serve():
            self.loop = asyncio.get_running_loop()
            serving = asyncio.create_task(self._server.serve())
            while not self._server.started:
                await asyncio.sleep(0.01)
            self._ready.set()
            await serving

        asyncio.run(serve())

    def num_tasks(self) -> int:
        return len(asyncio.all_tasks(self.loop))

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.server = Server.at(f"http://127.0.0.1:{port}/v1")
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def small_engine(chat_options):
    from jaxengine import AsyncLLM

    engine = AsyncLLM(**chat_options, scheduling_policy="priority")
    use_scheduler(engine, num_pages=NUM_PAGES)  # of the pages that other engines have, so that steps are shared
    yield engine
    engine.shutdown()


def until(condition, seconds=60.0):
    """Waits for what happens after the last client has gone."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def assert_structured(planned):
    found = [output.text for visit in planned if "structured_outputs" in visit.body for output in visit.results]
    assert len(found) >= len(planned) // 25 and set(found) <= set(CHOICES), found


async def test_a_storm_leaves_nothing_in_the_process(small_engine, chat_engine, chat_model, report):
    scheduler, runner = small_engine.core.engine.scheduler, small_engine.core.runner
    pool = scheduler.ranks[0].pool
    with AppThread(small_engine, ServerConfig(max_num_queued_reqs=4096)) as app:
        tasks = app.num_tasks()
        await storm(app.server, visits(10, chat_model, seed=1, priorities=True), 32)
        assert until(lambda: not scheduler.num_unfinished)
        threads, before = threading.active_count(), scheduler.num_preemptions
        planned = visits(50, chat_model, seed=2, priorities=True, structured=0.1)
        start = time.monotonic()
        counts = await storm(app.server, planned, 32)
        seconds = time.monotonic() - start
        assert until(lambda: not scheduler.num_unfinished)
        assert until(lambda: app.num_tasks() == tasks), [str(task) for task in asyncio.all_tasks(app.loop)]
        assert threading.active_count() == threads
    assert pool.num_free == len(pool.ref_count) and not pool.ref_count.any()
    pool.check()
    assert not small_engine._readers and not len(small_engine.core._processor)
    preemptions = scheduler.num_preemptions - before
    assert preemptions >= 15 and runner.compiles.count == 0
    assert counts["stay ended"] == 30 and counts["leave left"] == 10 and counts["abort left"] >= 5, counts
    assert not [visit.error for visit in planned if visit.error]
    assert_structured(planned)
    wrong = await differences(chat_engine, planned)
    assert not wrong, "\n".join(wrong)
    report(f"storm of 50 in one process: {seconds:.1f} s, {preemptions} preemptions, {dict(counts)}")


def holdings(pid: int) -> dict[str, int]:
    """What a process has: files and sockets, threads, memory in MB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "files": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "MB": int(status["VmRSS"].split()[0]) // 1024,
    }


@pytest.mark.thorough("the storm in one process shows most of it")
async def test_a_storm_leaves_nothing_in_the_server(make_server, chat_engine, chat_model, thorough, report):
    count = 2000 if thorough else 100
    running = make_server(**SMALL_POOL, max_num_queued_reqs=4096, api_server_count=2)
    server, pids = Server.at(running.base_url + "/v1"), [running.engine_pid, *running.api_pids]

    def status():
        with urllib.request.urlopen(running.base_url + "/status.json", timeout=10) as answer:
            return json.load(answer)

    def is_idle():
        now = status()
        return now["num_running"] == now["num_waiting"] == 0

    # Threads and buffers that are made once are there after these.
    await storm(server, visits(60, chat_model, seed=3, priorities=True, structured=0.1), 48)
    assert until(is_idle)
    before, held = status(), [holdings(pid) for pid in pids]
    planned = visits(count, chat_model, seed=4, priorities=True, structured=0.1)
    start = time.monotonic()
    counts = await storm(server, planned, 48)
    seconds = time.monotonic() - start
    assert until(is_idle)
    assert until(lambda: all(holdings(pid)["files"] <= was["files"] for pid, was in zip(pids, held, strict=True)))
    after, holds = status(), [holdings(pid) for pid in pids]
    assert [running.engine_pid, *running.api_pids] == pids, running.errors()
    assert [now["threads"] for now in holds] == [was["threads"] for was in held]
    pages = dict(zip(after["pages"]["states"], after["pages"]["counts"], strict=True))
    assert (
        pages["active"] == pages["shared"] == 0
        and pages["free"] + pages["cached"] == SMALL_POOL["num_gpu_blocks_override"]
    )
    assert after["compilations_since_ready"] == 0
    preemptions = after["num_preemptions"] - before["num_preemptions"]
    assert preemptions > count // 3
    assert not [visit.error for visit in planned if visit.error]
    assert counts["stay ended"] == count * 3 // 5 and counts["leave left"] == count // 5, counts
    assert counts["abort left"] > count // 10, counts
    assert_structured(planned)
    wrong = await differences(chat_engine, planned)
    assert not wrong, "\n".join(wrong)
    grown = [now["MB"] - was["MB"] for now, was in zip(holds, held, strict=True)]
    what = f"{seconds:.1f} s, {preemptions} preemptions, MB grown {grown}, {dict(counts)}"
    report(f"storm of {count} on {len(pids)} processes: {what}")

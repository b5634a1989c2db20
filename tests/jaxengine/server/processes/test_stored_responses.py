"""Stored responses of a server with several API processes: whichever is asked has them, and none ends with one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import httpx

PATH = "/v1/responses"
ASK = {"input": "Hi", "max_output_tokens": 4, "temperature": 0}


@contextlib.contextmanager
def stopped(pid):
    """The process does nothing; those that share its port take its connections."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_every_process_has_them(make_server):
    server = make_server(fresh=True, api_server_count=2, grpc_port=None, api_hang_timeout=0.0)
    first, second = server.api_pids
    async with (
        asyncio.timeout(120),
        httpx.AsyncClient(base_url=server.base_url, timeout=60) as one,
        httpx.AsyncClient(base_url=server.base_url, timeout=60) as two,
    ):
        # Each keeps the connection that it made while only one process could take it.
        for pid, client in ((second, one), (first, two)):
            with stopped(pid):
                assert (await client.get("/health")).status_code == 200
        made = (await one.post(PATH, json=ASK)).json()
        name = f"{PATH}/{made['id']}"
        assert made["store"] and (await two.get(name)).json() == made
        assert (await two.get(f"{name}/input_items")).json()["data"][0]["content"][0]["text"] == "Hi"
        further = await two.post(PATH, json={**ASK, "previous_response_id": made["id"]})
        assert further.status_code == 200 and further.json()["usage"]["input_tokens"] > made["usage"]["input_tokens"]
        taken = await two.post(PATH, json={**ASK, "request_id": made["id"]})
        assert taken.status_code == 400 and taken.json()["error"]["param"] == "request_id"
        long = {**ASK, "max_output_tokens": 200, "ignore_eos": True, "background": True}
        begun = (await one.post(PATH, json=long)).json()
        assert (await two.post(f"{PATH}/{begun['id']}/cancel")).json()["status"] == "cancelled"
        assert (await one.get(f"{PATH}/{begun['id']}")).json()["status"] == "cancelled"
        assert (await two.delete(f"{PATH}/{begun['id']}")).status_code == 200
        assert (await one.get(f"{PATH}/{begun['id']}")).status_code == 404
        # One process ends: what it kept is there, what it worked on has failed.
        begun = (await one.post(PATH, json=long)).json()
        os.kill(first, signal.SIGKILL)
        while (found := (await two.get(f"{PATH}/{begun['id']}")).json())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
        assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
        assert (await two.get(name)).json() == made
        # The store itself ends: it is started again, with nothing in it.
        (store,) = server.store_pids
        os.kill(store, signal.SIGKILL)
        while (status := (await two.get(name)).status_code) != 404:
            assert status in (200, 503)
            await asyncio.sleep(0.01)
        made = (await two.post(PATH, json=ASK)).json()
        assert (await two.get(f"{PATH}/{made['id']}")).json() == made

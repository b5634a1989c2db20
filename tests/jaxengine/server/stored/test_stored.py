"""The store of responses, in this process and over a socket: bounds, owners, work that is stopped or lost."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.scheduler.errors import OverloadedError
from jaxengine.server.stored import store as stores
from jaxengine.server.stored.link import RemoteStore, StoreServer
from jaxengine.server.stored.store import ResponseStore, StoredResponse


def stored(name, size=1, *, owner="me", running=False, status="completed"):
    response = json.dumps({"id": str(name), "status": status, "text": "x" * size}).encode()
    return StoredResponse(str(name), owner, response, b"[]", is_running=running)


class Work:
    """Notes what it is to cancel, and ends it."""

    def __init__(self, responses=None):
        self.cancelled = []
        self._responses = responses
        self._tasks = []

    def cancel(self, response_id):
        self.cancelled.append(response_id)
        if self._responses is not None:
            self._tasks.append(
                asyncio.ensure_future(self._responses.put(stored(response_id, status="cancelled"), self))
            )


@contextlib.asynccontextmanager
async def listening(path, store):
    served = []

    async def serve(reader, writer):
        served.append(writer)
        await StoreServer(store).serve(reader, writer)

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
        for writer in served:
            writer.close()


@pytest.fixture(params=["here", "over a socket"])
async def responses(request, tmp_path):
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    if request.param == "here":
        yield store
        return
    async with listening(tmp_path / "store", store), asyncio.timeout(30):
        remote = await RemoteStore.connect(str(tmp_path / "store"))
        yield remote
        remote.close()


async def known(responses, *names):
    return [await responses.knows(str(name)) for name in names]


async def test_it_is_bounded(responses):
    work = Work()
    for number in range(5):
        await responses.put(stored(number), work)
    assert await known(responses, *range(5)) == [False, False, True, True, True]
    await responses.put(stored(5, 9_900), work)
    assert await known(responses, 4, 5) == [False, True]
    await responses.put(stored(5), work)
    await responses.put(stored(6, 9_000), work)
    assert await known(responses, 5, 6) == [True, True]
    # What runs is not dropped; where all of it runs there is no room.
    for number in (5, 6, 7):
        await responses.put(stored(number, running=True), work)
    with pytest.raises(OverloadedError, match="3 responses run"):
        await responses.put(stored(8), work)
    await responses.put(stored(5), work)
    await responses.put(stored(8), work)
    assert await known(responses, 5, 6, 7, 8) == [False, True, True, True]
    assert stores.MAX_BYTES <= 64 << 20


async def test_it_is_its_owners_alone(responses):
    await responses.put(stored(1), Work())
    assert (await responses.get("1", "me")).response == stored(1).response
    for call in (responses.get, responses.stop, responses.delete):
        assert await call("1", "you") is None and await call("2", "me") is None
    await responses.put(stored(1, 50, owner="you"), Work())
    assert (await responses.get("1", "me")).response == stored(1).response
    assert await responses.delete("1", "me") is not None and not await responses.knows("1")


async def test_work_is_stopped_before_it_is_shown_or_forgotten(responses):
    work = Work(responses)
    for number in (1, 2):
        await responses.put(stored(number, running=True, status="in_progress"), work)
    shown = await asyncio.gather(responses.stop("1", "me"), responses.stop("1", "me"))
    assert [json.loads(each.response)["status"] for each in shown] == ["cancelled"] * 2
    assert json.loads((await responses.delete("2", "me")).response)["status"] == "cancelled"
    assert set(work.cancelled) == {"1", "2"} and await known(responses, 1, 2) == [True, False]


async def test_what_a_process_worked_on_fails_with_it(tmp_path):
    path, store = tmp_path / "store", ResponseStore()
    async with listening(path, store), asyncio.timeout(30):
        one, other = await RemoteStore.connect(str(path)), await RemoteStore.connect(str(path))
        await one.put(stored(1, running=True, status="in_progress"), Work())
        await one.put(stored(2), Work())
        await other.put(stored(3, running=True, status="in_progress"), Work())
        stopping = asyncio.create_task(other.stop("1", "me"))
        while not store._at_rest:
            await asyncio.sleep(0.001)
        one.close()
        assert json.loads((await stopping).response)["error"]["code"] == "server_error"
        found = [json.loads((await other.get(name, "me")).response)["status"] for name in "123"]
        assert found == ["failed", "completed", "in_progress"]
        other.close()


async def test_a_store_that_ends_is_found_again(tmp_path):
    path = tmp_path / "store"
    async with asyncio.timeout(30):
        async with listening(path, ResponseStore()):
            remote = await RemoteStore.connect(str(path))
            await remote.put(stored(1), Work())
        with pytest.raises(EngineDeadError, match="started again"):
            while True:
                await remote.get("1", "me")
        async with listening(path, ResponseStore()):
            while True:
                with contextlib.suppress(EngineDeadError):
                    assert not await remote.knows("1")
                    break
                await asyncio.sleep(0.01)
            remote.close()

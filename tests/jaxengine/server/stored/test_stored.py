"""The store of responses, in this process and over a socket: bounds, owners, links, work that is stopped or lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.base.options import MIB, ServerConfig
from jaxengine.server.processes.store_process import memory_limit
from jaxengine.server.stored.documents import LONG_TEXT, Joiner, split
from jaxengine.server.stored.link import RemoteStore, StoreServer
from jaxengine.server.stored.records import StoreBounds, StoredResponse
from jaxengine.server.stored.store import ResponseStore
from tests.tables import each_row

BOUNDS = StoreBounds(responses=6, num_bytes=60_000, client_responses=4, client_bytes=40_000, conversation_bytes=20_000)


def made(name, question="Hi", *, owner="me", running=False, status="completed", previous=None):
    """A response to store, and its long texts."""
    texts = {}
    shown = split({"id": str(name), "status": status}, texts)
    asked = split([{"role": "user", "content": question}], texts)
    answer = split([{"role": "assistant", "content": f"answer {name}"}], texts)
    previous = None if previous is None else str(previous)
    return StoredResponse(str(name), owner, shown, asked, answer, asked, previous, is_running=running), texts


async def put(store, *args, worker=None, **more):
    stored, texts = made(*args, **more)
    assert await store.put(stored, worker or Work(), texts) is None


async def read(store, name, owner="me", part="conversation"):
    """The values of a part, messages of a conversation as their contents; None for a response that is not there."""
    reading = await store.read(str(name), owner, part)
    if reading is None:
        return None
    values = [Joiner(reading.texts).join(each) for each in reading.documents]
    return [message["content"] for each in values for message in each] if part == "conversation" else values[0]


class Work:
    """Notes what it is to cancel, and ends it."""

    def __init__(self, responses=None):
        self.cancelled = []
        self._responses = responses
        self._tasks = []

    def cancel(self, response_id, owner):
        self.cancelled.append((response_id, owner))
        if self._responses is not None:
            ended = put(self._responses, response_id, owner=owner, status="cancelled", worker=self)
            self._tasks.append(asyncio.ensure_future(ended))


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
    store = ResponseStore(BOUNDS)
    if request.param == "here":
        yield store
        return
    async with listening(tmp_path / "store", store), asyncio.timeout(30):
        remote = await RemoteStore.connect(str(tmp_path / "store"))
        yield remote
        remote.close()


async def there(responses, *names, owner="me"):
    return [name for name in names if await responses.find(str(name), owner) is not None]


async def test_an_owner_evicts_its_own_oldest(responses):
    for number in range(6):
        await put(responses, number)
    assert await there(responses, *range(6)) == [2, 3, 4, 5]
    # By bytes, too: three of these are beyond what an owner may have.
    for number in (6, 7, 8):
        await put(responses, number, f"{number}" * 14_000)
    assert await there(responses, *range(9)) == [7, 8]


async def test_who_has_most_makes_room_for_all(responses):
    await put(responses, "mine", owner="you")
    for number in range(20):
        await put(responses, number, f"{number:02}" * 6_000, owner=f"greedy {number % 4}")
    assert await there(responses, "mine", owner="you") == ["mine"]
    for number in range(40):
        await put(responses, number, owner=f"greedy {number % 4}")
    assert await there(responses, "mine", owner="you") == ["mine"]
    for number in range(4):
        assert await there(responses, *range(40), owner=f"greedy {number}")


async def test_what_runs_is_not_evicted_and_is_bounded(responses):
    work = Work()
    for number in range(4):
        await put(responses, number, running=True, worker=work)
    with pytest.raises(OverloadedError, match="4 responses of yours and 4 in all run"):
        await put(responses, 4)
    await put(responses, 4, owner="you")
    await put(responses, 1, worker=work)
    await put(responses, 4)
    assert await there(responses, *range(5)) == [0, 2, 3, 4]
    # Their bytes count as well, for each owner.
    for number in range(2):
        await put(responses, number, "x" * 12_000, owner="large", running=True)
    with pytest.raises(OverloadedError, match="run in the background"):
        await put(responses, 2, "x" * 12_000, owner="large", running=True)
    # Nothing is kept of those that were refused.
    running = {("me", "0"), ("me", "2"), ("me", "3"), ("large", "0"), ("large", "1")}
    assert responses._workers.keys() == running


@each_row(
    ("question", "fits"),
    [("x" * 18_000, True), ("x" * 20_000, False), (["x" * 9_000] * 2, True), (["x" * 9_000] * 3, False)],
)
async def test_a_conversation_is_bounded_by_all_its_texts(question, fits):
    store = ResponseStore(BOUNDS)
    with contextlib.nullcontext() if fits else pytest.raises(OverloadedError, match="max_stored_conversation_bytes"):
        await put(store, 1, question)
    assert (store.num_bytes > 0) is fits


async def test_a_conversation_costs_its_new_texts_only():
    store, picture = ResponseStore(BOUNDS), "p" * 1500
    await put(store, 0, picture)
    before = store.num_bytes
    for number in range(1, 4):
        await put(store, number, picture, previous=number - 1)
    assert store.num_bytes - before < 3 * LONG_TEXT + 3 * 1200
    contents = [text for number in range(4) for text in (picture, f"answer {number}")]
    assert await read(store, 3) == contents
    found = await store.find("3", "me")
    assert found is not None and found.num_bytes["conversation"] > 4 * 1500
    # Grown turn by turn it is bounded as well.
    with pytest.raises(OverloadedError, match="max_stored_conversation_bytes"):
        for number in range(4, 20):
            await put(store, number, picture, previous=number - 1)


async def test_a_turn_outlives_its_response(responses):
    await put(responses, 1, "one " * 1000)
    await put(responses, 2, "two", previous=1)
    await responses.delete("1", "me")
    assert await read(responses, 1) is None
    assert await read(responses, 2) == ["one " * 1000, "answer 1", "two", "answer 2"]
    # What it continues is gone: the store wants the whole conversation.
    stored, texts = made(3, "three " * 1000, previous=1)
    needs = await responses.put(stored, Work())
    assert needs.history and set(needs.digests) == set(texts)
    # While it is made its link remains.
    await put(responses, 4, previous=2, running=True)
    await responses.delete("2", "me")
    await put(responses, 4, previous=2)
    assert (await read(responses, 4))[0] == "one " * 1000


async def test_nothing_is_left_of_what_is_deleted():
    store = ResponseStore(BOUNDS)
    for number in range(3):
        await put(store, number, f"{number % 2}" * 2000, previous=number - 1 if number else None)
    for number in (1, 0, 2):
        assert store.num_bytes > 0
        await store.delete(str(number), "me")
    assert store.num_bytes == 0
    # A conversation of very many turns is forgotten without recursion.
    large = dict.fromkeys(("client_bytes", "num_bytes", "conversation_bytes"), 10**7)
    store = ResponseStore(dataclasses.replace(BOUNDS, **large))
    for number in range(2000):
        await put(store, number, previous=number - 1 if number else None)
    assert len(await read(store, 1999)) == 4000
    for number in range(1996, 2000):
        await store.delete(str(number), "me")
    assert store.num_bytes == 0


async def test_ids_are_their_owners_alone(responses):
    await put(responses, 1)
    await put(responses, 1, owner="you", status="failed")
    assert [(await read(responses, 1, owner, "response"))["status"] for owner in ("me", "you")] == [
        "completed",
        "failed",
    ]
    for call in (responses.find, responses.stop, responses.delete):
        assert await call("1", "they") is None and await call("2", "me") is None
    assert await responses.delete("1", "me") is not None
    assert await there(responses, 1) == [] and await there(responses, 1, owner="you") == [1]


async def test_work_is_stopped_before_it_is_shown_or_forgotten(responses):
    work = Work(responses)
    for number, owner in ((1, "me"), (2, "me"), (1, "you")):
        await put(responses, number, owner=owner, running=True, status="in_progress", worker=work)
    found = await asyncio.gather(responses.stop("1", "me"), responses.stop("1", "me"))
    assert not any(each.is_running for each in found)
    assert (await read(responses, 1, part="response"))["status"] == "cancelled"
    assert not (await responses.delete("2", "me")).is_running
    assert set(work.cancelled) == {("1", "me"), ("2", "me")} and await there(responses, 1, 2) == [1]
    assert (await responses.find("1", "you")).is_running


async def test_events_are_followed_while_they_come(responses):
    """From any number on, by several at a time, to the end; nobody else's, and none of what is not streamed."""
    stored, texts = made("x", running=True)
    stored.is_streamed = True
    await responses.put(stored, work := Work(), texts)
    assert (await responses.find("x", "me")).is_streamed
    coming = [asyncio.ensure_future(responses.events_after("x", "me", number)) for number in (-1, 1)]
    await responses.append_events("x", "me", [(0, b"a"), (1, b"b")])
    first = await coming[0]
    assert (first.events, first.is_last) == ([(0, b"a"), (1, b"b")], False) and not coming[1].done()
    end, texts = made("x")
    end.is_streamed, end.events = True, [(2, b"c")]
    await responses.put(end, work, texts)
    last = await coming[1]
    assert (last.events, last.is_last) == ([(2, b"c")], True)
    await responses.append_events("x", "me", [(3, b"d")])  # too late
    whole = await responses.events_after("x", "me", -1)
    assert [data for _, data in whole.events] == [b"a", b"b", b"c"] and whole.is_last
    assert (await responses.events_after("x", "me", 2)).events == []
    await put(responses, "y")
    for name, owner in (("x", "you"), ("y", "me"), ("z", "me")):
        assert await responses.events_after(name, owner, -1) is None
    await responses.delete("x", "me")
    assert await responses.events_after("x", "me", -1) is None


async def test_events_count_and_end_with_their_response():
    store, work = ResponseStore(BOUNDS), Work()
    stored, texts = made("x", running=True)
    stored.is_streamed = True
    await store.put(stored, work, texts)
    before = store.num_bytes
    await store.append_events("x", "me", [(0, b"a" * 1000)])
    added = store.num_bytes - before
    assert 1000 < added < 1200
    coming = asyncio.ensure_future(store.events_after("x", "me", 0))
    await asyncio.sleep(0)
    store.lose(work)  # its process has ended, and no event tells
    assert (await coming).events == [] and (await coming).is_last and (await coming).is_cut
    await store.delete("x", "me")
    assert store.num_bytes == 0


async def test_events_of_running_responses_leave_no_room_for_others():
    """They are never evicted; nor are many bytes of them sent at once."""
    store, work = ResponseStore(dataclasses.replace(BOUNDS, num_bytes=20_000, client_bytes=20_000)), Work()
    for name in ("x", "y"):
        stored, texts = made(name, running=True)
        stored.is_streamed = True
        await store.put(stored, work, texts)
        await store.append_events(name, "me", [(number, b"a" * 1000) for number in range(9)])
    with pytest.raises(OverloadedError, match="run in the background already"):
        await store.put(*(made("z")[0], work, made("z")[1]))
    await store.append_events("x", "me", [(9, b"a" * (1 << 20)), (10, b"a")])
    assert [number for number, _ in (await store.events_after("x", "me", -1)).events] == [*range(10)]
    assert [number for number, _ in (await store.events_after("x", "me", 9)).events] == [10]


async def test_what_a_process_worked_on_fails_with_it(tmp_path):
    path, store = tmp_path / "store", ResponseStore(BOUNDS)
    async with listening(path, store), asyncio.timeout(30):
        one, other = await RemoteStore.connect(str(path)), await RemoteStore.connect(str(path))
        await put(one, 1, "long " * 500, running=True, status="in_progress")
        await put(one, 2)
        await put(other, 3, running=True, status="in_progress")
        stopping = asyncio.create_task(other.stop("1", "me"))
        while not store._at_rest:
            await asyncio.sleep(0.001)
        one.close()
        assert not (await stopping).is_running
        found = [await read(other, name, part="response") for name in "123"]
        assert [each["status"] for each in found] == ["failed", "completed", "in_progress"]
        assert found[0]["error"]["code"] == "server_error" and (await read(other, 1))[0] == "long " * 500
        other.close()


async def test_a_store_that_ends_is_found_again(tmp_path):
    path = tmp_path / "store"
    async with asyncio.timeout(30):
        async with listening(path, ResponseStore(BOUNDS)):
            remote = await RemoteStore.connect(str(path))
            await put(remote, 1)
        with pytest.raises(EngineDeadError, match="started again"):
            while True:
                await remote.find("1", "me")
        async with listening(path, ResponseStore(BOUNDS)):
            while True:
                with contextlib.suppress(EngineDeadError):
                    assert await remote.find("1", "me") is None
                    break
                await asyncio.sleep(0.01)
            remote.close()


@each_row(
    "value",
    [
        None,
        {"a": [1, -1.5, True, None, "ü😀", 2**64 - 1, -(2**63)], "b": {}},
        [2**64, -(2**63) - 1, 10**40],
        {"x": "y" * LONG_TEXT, "z": ["y" * LONG_TEXT, "😀" * 5000, "y" * (LONG_TEXT - 1)]},
        {"1": {"$ref": "x"}, "type": "ext"},
    ],
)
def test_a_value_is_restored_as_it_was(value):
    texts = {}
    assert Joiner(texts).join(split(value, texts)) == value
    assert all(len(text) >= LONG_TEXT for text in texts.values())


def test_the_stores_process_has_room_for_what_it_may_hold():
    config = ServerConfig(api_server_count=2)
    bounds = StoreBounds(**config.store_bounds())
    limit = memory_limit(bounds, config.api_server_count, config.max_request_bytes)
    assert bounds.num_bytes == 256 * MIB and 2 * bounds.num_bytes < limit < 2 << 30

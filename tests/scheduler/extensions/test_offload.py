"""Which requests wait for stored pages and what is ordered to be stored, without devices: the store is a dict."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import FinishReason, Request, RequestStatus, Wait
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.extensions.load_room import STALL_SECONDS, Load, LoadRoom
from jaxengine.scheduler.extensions.offload import OffloadOptions
from jaxengine.scheduler.scheduler import Scheduler

PROMPTS = [np.arange(first, first + 17, dtype=np.int32) for first in (0, 20, 40)]


class Store:
    """Keys as stored, and whether they pay."""

    def __init__(self, pays: bool = True):
        self.keys, self.pins, self.is_cheap = set[bytes](), Counter[bytes](), pays
        self.far = set[bytes]()  # keys of these that another engine has

    def has(self, key):
        return key in self.keys

    def is_far(self, key):
        return key in self.far

    def pin(self, keys):
        self.pins.update(keys)

    def unpin(self, keys):
        self.pins.subtract(keys)

    def pays(self, num_stored, num_tokens):
        return self.is_cheap


def run(scheduler, requests: list[Request]) -> tuple[int, int]:
    """Run requests that come together; the number of pages read from the store, and of those that were still in the
    pool when their requests ran. A load takes two steps.
    """
    offload, ends = scheduler.extension("offload"), requests.copy()
    num_read, num_hits, coming = 0, offload.num_hits, []
    for _ in range(40 * len(requests)):
        coming = loaded_step(scheduler, coming, ends)
        num_read += sum(len(load.keys) for load in coming)
        if not ends:
            break
    assert not scheduler.num_unfinished and not (offload._checked or offload._followers or offload._blocked)
    assert all(not (each.loads or each._claims.num_pages) for each in offload.rooms)
    return num_read, (offload.num_hits - num_hits) // 4


def loaded_step(scheduler, coming: list[Load], unfinished: list[Request]) -> list[Load]:
    """Run a step, complete the loads that are `coming`, and remove the requests that have ended from `unfinished`; the
    loads that the step ordered.
    """
    offload, found = scheduler.extension("offload"), scheduler.schedule()
    if found.num_rows:
        scheduler.update(found, np.full((len(scheduler.ranks), 2), 7, np.int32))
    for load in coming:
        offload.ranks[load.rank].take(load.keys, load.pages)
        load.is_done = True
        scheduler.release(load.request)
    for request in [each for each in unfinished if each.status is RequestStatus.FINISHED]:
        offload.ended(request)
        unfinished.remove(request)
    loads, offload.loads = offload.loads, []
    return loads


def scheduler_of(*, num_pages=8, pays=True, num_ranks=1, policy="fcfs", **options) -> tuple[Scheduler, Store]:
    config = SchedulerConfig(
        num_ranks=num_ranks,
        policy=policy,
        num_pages=num_pages,
        page_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=64,
        extensions=(OffloadOptions(**options),),
    )
    scheduler, store = Scheduler(config), Store(pays)
    scheduler.extension("offload").store = store
    return scheduler, store


def add(scheduler, index: int, max_tokens: int = 1) -> Request:
    request = Request(f"{index} {scheduler._num_arrived}", PROMPTS[index], TokenParams(temperature=0.0), max_tokens)
    scheduler.add_request(request)
    return request


def step(scheduler) -> dict[bytes, int]:
    """Run a step; what had to be stored before it."""
    found = scheduler.schedule()
    (rank,) = scheduler.extension("offload").ranks
    leaving = dict(rank.pages.leaving)
    rank.pages.leaving.clear()
    if found.num_rows:
        scheduler.update(found, np.full((1, 2), 7, np.int32))
    return leaving


def test_pages_leave_and_come_back():
    scheduler, store = scheduler_of(num_pages=7)
    offload = scheduler.extension("offload")
    first = add(scheduler, 0)
    step(scheduler)
    add(scheduler, 1)
    leaving = step(scheduler)
    digests = first.page_hashes
    assert list(leaving) == digests[3:1:-1]  # the ends of prefixes leave first
    store.keys |= leaving.keys()
    again = add(scheduler, 0)
    step(scheduler)
    assert again.wait is Wait.APART and scheduler.num_waiting == 1 and scheduler.num_running == 0
    (load,) = offload.loads
    assert load.keys == digests[2:4] and load.pages == digests[:4] and load.num_tokens == 8
    (rank,) = offload.ranks
    entries = rank.take(load.keys, load.pages)
    assert [key for key, _ in entries] == load.keys
    scheduler.ranks[0].pool.check()
    assert rank.take(load.keys, load.pages) == []
    scheduler.release(again)
    step(scheduler)
    assert again.num_cached_tokens == 16 and offload.num_hits == again.num_external_tokens == 8
    assert not offload._checked


def test_a_page_is_stored_once_it_is_looked_for_often():
    scheduler, _ = scheduler_of(store_threshold=2)
    for index in (0, 1, 2, 0, 1):
        assert not step_of(scheduler, index) or index == 1
    scheduler, _ = scheduler_of()
    assert not step_of(scheduler, 0) and step_of(scheduler, 1)


def queued(scheduler, prompts, client: str = "", max_tokens: int = 6) -> list[Request]:
    """Requests of these prompts, i32 [n] each, all in the queue."""
    requests, greedy = [], TokenParams(temperature=0.0)
    for prompt in prompts:
        name = str(scheduler._num_arrived)
        requests.append(Request(name, np.asarray(prompt, np.int32), greedy, max_tokens, client=client))
        scheduler.add_request(requests[-1])
    return requests


def store_all(scheduler, store: Store, prompts) -> None:
    """Add the keys of all full pages of these prompts to the store."""
    for request in queued(scheduler, prompts):
        request.compute_with(scheduler.ranks[0].weights_digest)
        store.keys |= set(request.extend_page_hashes(request.prompt_token_ids, 4))
        scheduler.finish(request, FinishReason.ABORT)


def test_loads_wait_for_room_and_for_each_other():
    """Prompts of 17 tokens have four pages in the store, and the pool has room for two or three of them."""
    document = list(range(100, 112))
    apart = [list(range(20 * index, 20 * index + 17)) for index in range(30)]
    shared = [[*document, *range(20 * index, 20 * index + 5)] for index in range(30)]
    for prompts, num_stored in ((apart, 120), (shared, 33)):
        scheduler, store = scheduler_of(num_pages=13)
        store_all(scheduler, store, prompts)
        assert len(store.keys) == num_stored
        num_read, num_used = run(scheduler, queued(scheduler, prompts))
        assert num_read == num_used == num_stored
        assert scheduler.num_prefix_hits == 30 * 16


def test_a_load_without_room_is_not_overtaken():
    """Later requests, of which nothing is stored, would always take the pages that it needs."""
    scheduler, store = scheduler_of(num_pages=14)
    small, large = list(range(17)), list(range(100, 150))
    store_all(scheduler, store, [small, large])
    unfinished, coming = queued(scheduler, [small, large]), []
    (_, request), num_later = unfinished, 0
    while request.status is not RequestStatus.FINISHED and num_later < 40:
        for _ in range(scheduler.num_waiting, 3):
            num_later += 1
            first = 1000 + 20 * num_later
            unfinished += queued(scheduler, [list(range(first, first + 13))], max_tokens=4 + num_later % 5)
        coming = loaded_step(scheduler, coming, unfinished)
    assert num_later < 10


def test_loads_keep_the_order_of_a_fair_queue():
    scheduler, store = scheduler_of(num_pages=13, policy="fair")
    prompts = [list(range(20 * index, 20 * index + 17)) for index in range(12)]
    store_all(scheduler, store, prompts)
    unfinished, coming = queued(scheduler, prompts[:11], "many"), []
    unfinished += (one := queued(scheduler, prompts[11:], "one"))
    while one[0] in unfinished:
        coming = loaded_step(scheduler, coming, unfinished)
    assert len(unfinished) >= 8


def test_loads_are_spread_over_replicas():
    scheduler, store = scheduler_of(num_pages=26, num_ranks=2)
    prompts = [list(range(20 * index, 20 * index + 17)) for index in range(8)]
    store_all(scheduler, store, prompts)
    unfinished, coming, num_steps = queued(scheduler, prompts), [], 0
    while unfinished:
        coming = loaded_step(scheduler, coming, unfinished)
        num_steps += 1
    assert num_steps < 20  # four requests at once, each of six steps, and two loads for each slot


def test_a_loaded_request_that_waits_for_another_extension_is_no_reason_to_wait():
    """It may wait for the adapter slot of the very request that waits for its pages."""
    scheduler, _ = scheduler_of(num_pages=8)
    room = LoadRoom(scheduler.ranks[0])
    keys = [[bytes([first + at]) for at in range(5)] for first in (0, 5)]
    first, second = (
        Load(each, 0, own, own, 20) for each, own in zip(queued(scheduler, PROMPTS[:2]), keys, strict=True)
    )
    room.begin(first)
    assert not room.fits(room.num_pages(second))
    first.is_done = True
    assert room.fits(room.num_pages(second))


def test_no_local_load_waits_for_a_dead_or_slow_engine(monkeypatch):
    """Loads from other engines take the room of all loads: from a dead one, of which nothing ever comes, or a slow one,
    whose pages come once.
    """
    now, num_steps = 0.0, dict[str, int]()
    monkeypatch.setattr("jaxengine.scheduler.extensions.load_room.time.monotonic", lambda: now)
    prompts = [list(range(20 * index, 20 * index + 17)) for index in range(8)]
    for case in ("none", "dead", "slow"):
        scheduler, store = scheduler_of(num_pages=13)
        offload, loads, coming = scheduler.extension("offload"), list[Load](), list[Load]()
        store_all(scheduler, store, [prompt[::-1] for prompt in prompts])
        store.far |= store.keys
        store_all(scheduler, store, prompts)
        far = [] if case == "none" else queued(scheduler, [prompt[::-1] for prompt in prompts])
        if far:
            loads = loaded_step(scheduler, [], far)
            assert loads and all(each.is_far for each in loads) and {each.wait for each in far} == {Wait.APART}
        unfinished = queued(scheduler, prompts)
        if case == "slow":
            for load in loads:
                load.came = now
            for _ in range(9):
                assert not loaded_step(scheduler, [], unfinished) and len(unfinished) == 8
            now += STALL_SECONDS
        num_steps[case] = 0
        while unfinished:
            coming = loaded_step(scheduler, coming, unfinished)
            num_steps[case] += 1
            assert not any(load.is_far for load in coming)
        while far:  # nothing more comes: what did not is computed, each request once its turn has come
            coming = loaded_step(scheduler, [], far)
            for load in [*loads, *coming]:
                load.is_done = True
                scheduler.release(load.request)
            loads = []
        assert not (offload._checked or offload._followers) and not any(each.loads for each in offload.rooms)
    assert num_steps["none"] == num_steps["dead"] == num_steps["slow"]


def step_of(scheduler, index: int) -> dict[bytes, int]:
    add(scheduler, index)
    return step(scheduler)


@pytest.mark.parametrize(
    ("mode", "pays", "word"), [("swap", False, "SWAP"), ("auto", True, "SWAP"), ("auto", False, "RECOMPUTE")]
)
def test_how_preempted_requests_get_their_pages_back(mode, pays, word, caplog):
    scheduler, store = scheduler_of(num_pages=11, preemption_mode=mode, pays=pays)
    requests = [add(scheduler, 0, 20), add(scheduler, 1, 20)]
    while not scheduler.num_preemptions:
        store.keys |= step(scheduler).keys()
    lost = requests[1]
    assert f"is preempted by PreemptionMode.{word} mode because" in caplog.text
    assert all(store.pins[digest] == (word == "SWAP") for digest in lost.page_hashes)
    while scheduler.num_unfinished:
        store.keys |= step(scheduler).keys()
        offload = scheduler.extension("offload")
        assert word == "SWAP" or not offload.loads
        for load in offload.loads:
            offload.ranks[0].take(load.keys, load.pages)
            scheduler.release(load.request)
        offload.loads = []
    assert not +store.pins or word == "RECOMPUTE"

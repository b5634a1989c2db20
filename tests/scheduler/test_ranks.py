"""Ranks and micro-batches: every output equals that of a solo run, no page is lost, no rank idles beside a line."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxengine.scheduler.base.request import FinishReason, RequestStatus, Wait
from tests.scheduler.fake_device import VOCAB_SIZE
from tests.scheduler.loop import Loop, check_output, make, random_request

SIZES = list(itertools.product([1, 2, 4], [1, 2, 4]))


def place_in_line(request):
    return request.priority, request.arrival_index


def check_line(loop, step, waiting):
    """Nobody was overtaken, and whoever is first in line could run nowhere. `waiting`: requests without a slot."""
    admitted = [request for batch in step.batches for request in batch.admitted]
    for rank, batch in enumerate(step.batches):
        places = [place_in_line(request) for request in batch.admitted]
        assert places == sorted(places)
        assert all(request.rank == rank for request in batch.admitted)
    if waiting:
        first = min(waiting, key=place_in_line)
        assert all(place_in_line(request) < place_in_line(first) for request in admitted)
        ranks = [] if first.wait is Wait.TOKEN else loop.scheduler.ranks
        assert all(not rank.is_open or rank.offer(first) is None for rank in ranks)


class WatchedLoop(Loop):
    """A loop that knows all its requests and watches the line after every `schedule`."""

    def __init__(self, requests, **options):
        super().__init__(**options)
        self.requests = requests

    def check(self, step):
        super().check(step)
        unscheduled = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        check_line(self, step, [request for request in self.requests if request.status in unscheduled])


class RanksMachine(RuleBasedStateMachine):
    """Requests come, are aborted, run out of time and of pages, in any order."""

    def __init__(self):
        super().__init__()
        self.requests = []
        self.aborted = set()
        self.now = 0.0

    @initialize(
        sizes=st.sampled_from(SIZES), sync=st.booleans(), num_pages=st.sampled_from([16, 20, 64]), caching=st.booleans()
    )
    def start(self, sizes, sync, num_pages, caching):
        ranks, micro_batches = sizes
        self.loop = WatchedLoop(
            self.requests,
            sync=sync,
            num_ranks=ranks,
            num_micro_batches=micro_batches,
            num_pages=num_pages,
            max_num_seqs=4,
            max_num_batched_tokens=12,
            enable_prefix_caching=caching,
            policy="priority",
        )

    @rule(seed=st.integers(0, 99), count=st.integers(1, 6), patience=st.sampled_from([float("inf"), 3.5, 20.5]))
    def add(self, seed, count, patience):
        rng = np.random.default_rng(seed)
        for _ in range(count):
            request = random_request(
                rng,
                len(self.requests),
                shared=np.arange(30) % VOCAB_SIZE,
                priority=int(rng.integers(0, 2)),
                deadline=self.now + patience,
            )
            self.loop.scheduler.add_request(request)
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = self.requests[data.draw(st.integers(0, len(self.requests) - 1))]
        if request.status is not RequestStatus.FINISHED:
            self.aborted.add(request)
        self.loop.scheduler.finish(request, FinishReason.ABORT)

    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.now += 1.0
            self.loop.step(self.now)
            assert len(self.loop.in_flight) < self.loop.depth

    @invariant()
    def counts_agree(self):
        scheduler = self.loop.scheduler
        alive = [request for request in self.requests if request.status is not RequestStatus.FINISHED]
        assert scheduler.num_unfinished == len(alive) == scheduler.num_running + scheduler.num_waiting
        assert scheduler.num_preemptions == sum(request.num_preemptions for request in self.requests)

    def teardown(self):
        if not hasattr(self, "loop"):
            return
        self.loop.run()
        assert self.loop.scheduler.num_free_pages == self.loop.scheduler.num_pages
        late = {request for request in self.loop.finished if request.stop_reason == "timeout"}
        assert len(self.loop.finished) == len(set(self.loop.finished))
        assert set(self.loop.finished) | self.aborted == set(self.requests)
        for request in set(self.requests) - self.aborted - late:
            check_output(request)


RanksMachine.TestCase.settings = settings(
    stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRanks = RanksMachine.TestCase


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), SIZES)
def test_storm_on_small_pools_ends_every_request(num_ranks, num_micro_batches):
    rng = np.random.default_rng(num_ranks * 10 + num_micro_batches)
    loop = Loop(num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_pages=18)
    shared = rng.integers(0, VOCAB_SIZE, 40).astype(np.int32)
    requests = [random_request(rng, index, shared=shared) for index in range(60)]
    for request in requests:
        loop.scheduler.add_request(request)
    loop.run()
    for request in requests:
        check_output(request)
    scheduler = loop.scheduler
    assert scheduler.num_free_pages == 18 * num_ranks and scheduler.num_preemptions > 5
    assert scheduler.num_prefix_hits > 0
    assert {request.rank for request in requests} == set(range(num_ranks))
    assert loop.largest_batch <= 8 and loop.most_tokens <= 24


def test_equal_requests_spread_evenly():
    loop = Loop(num_ranks=4)
    requests = [make(index, [index, 1, 2], 20) for index in range(12)]
    for request in requests:
        loop.scheduler.add_request(request)
    loop.step()
    assert [request.rank for request in requests] == [0, 1, 2, 3] * 3


def test_a_rank_that_became_idle_takes_the_next_in_line():
    loop = Loop(sync=True, num_ranks=2, max_num_seqs=2)
    lengths = {"a": 30, "b": 2, "c": 30, "d": 2, "e": 30, "f": 30}
    requests = {name: make(name, [ord(name), 1], length) for name, length in lengths.items()}
    for request in requests.values():
        loop.scheduler.add_request(request)
    loop.step()
    assert [requests[name].rank for name in "abcd"] == [0, 1, 0, 1] and loop.scheduler.num_waiting == 2
    while loop.scheduler.num_waiting:
        loop.step()
    assert [requests[name].rank for name in "ef"] == [1, 1]
    assert {request.request_id for request in loop.finished} == {"b", "d"}


def test_a_cached_prefix_draws_until_its_rank_is_more_loaded():
    loop = Loop(num_ranks=2, num_pages=200, max_num_batched_tokens=128)
    prompt = list(range(24))
    for request in (make("long", [5] * 40, 20), make("first", prompt, 1)):
        loop.scheduler.add_request(request)
    while not loop.finished:
        loop.step()
    followers = [make(index, [*prompt, 30, index], 20) for index in range(3)]
    for request in followers:
        loop.scheduler.add_request(request)
    loop.step()
    # Rank 1 knows the prefix, rank 0 holds 42: 0 + 2, then 26 + 2, then 52 + 2 against 42 + 26.
    assert [request.rank for request in followers] == [1, 1, 1]
    stranger = make("stranger", [9] * 10, 4)
    loop.scheduler.add_request(stranger)
    loop.step()
    assert stranger.rank == 0
    followers = [make(10 + index, [*prompt, 31, index], 20) for index in range(3)]
    for request in followers:
        loop.scheduler.add_request(request)
    loop.step()
    # Rank 1 holds 81, rank 0 52: that outweighs 24 until rank 0 holds 78 and knows the prefix, then 104.
    assert [request.rank for request in followers] == [0, 0, 1]


def test_without_a_cache_the_rank_with_most_room_wins():
    loop = Loop(num_ranks=2, enable_prefix_caching=False)
    sizes = [20, 3, 3, 3]
    requests = [make(index, [index] * size, 4) for index, size in enumerate(sizes)]
    for request in requests:
        loop.scheduler.add_request(request)
    loop.step()
    assert [request.rank for request in requests] == [0, 1, 1, 1]


def test_a_preempted_request_may_go_on_elsewhere():
    """Two that outgrow one pool while the other is about to be free."""
    loop = Loop(num_ranks=2, num_pages=10, max_model_len=40, max_num_seqs=2, enable_prefix_caching=False)
    lengths = [(12, 24), (12, 3), (12, 24)]
    requests = [make(index, [index] * size, count) for index, (size, count) in enumerate(lengths)]
    for request in requests:
        loop.scheduler.add_request(request)
    loop.step()
    assert [request.rank for request in requests] == [0, 1, 0]
    loop.run()
    assert loop.scheduler.num_preemptions == 1
    assert (requests[2].rank, requests[2].num_preemptions) == (1, 1)
    for request in requests:
        check_output(request)


def test_priority_holds_over_all_ranks():
    loop = Loop(sync=True, num_ranks=2, max_num_seqs=1, policy="priority")
    for name, priority in (("low", 5), ("high", -1), ("mid", 0), ("mid2", 0)):
        loop.scheduler.add_request(make(name, [1, 2], 2, priority=priority))
    loop.run()
    assert [request.request_id for request in loop.finished] == ["high", "mid", "mid2", "low"]


def test_deadlines_and_aborts_reach_every_rank():
    loop = Loop(num_ranks=2, max_num_seqs=1)
    requests = [make(index, [index, 1], 30, deadline=5.0) for index in range(4)]
    for request in requests:
        loop.scheduler.add_request(request)
    loop.step(1.0)
    loop.scheduler.finish(requests[1], FinishReason.ABORT)
    loop.step(2.0)
    assert [request.slot for request in requests] == [0, -1, 0, -1]
    loop.step(6.0)
    assert loop.finished == [requests[0], requests[2], requests[3]]
    assert all(request.finish_reason == "abort" for request in requests)
    assert loop.scheduler.num_free_pages == loop.scheduler.num_pages


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("num_requests", "num_micro_batches"), [(8, 4), (5, 4), (13, 4), (2, 2), (7, 2)])
def test_every_stage_has_a_step_and_every_request_its_turn(num_requests, num_micro_batches, num_ranks):
    """A crowd that arrives at once is split into steps of about one size, and nobody falls behind."""
    loop = Loop(num_ranks=num_ranks, num_micro_batches=num_micro_batches, max_num_seqs=16, num_pages=400)
    requests = [make(index, [index, 1], 60) for index in range(num_requests * num_ranks)]
    for request in requests:
        loop.scheduler.add_request(request)
    for _ in range(5 * num_micro_batches):
        loop.step()
    for _ in range(30):
        step = loop.step()
        assert len(loop.in_flight) == num_micro_batches - 1
        for batch in step.batches:
            assert 1 <= batch.num_rows <= -(-num_requests // num_micro_batches)
    counts = [len(loop.scheduler.output_token_ids(request)) for request in requests]
    assert max(counts) - min(counts) <= 2
    loop.run()
    for request in requests:
        check_output(request)


def test_a_crowd_that_comes_late_is_split_up_and_whoever_waited_longest_goes_first():
    loop = Loop(num_micro_batches=4, max_num_seqs=16, num_pages=400, max_num_batched_tokens=64)
    slots = loop.scheduler.ranks[0].slots
    sizes, last = [], np.zeros(16, np.int64)
    for number in range(1, 61):
        if number in (1, 14):
            for index in range(8 if number == 1 else 5):
                loop.scheduler.add_request(make((number, index), [number, index], 40))
        known = slots.active & (slots.num_computed >= slots.num_fed) & (slots.num_known == slots.num_tokens)
        (batch,) = loop.step().batches
        left = np.setdiff1d(np.flatnonzero(known), batch.slots)
        decodes = batch.slots[: batch.num_decode]
        assert not len(left) or not len(decodes) or last[decodes].max() <= last[left].min()
        last[batch.slots] = number
        sizes.append(batch.num_rows)
    assert sizes[13] == 5 + 2  # all of the crowd in one step
    assert max(sizes[18:40]) == 4 and min(sizes[18:40]) >= 2


def test_chunks_of_a_prompt_follow_each_other_at_once():
    loop = Loop(num_micro_batches=4, max_num_batched_tokens=8)
    loop.scheduler.add_request(make("a", range(40), 4))
    chunks = [loop.step().batches[0].num_scheduled.tolist() for _ in range(5)]
    assert chunks == [[8]] * 5
    assert loop.step().num_rows == 0  # its first token is in flight
    loop.run()
    check_output(loop.finished[0])


def test_a_request_preempted_in_flight_waits_for_its_token():
    loop = Loop(num_micro_batches=4, num_pages=10, max_model_len=32, enable_prefix_caching=False)
    requests = [make(index, [index] * 13, 16) for index in range(2)]
    for request in requests:
        loop.scheduler.add_request(request)
    waited = 0
    while loop.scheduler.num_unfinished:
        loop.step()
        waited += requests[1].wait is Wait.TOKEN
        assert not (requests[1].wait is Wait.TOKEN and requests[1].slot >= 0)
    assert waited > 0 and requests[1].num_preemptions > 0
    for request in requests:
        check_output(request)

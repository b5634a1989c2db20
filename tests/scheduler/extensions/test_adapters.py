"""Adapters' slots: who gets one, who waits, and that nobody waits for ever or behind those who do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxengine.scheduler.base.request import Adapter, FinishReason, Request, RequestStatus
from jaxengine.scheduler.base.token_params import ADAPTER, TokenParams
from jaxengine.scheduler.scheduler import Scheduler
from tests.scheduler.loop import scheduler_config

CONFIG = scheduler_config(
    num_pages=64, page_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_adapters=2
)
A, B, C = (Adapter(name, name.encode() * 32) for name in "ABC")


def request(name, adapter=None, max_tokens=4, **fields):
    prompt = np.arange(1, 9, dtype=np.int32)
    made = Request(name, prompt, TokenParams(), max_tokens, lora=adapter and adapter.name, **fields)
    made.adapter = adapter
    return made


class Rig:
    """A scheduler whose loads are done when the test says so."""

    def __init__(self, config=CONFIG):
        self.scheduler = Scheduler(config)
        self.loads = []

    def add(self, *requests):
        for each in requests:
            self.scheduler.add_request(each)

    def step(self, load=True):
        """The ids of the requests with rows in a step."""
        step = self.scheduler.schedule()
        if load:
            self.loads += [adapter.name for _, adapter in self.scheduler.extension("adapters").slots.loads]
            for slot, adapter in self.scheduler.extension("adapters").slots.loads:
                self.scheduler.extension("adapters").slots.loaded(slot, adapter)
            self.scheduler.extension("adapters").slots.loads.clear()
        ids = []
        for rank, batch in zip(self.scheduler.ranks, step.batches, strict=True):
            for slot in batch.slots.tolist():
                owner = rank.slots.requests[slot]
                ids.append(owner.request_id)
                if owner.adapter is not None:
                    assert self.scheduler.extension("adapters").slots.owners[owner.adapter_slot] is owner.adapter
                    assert rank.slots.features[slot] & ADAPTER
        if step.num_rows:
            tokens = [np.full(batch.num_rows, 5, np.int32) for batch in step.batches]
            self.scheduler.update(step, tokens)
        return sorted(ids)

    def run(self, limit=200):
        """The ids of requests in the order in which they ended."""
        ended = []
        for _ in range(limit):
            before = list(self.scheduler.requests)
            self.step()
            ended += [each.request_id for each in before if each.status is RequestStatus.FINISHED]
            if not self.scheduler.num_unfinished:
                return ended
        raise AssertionError(f"{self.scheduler.num_unfinished} requests never ended")


def test_a_request_waits_for_its_adapter_and_nobody_behind_it():
    rig = Rig()
    rig.add(request("a", A), request("plain"))
    assert rig.step(load=False) == ["plain"]
    assert rig.scheduler.num_waiting == 1 and rig.scheduler.num_deferred == 1
    assert [adapter for _, adapter in rig.scheduler.extension("adapters").slots.loads] == [A]
    assert rig.step() == ["plain"] and rig.loads == ["A"]
    assert rig.step() == ["a", "plain"]


def test_slots_in_use_are_kept_and_the_least_recently_used_is_given_away():
    rig = Rig()
    rig.add(request("a", A), request("b", B))
    rig.run()
    rig.add(request("a2", A))
    rig.run()
    rig.add(request("c", C))
    rig.run()
    assert rig.loads == ["A", "B", "C"]
    assert {each.name for each in rig.scheduler.extension("adapters").slots.owners} == {"A", "C"}
    rig.add(request("long", A, 40), request("long c", C, 40))
    rig.step()
    rig.add(request("b", B, 1))
    for _ in range(10):
        assert rig.step() == ["long", "long c"]
    assert rig.run()[-1] == "b"


def test_a_crowd_of_one_adapter_does_not_keep_another_waiting_for_ever():
    rig = Rig()
    rig.add(request("a", A, 20), request("b", B, 20))
    rig.step()
    rig.step()
    rig.add(request("c", C, 2))
    ended = []
    for number in range(60):  # newcomers would keep both slots in use
        rig.add(request(f"a{number}", A, 20), request(f"b{number}", B, 20))
        before = list(rig.scheduler.requests)
        rig.step()
        ended += [each.request_id for each in before if each.status is RequestStatus.FINISHED]
    assert "c" in ended
    rig.run(3000)


def test_a_preempted_request_comes_back_to_its_adapter():
    config = scheduler_config(
        num_pages=12, page_size=4, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48, num_adapters=2
    )
    rig = Rig(config)
    rig.add(*(request(name, adapter, 30) for name, adapter in (("a", A), ("b", B), ("c", C))))
    assert sorted(rig.run(400)) == ["a", "b", "c"]
    assert rig.scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", [6, 19, 21, 23])
def test_one_that_was_preempted_and_one_that_came_later_do_not_wait_for_each_other(seed):
    """The later one has got the preempted one's slot, and newcomers would keep the other slot in use."""
    rng = np.random.default_rng(seed)
    rig = Rig(replace(CONFIG, num_pages=int(rng.integers(12, 20)), max_model_len=48))
    first = [request(f"x{n}", (A, B, A, B, C, C)[n], int(rng.integers(2, 30))) for n in range(6)]
    rig.add(*first[:4])
    for _ in range(rng.integers(1, 6)):
        rig.step(load=bool(rng.integers(2)))
    rig.add(*first[4:])
    for number in range(300):
        rig.add(request(f"a{number}", A, int(rng.integers(3, 9))))
        rig.step(load=bool(rng.integers(3)))
    assert rig.scheduler.num_preemptions > 0
    assert all(each.status is RequestStatus.FINISHED for each in first)


def test_whoever_is_aborted_while_waiting_leaves_nothing():
    rig = Rig()
    rig.add(request("a", A, 30), request("b", B, 30))
    rig.step()
    rig.step()
    waiting = request("c", C)
    rig.add(waiting)
    rig.step()
    rig.scheduler.finish(waiting, FinishReason.ABORT)
    assert not rig.scheduler.extension("adapters").slots.waiting and rig.scheduler.num_waiting == 0
    rig.add(request("a2", A))
    rig.step()
    assert "a2" in rig.step()
    rig.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_random_crowds_always_end(policy):
    """With loads that take random times, aborts and preemptions, every request ends with its own adapter's slot."""
    rng = np.random.default_rng(3)
    adapters = [None, *(Adapter(name, name.encode()) for name in "ABCDE")]
    rig = Rig(
        scheduler_config(
            num_pages=24,
            page_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=48,
            num_adapters=2,
            policy=policy,
        )
    )
    for number in range(300):
        fields = {"priority": int(rng.integers(3))} if policy == "priority" else {}
        fields |= {"client": str(rng.integers(3))} if policy == "fair" else {}
        rig.add(request(str(number), adapters[rng.integers(len(adapters))], int(rng.integers(1, 20)), **fields))
        for _ in range(rng.integers(3)):
            rig.step(load=bool(rng.integers(2)))
        if rng.integers(8) == 0 and rig.scheduler.num_unfinished:
            alive = list(rig.scheduler.requests)
            rig.scheduler.finish(alive[rng.integers(len(alive))], FinishReason.ABORT)
    rig.run(20000)
    assert not rig.scheduler.extension("adapters").slots.waiting


def test_digests_of_pages_begin_with_the_adapter():
    tokens = np.arange(16, dtype=np.int32)
    made = [request("x", adapter, cache_salt=salt) for adapter in (None, A, B) for salt in (None, "s")]
    for each in made:
        each.compute_with(b"")
    digests = {tuple(each.extend_page_hashes(tokens, 4)) for each in made}
    assert len(digests) == 6


def test_a_request_whose_adapter_is_replaced_keeps_its_digests_until_it_is_let_in_again():
    tokens, running, later = np.arange(16, dtype=np.int32), request("x", A), request("y", B)
    for each in (running, later):
        each.compute_with(b"")
    first = list(running.extend_page_hashes(tokens[:4], 4))
    running.adapter = B
    whole = list(running.extend_page_hashes(tokens, 4))
    assert whole[:1] == first and whole[1:] != later.extend_page_hashes(tokens, 4)[1:]
    running.compute_with(b"")
    assert running.extend_page_hashes(tokens, 4) == later.page_hashes

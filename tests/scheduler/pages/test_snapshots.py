"""States of prefixes, against a device that keeps the tokens each state was made of."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.scheduler.base.request import FinishReason
from jaxengine.scheduler.pages.snapshots import Hits, Snapshots
from tests.scheduler.fake_device import VOCAB_SIZE
from tests.scheduler.loop import Loop, check_output, make, random_request

POOLS = [(200, 0, 12), (18, 0, 3), (18, 5, 1)]
# Ranks, micro-batches, whether every step ends before the next begins, and pools.
ALWAYS = {*((1, 1, False, *pool) for pool in POOLS), (2, 1, False, *POOLS[1]), (1, 2, False, *POOLS[2])}
ALWAYS |= {(1, 1, True, *POOLS[1]), (2, 1, True, *POOLS[0])}
WAYS = [(*sizes, sync, *pool) for sizes in ((1, 1), (2, 1), (1, 2)) for sync in (False, True) for pool in POOLS]


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "sync", "num_pages", "threshold", "num_snapshots"),
    [pytest.param(*way, marks=[] if way in ALWAYS else pytest.mark.thorough("a further pair")) for way in WAYS],
)
def test_every_row_goes_on_from_its_own_state(sync, num_ranks, num_micro_batches, num_pages, threshold, num_snapshots):
    rng = np.random.default_rng(num_pages + threshold)
    loop = Loop(
        sync=sync,
        num_pages=num_pages,
        num_ranks=num_ranks,
        num_micro_batches=num_micro_batches,
        long_prefill_token_threshold=threshold,
        num_snapshots=num_snapshots,
    )
    shared = rng.integers(0, VOCAB_SIZE, 40).astype(np.int32)
    requests = [random_request(rng, index, shared=shared) for index in range(80)]
    for index, request in enumerate(requests):
        loop.scheduler.add_request(request)
        if index == 40:
            loop.scheduler.reset_prefix_cache()
        if rng.random() < 0.1:
            loop.scheduler.finish(requests[int(rng.integers(index + 1))], FinishReason.ABORT)
        if rng.random() < 0.5:
            loop.step()
    loop.run()
    for request in loop.finished:
        check_output(request)
    assert loop.device.num_loaded > 0 and loop.scheduler.num_prefix_hits > 0
    assert (loop.scheduler.num_preemptions > 5) == (num_pages == 18)


def test_a_longer_prompt_and_one_that_branches_off():
    """The third that shares a beginning finds its state: the second has kept it where it left the first."""
    loop = Loop(num_snapshots=8, max_num_batched_tokens=40)
    cached = []
    for index, prompt in enumerate([range(20), range(30), [*range(10), 7, *range(12)], [*range(10), 9, 9, 9], [1, 2]]):
        request = make(index, list(prompt), 2)
        loop.scheduler.add_request(request)
        loop.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 16, 0, 8, 0]


def test_a_state_is_found_from_the_next_step_on_and_the_least_recently_used_goes_first():
    snapshots = Snapshots(2, 4, 4)
    a, b, c, d = (bytes([number]) for number in range(4))
    snapshots.begin(0, None, snapshots.borders(Hits(0, (), 0), 9))
    assert snapshots.cut(0, 0, 9) == 8 and snapshots.cut(0, 8, 1) == 1
    snapshots.keep(0, [d, a], 8, 8)
    assert not snapshots.has(a)
    snapshots.begin_step()
    assert snapshots.has(a) and not snapshots.has(d)
    snapshots.begin(1, None, [8])
    snapshots.keep(1, [d, b], 8, 1)  # a row of one token
    snapshots.keep(1, [d, b], 8, 2)
    snapshots.begin_step()
    snapshots.begin(2, a, [8])
    snapshots.keep(2, [d, c], 8, 2)  # takes b's place: a is being read
    snapshots.keep(1, [d, d], 8, 2)  # and now nothing is left in this step
    snapshots.begin_step()
    assert [snapshots.has(each) for each in (a, b, c, d)] == [True, False, True, False]
    entries = snapshots.take_entries()
    assert entries is not None and snapshots.take_entries() is None
    snapshots.reset()
    assert not snapshots.has(a)

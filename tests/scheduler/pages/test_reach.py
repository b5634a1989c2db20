"""How far a prefix reaches with pages stored elsewhere, against a search that tries every length; and what observes the
pages that leave.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.pages.groups import PageTables, page_key
from jaxengine.scheduler.pages.page_pool import PagePool
from jaxengine.scheduler.pages.reach import reach, state_key
from jaxengine.scheduler.pages.snapshots import Snapshots

DIGESTS = [hashlib.sha256(str(number).encode()).digest() for number in range(6)]


def tables_of(windows, num_snapshots=0) -> PageTables:
    return PageTables(
        SchedulerConfig(
            num_pages=64,
            page_size=4,
            max_num_seqs=2,
            max_num_batched_tokens=32,
            max_model_len=32,
            windows=windows,
            num_snapshots=num_snapshots,
        )
    )


def needed(columns: int, windows) -> list[bytes]:
    """Keys of the pages that a token after so many columns of four sees."""
    first = [0 if window is None else max(0, 4 * columns - (window - 1)) // 4 for window in windows]
    return [
        page_key(DIGESTS[at], group) for at in range(columns) for group in range(len(windows)) if at >= first[group]
    ]


@pytest.mark.parametrize("windows", [(None,), (6, None), (3, 9), (5, None, None)])
@pytest.mark.parametrize("num_snapshots", [0, 3])
def test_the_longest_prefix_is_found(windows, num_snapshots):
    rng = np.random.default_rng(0)
    for _ in range(60):
        tables = tables_of(windows, num_snapshots)
        keys = [page_key(digest, group) for digest in DIGESTS for group in range(len(windows))]
        here = [key for key in keys if rng.random() < 0.5]
        stored = {key for key in keys if rng.random() < 0.7}
        states = [digest for digest in DIGESTS if num_snapshots and rng.random() < 0.3][:num_snapshots]
        stored |= {state_key(digest) for digest in DIGESTS if rng.random() < 0.4}
        for page, key in zip(tables.pool.allocate(len(here)).tolist(), here, strict=True):
            tables.pool.register(page, key)
        for digest in states:
            assert tables.snapshots is not None and tables.snapshots.put(digest) is not None
        if tables.snapshots is not None:
            tables.snapshots.begin_step()
        found = reach(tables, DIGESTS, stored.__contains__)

        def is_possible(columns: int, here=here, stored=stored, states=states) -> bool:
            has_state = not num_snapshots or (
                DIGESTS[columns - 1] in states or state_key(DIGESTS[columns - 1]) in stored
            )
            return has_state and all(key in here or key in stored for key in needed(columns, windows))

        longest = max((columns for columns in range(1, 7) if is_possible(columns)), default=0)
        assert found.num_columns == longest
        wanted = [key for key in needed(longest, windows) if key not in here]
        if num_snapshots and longest and DIGESTS[longest - 1] not in states:
            wanted.append(state_key(DIGESTS[longest - 1]))
        assert sorted(found.missing) == sorted(wanted) and sorted(found.pages) == sorted(needed(longest, windows))
        # Without a store it is what the pool alone serves, and once all has come, the pool serves it.
        alone = reach(tables, DIGESTS, lambda key: False)
        assert (alone.num_columns, alone.missing) == (tables.lookup(DIGESTS).num_columns, [])
        for page, key in zip(tables.pool.allocate(len(wanted)).tolist(), wanted, strict=True):
            if len(key) > 33:
                assert tables.snapshots is not None and tables.snapshots.put(key[:32]) is not None
            else:
                tables.pool.register(page, key)
        assert tables.lookup(DIGESTS).num_columns == longest


@dataclass
class Listener:
    """Remembers what it is told."""

    events: list = field(default_factory=list)

    def registered(self, digest, page):
        self.events.append(("registered", digest, page))

    def evicted(self, digests, pages):
        self.events.append(("evicted", list(digests), list(pages)))

    def forgotten(self):
        self.events.append(("forgotten",))


def test_a_listener_hears_of_pages_before_they_are_taken():
    pool = PagePool(4)
    pool.listeners = [listener := Listener()]
    pages = pool.allocate(3)
    for page, digest in zip(pages.tolist(), DIGESTS, strict=False):
        pool.register(page, digest)
        pool.register(page, digest)  # is registered already
    pool.free(pages)
    assert listener.events == [("registered", DIGESTS[at], int(pages[at])) for at in range(3)]
    listener.events.clear()
    taken = pool.allocate(2)  # the blank one, and the last of the sequence
    assert listener.events == [("evicted", [DIGESTS[2]], [int(pages[2])])] and pages[2] in taken
    pool.reset_prefix_cache()
    assert listener.events[-1] == ("forgotten",)
    listener.events.clear()
    pool.allocate(2)  # which nobody could find any more
    assert listener.events == []


def test_a_listener_hears_of_snapshots():
    snapshots = Snapshots(1, 2, 4)
    snapshots.listener = Listener()
    assert snapshots.put(DIGESTS[0]) == 0 and snapshots.has(DIGESTS[0]) and snapshots.put(DIGESTS[0]) is None
    assert snapshots.put(DIGESTS[1]) is None  # the first may not be written yet
    snapshots.begin_step()
    assert snapshots.put(DIGESTS[1]) == 0 and not snapshots.has(DIGESTS[0])
    assert snapshots.listener.events == [("evicted", [DIGESTS[0]], [0])]
    snapshots.begin(0, DIGESTS[1], [8])
    assert snapshots.put(DIGESTS[2]) is None  # a step reads the only one
    snapshots.begin_step()
    snapshots.keep(0, [DIGESTS[0], DIGESTS[3]], 8, 4)
    assert snapshots.listener.events[1:] == [("evicted", [DIGESTS[1]], [0]), ("registered", DIGESTS[3], 0)]

"""Queues of KV pages that are kept until there is room to copy them to host memory, and keys that are pinned there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxengine.engine.extensions.offload.offload import Offload
from jaxengine.engine.extensions.offload.page_stores import Tiers
from jaxengine.runner.extensions.offload import SIZES
from jaxengine.scheduler.pages.groups import PageTables, page_key
from jaxengine.scheduler.pages.reach import state_key
from jaxengine.scheduler.rank import Rank

# Time limit of copying all pages of the pools; pages that are not copied by then are lost.
_KEEP_SECONDS = 120.0


class KeptKeys:
    """Keys that are pinned in host memory, with the number of owners of each key."""

    def __init__(self, tiers: Tiers):
        """Begin without keys."""
        self._tiers = tiers
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Return the number of kept keys."""
        return len(self._counts)

    def __contains__(self, key: bytes) -> bool:
        """Return whether a key has an owner."""
        return key in self._counts

    def keep(self, keys: Sequence[bytes]) -> None:
        """Pin these keys in host memory for one more owner."""
        self._tiers.pin(keys)
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def release(self, keys: Sequence[bytes]) -> list[bytes]:
        """Unpin these keys for one owner; return those that have no owner left. Each key must have an owner."""
        self._tiers.unpin(keys)
        gone = []
        for key in keys:
            if (count := self._counts.pop(key) - 1) > 0:
                self._counts[key] = count
            else:
                gone.append(key)
        return gone


class DueCopies:
    """Queue of pages to be copied to host memory.

    Each page has a reference until its copy is dispatched, so that no request overwrites it. When the pools forget
    their pages, the queue is discarded.
    """

    def __init__(self, offload: Offload):
        """Create an empty queue. offload: dispatches the copies."""
        self._offload = offload
        self._due: deque[tuple[Rank, bytes, int]] = deque()
        self._num_forgotten = 0

    def __bool__(self) -> bool:
        """Return whether copies are due."""
        return bool(self._due)

    def add(self, rank: Rank, keys: Iterable[bytes], found: dict[bytes, int]) -> None:
        """Queue, and reference, the pages of a replica's pool whose keys are neither in host memory nor on their way to
        it. A key that is queued already is queued again.

        found: the page or snapshot of each key that the replica has; other keys are left out. Copies of snapshots,
        which cannot be referenced, are dispatched at once.
        """
        states = {}
        for key in keys:
            if key not in found or is_here(self._offload, key):
                continue
            if key.endswith(state_key(b"")):
                states[key] = found[key]
            else:
                rank.pool.acquire(np.array([found[key]], np.int32))
                self._due.append((rank, key, found[key]))
        if states:
            self._offload.save(rank.index, {}, states)

    def discard(self, keys: set[bytes]) -> None:
        """Remove the pages of these keys from the queue, and free their references."""
        kept = deque(each for each in self._due if each[1] not in keys)
        for rank, key, page in self._due:
            if key in keys:
                rank.pool.free(np.array([page], np.int32))
        self._due = kept

    def clear(self) -> None:
        """Remove all pages from the queue, and free their references."""
        self.discard({key for _, key, _ in self._due})

    def advance(self) -> list[bytes]:
        """Dispatch the copies that there is room for, free their references, and return their keys. If the pools have
        forgotten their pages, as before sleep, the queue is discarded first.
        """
        done = []
        if self._num_forgotten != self._offload.orders.num_forgotten:
            self._num_forgotten = self._offload.orders.num_forgotten
            self.clear()
        while self._due and (room := self._offload.stores.room):
            rank, pages = self._due[0][0], dict[bytes, int]()
            while self._due and self._due[0][0] is rank and len(pages) < room and self._due[0][1] not in pages:
                _, key, page = self._due.popleft()
                pages[key] = page
            self._offload.save(rank.index, pages, {})
            rank.pool.free(np.array(list(pages.values()), np.int32))
            done += pages
        return done


@contextmanager
def kept(offload: Offload, ranks: Sequence[Rank]) -> Iterator[None]:
    """Context in which host memory keeps the pages of the replicas' pools although the pools forget them.

    At the start, copies all pages and snapshots that prefixes can find to host memory, as far as it can hold them, and
    waits for the copies up to _KEEP_SECONDS; pages not copied by then are lost. At the end, marks host memory as valid
    for the pools' new state. No step may be in flight.
    """
    due, end = DueCopies(offload), time.monotonic() + _KEEP_SECONDS
    due.advance()
    most = offload.tiers.host.capacity // offload.mover.block_bytes
    for rank in ranks:
        pool, states = rank.pool, rank.pages.snapshots
        found = {key: pool.find(key) for key in pool.digests}
        found |= {} if states is None else {state_key(each): states.find(each) for each in states.digests}
        there = {key: row for key, row in found.items() if row is not None}
        keys = list(there)[max(0, len(there) - most) :]
        for first in range(0, len(keys), SIZES[-1]):
            due.add(rank, keys[first : first + SIZES[-1]], there)
            while due and time.monotonic() < end:
                due.advance()
                offload.stores.flush(end)
    offload.stores.flush(end)
    due.clear()
    yield
    offload.generation = offload.orders.num_forgotten


def found_columns(tables: PageTables, digests: list[bytes]) -> list[dict[bytes, int | None]]:
    """Return, for each cache group, a dict from page key to page id, in the order of `digests`, and if the model has
    states a last dict from state key to snapshot; the value is None where the pool lacks the key.
    """
    keys = [[page_key(digest, group) for digest in digests] for group in range(tables.num_groups)]
    found: list[dict[bytes, int | None]] = [{key: tables.pool.find(key) for key in own} for own in keys]
    if tables.snapshots is not None:
        found.append({state_key(digest): tables.snapshots.find(digest) for digest in digests})
    return found


def is_here(offload: Offload, key: bytes) -> bool:
    """Return whether host memory has a key, or a dispatched copy will bring it there."""
    return key in offload.tiers.host or key in offload.tiers.arriving

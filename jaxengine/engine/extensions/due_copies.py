"""Pages that are to be copied to host memory as there is room, which nobody may take until then; keys that stay."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from jaxengine.engine.extensions.offload import Offload
from jaxengine.engine.extensions.page_stores import Tiers
from jaxengine.scheduler.pages.groups import PageTables, page_key
from jaxengine.scheduler.pages.reach import state_key
from jaxengine.scheduler.rank import Rank


class KeptKeys:
    """Keys that are pinned in host memory, each as often as somebody keeps it."""

    def __init__(self, tiers: Tiers):
        self._tiers = tiers
        self._counts: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    def keep(self, keys: Sequence[bytes]) -> None:
        """Keep keys once more."""
        self._tiers.pin(keys)
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def release(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keep keys once less; return those that nobody keeps any more."""
        self._tiers.unpin(keys)
        gone = []
        for key in keys:
            if (count := self._counts.pop(key) - 1) > 0:
                self._counts[key] = count
            else:
                gone.append(key)
        return gone


class DueCopies:
    """Pages of a replica's pool with a reference each, in order."""

    def __init__(self, offload: Offload):
        self._offload = offload
        self._due: deque[tuple[Rank, bytes, int]] = deque()
        self._num_forgotten = 0

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(self, rank: Rank, keys: Iterable[bytes], found: dict[bytes, int]) -> None:
        """Have pages copied that host memory lacks. found: the page or snapshot of each key that the replica has;
        snapshots, which cannot be held, are copied at once.
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
        """Copy these pages no more."""
        kept = deque(each for each in self._due if each[1] not in keys)
        for rank, key, page in self._due:
            if key in keys:
                rank.pool.free(np.array([page], np.int32))
        self._due = kept

    def advance(self) -> list[bytes]:
        """Dispatch the copies that there is room for; return their keys. Once pools have forgotten their pages, as
        before they are given up in sleep, what was due is not copied any more.
        """
        done = []
        if self._num_forgotten != self._offload.orders.num_forgotten:
            self._num_forgotten = self._offload.orders.num_forgotten
            self.discard({key for _, key, _ in self._due})
        while self._due and (room := self._offload.stores.room):
            rank, pages = self._due[0][0], dict[bytes, int]()
            while self._due and self._due[0][0] is rank and len(pages) < room and self._due[0][1] not in pages:
                _, key, page = self._due.popleft()
                pages[key] = page
            self._offload.save(rank.index, pages, {})
            rank.pool.free(np.array(list(pages.values()), np.int32))
            done += pages
        return done


def found_columns(tables: PageTables, digests: list[bytes]) -> list[dict[bytes, int | None]]:
    """Return the page of each column by its key, for each cache group, and then the snapshots after them if there are
    any; None for what the pool lacks.
    """
    keys = [[page_key(digest, group) for digest in digests] for group in range(tables.num_groups)]
    found: list[dict[bytes, int | None]] = [{key: tables.pool.find(key) for key in own} for own in keys]
    if tables.snapshots is not None:
        found.append({state_key(digest): tables.snapshots.find(digest) for digest in digests})
    return found


def is_here(offload: Offload, key: bytes) -> bool:
    """Whether host memory has a key, or a copy brings it there."""
    return key in offload.tiers.host or key in offload.tiers.arriving

"""Loads of stored pages, and the free pages and slots of a replica as room for them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.rank import Rank

# A load from another engine of which nothing has come for so many seconds has no claim to room.
STALL_SECONDS = 1.0


@dataclass(eq=False)
class Load:
    """The stored pages and state that a waiting request needs.

    Attributes:
      request: the waiting request.
      rank: replica that the request is likely to run on.
      pages: keys of the pages of the prefix, in the order of their columns.
      keys: keys of the pages to load, those that the replica lacks, and after them that of a state, if any.
      num_tokens: number of tokens that need not be computed once all are loaded.
      num_more: number of pages that the request needs in addition to `pages` when it is admitted.
      is_far: whether another engine has some of the keys.
      came: time.monotonic() seconds at which a part of them came last, -inf before; the engine's extension sets it.
      is_done: whether all that came has been written into the pool; the engine's extension sets it.
    """

    request: Request
    rank: int
    pages: list[bytes]
    keys: list[bytes]
    num_tokens: int
    num_more: int = 0
    is_far: bool = False
    came: float = float("-inf")
    is_done: bool = False

    @property
    def has_claim(self) -> bool:
        """Whether room is kept for the load: it needs no other engine, or a part of it has come, from wherever, and no
        longer than STALL_SECONDS ago if it is in progress.
        """
        if not self.is_far or (self.is_done and self.came > float("-inf")):
            return True
        return time.monotonic() - self.came < STALL_SECONDS


class _Claims:
    """Loads, with the free pages that they and their requests take; pages of several loads count once.

    Attributes:
      loads: the loads, the oldest first.
      pages: keys of their pages that were free, with the number of loads that have them.
    """

    def __init__(self) -> None:
        """Begin without loads."""
        self.loads: list[Load] = []
        self.pages = Counter[bytes]()
        self._num_more = 0

    @property
    def num_pages(self) -> int:
        """Number of pages of all loads and their requests."""
        return len(self.pages) + self._num_more

    def add(self, load: Load, free: list[bytes]) -> None:
        """Count a load. free: keys of its pages that were free when it began."""
        self.loads.append(load)
        self.pages.update(free)
        self._num_more += load.num_more

    def remove(self, load: Load, free: list[bytes]) -> None:
        """Stop counting a load. free: the keys that `add` was given."""
        self.loads.remove(load)
        self._num_more -= load.num_more
        for key in free:
            self.pages[key] -= 1
            if not self.pages[key]:
                del self.pages[key]


class LoadRoom:
    """Free pages and slots of one replica as room for loads.

    The slot and the pages of a request count from the start of its load until the request runs or has ended. Those of a
    load from another engine count only while it has a claim (`Load.has_claim`). Before that, and while nothing comes,
    they count only for other loads from other engines, so that a dead or slow engine delays no load from this engine's
    own store for long. If its pages come after all, they may replace those of other loads, whose tokens are then
    computed.

    Pages that running requests hold are not free and do not count; pages of several loads count once.

    Attributes:
      rank: the replica.
      loads: the load of each request that counts.
    """

    def __init__(self, rank: Rank):
        """Begin without loads, for this replica."""
        self.rank = rank
        self.loads: dict[Request, Load] = {}
        self._free_keys: dict[Load, list[bytes]] = {}  # keys of the pages that were free when the load began
        self._claims, self._expected = _Claims(), _Claims()  # loads with a claim, and those without one

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose pages the loads bring or use."""
        return sum(len(load.pages) for load in self.loads.values()) * self.rank.config.page_size

    def num_pages(self, load: Load) -> int:
        """Return the number of free pages that a load and its request would take in addition to those with a claim."""
        return sum(key not in self._claims.pages for key in self._free(load)) + load.num_more

    def fits(self, num_pages: int, is_far: bool = False) -> bool:
        """Return whether the first request in the queue may begin a load that takes `num_pages` free pages: a slot and
        pages are left, beyond `Rank.num_reserved`, or no load that counts for it is in progress.

        In the latter case nothing might ever run if it waited for the others, which may wait for what this request has.

        is_far: the load is from another engine, so that loads without a claim count as well.
        """
        counted = self._counted(is_far)
        if all(load.is_done for claims in counted for load in claims.loads):
            return True
        free = self.rank.pool.num_free - self.rank.num_reserved - sum(claims.num_pages for claims in counted)
        return sum(len(claims.loads) for claims in counted) < self.rank.slots.num_free and num_pages <= free

    def leader(self, load: Load) -> Load | None:
        """Return a load in progress for which `load` must wait, because it brings some of its pages, or because both
        are from other engines and there is room for one only; None if there is none.

        A load from this engine's own store does not wait for one without a claim.
        """
        for claims in self._counted(load.is_far):
            keys = {key for key in load.keys if key in claims.pages}
            others = claims.loads if keys else ()
            for each in others:
                if not each.is_done and not keys.isdisjoint(each.keys):
                    return each
        num_pages = self.num_pages(load)
        if not load.is_far or self.fits(num_pages, is_far=True) or not self.fits(num_pages):
            return None
        return next((each for each in self._expected.loads if not each.is_done), None)

    def is_in_progress(self, load: Load) -> bool:
        """Return whether a load has begun and neither it nor its request has ended."""
        return not load.is_done and load.request in self.loads

    def begin(self, load: Load) -> None:
        """Count the slot and the pages of a load from now on."""
        self.loads[load.request], self._free_keys[load] = load, (free := self._free(load))
        (self._claims if load.has_claim else self._expected).add(load, free)

    def remove(self, request: Request) -> None:
        """Count the pages of a request no longer; do nothing if it has no load."""
        if (load := self.loads.pop(request, None)) is not None:
            claims = self._claims if load in self._claims.loads else self._expected
            claims.remove(load, self._free_keys.pop(load))

    def _counted(self, is_far: bool) -> list[_Claims]:
        """Return the loads that count for another one, which is from another engine if `is_far`.

        Loads from other engines get a claim first if their pages come, and lose it if they have stalled.
        """
        both = self._claims, self._expected
        for claims, other in (both, both[::-1]):
            for load in [each for each in claims.loads if each.has_claim != (claims is self._claims)]:
                claims.remove(load, self._free_keys[load])
                other.add(load, self._free_keys[load])
        return list(both) if is_far else [self._claims]

    def _free(self, load: Load) -> list[bytes]:
        """Return the keys of a load's pages that no running request holds."""
        pool = self.rank.pool
        pages = {key: page for key in load.pages if (page := pool.find(key)) is not None}
        return [key for key in load.pages if key not in pages or not pool.ref_count[pages[key]]]

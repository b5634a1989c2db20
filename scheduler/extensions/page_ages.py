"""Ages of cached pages: how long a random sample of them stays, and when requests find them."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

NAME = "page_ages"
# Number of times at which a page was found that are kept, as many as in vLLM.
_MOST_TIMES = 4


@dataclass(frozen=True)
class PageAgeOptions:
    """Options of page ages. sample: share of the pages that are observed, above 0."""

    sample: float

    def extension(self) -> PageAges:
        """Return a new scheduler extension with this share."""
        return PageAges(self.sample)


@dataclass
class PageAge:
    """Times of a cached page, of time.monotonic.

    Attributes:
      filled: when the page was registered.
      found: when requests began with it, at most the last four times.
    """

    filled: float
    found: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))


class PageAges(SchedulerExtension):
    """Scheduler extension that observes the ages of each replica's pages.

    Attributes:
      sample: share of the pages that are observed.
      evicted: called with the time and the PageAge of an observed page that is evicted.
    """

    name: ClassVar[str] = NAME
    ranks: Sequence[RankAges] = ()

    def __init__(self, sample: float):
        """Start with an `evicted` that does nothing. sample: share of the pages that are observed."""
        self.sample = sample
        self.evicted: Callable[[float, PageAge], None] = lambda now, page: None

    def start(self, ranks: Sequence[Rank]) -> None:
        """Create `ranks`, which listen to the replicas' pools from then on."""
        self.ranks = [RankAges(self, rank) for rank in ranks]


class RankAges(RankExtension):
    """Listener of one replica's page pool, which observes a random sample of the pages, from registration to eviction.

    Attributes:
      ages: PageAge of the observed pages, by page id. numbers: page ids of the observed pages, by digest.
    """

    def __init__(self, parent: PageAges, rank: Rank):
        """Start without observed pages, and listen to the replica's pool. The replica's number is the seed of the
        sample.
        """
        self.ages: dict[int, PageAge] = {}
        self.numbers: dict[bytes, int] = {}
        self._parent, self._draw = parent, random.Random(rank.index)
        rank.pool.listeners.append(self)

    def registered(self, digest: bytes, page: int) -> None:
        """Observe the page from now on, with probability `sample`."""
        if self._draw.random() < self._parent.sample:
            self.ages[page] = PageAge(time.monotonic())
            self.numbers[digest] = page

    def dropped(self, digest: bytes) -> None:
        """Stop observing the page with this digest, if it is observed, without calling PageAges.evicted."""
        if (page := self.numbers.pop(digest, None)) is not None:
            del self.ages[page]

    def evicted(self, digests: Sequence[bytes], pages: Sequence[int]) -> None:
        """Stop observing the pages with these digests, and call PageAges.evicted for each observed one. `pages` is not
        used.
        """
        now = time.monotonic()
        for digest in digests:
            if (page := self.numbers.pop(digest, None)) is not None:
                self._parent.evicted(now, self.ages.pop(page))

    def forgotten(self) -> None:
        """Stop observing all pages, without calling PageAges.evicted."""
        self.ages.clear()
        self.numbers.clear()

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Record the present time in `found` of each observed page of the request's cached prefix, `hits`."""
        now = time.monotonic()
        for page in (page for group in hits.pages for page in group.tolist() if page in self.ages):
            self.ages[page].found.append(now)

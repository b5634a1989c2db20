"""Protocol between a replica's schedule and optional capabilities.

A capability is a file of `scheduler/extensions`. A replica (Rank) calls all those that its engine was started with
alike, and names none.
"""

from __future__ import annotations

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledBatch
from jaxengine.scheduler.pages.snapshots import Hits


class RankExtension:
    """Base class of a capability's part in one replica's schedule. Methods are listed in the order in which a step
    calls them. Those of the base class do nothing, except that `chunk` returns its argument `count`.
    """

    def begin(self) -> None:
        """Prepare for a new step. Rank.begin calls it before the step has rows. The base class does nothing."""

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return how many of a request's tokens [start, start + count) the step can compute; 0 defers the request.

        hits: the cached prefix of a request that is not admitted yet; None for a running one. Must reserve nothing,
        because the request may get no row, or fewer tokens. The base class returns `count`.
        """
        return count

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Reserve what the request's tokens [start, start + count), which `chunk` allowed, need in the step being
        scheduled. The request has its slot and its pages. The base class does nothing.
        """

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Set up the slot of an admitted request with `num_known` known tokens, of which those in `hits` are computed.
        Called once for each admission, after `reserve`. The base class does nothing.
        """

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Record that the step computes `count` > 0 tokens of a prefill, after which `num_computed` of the request's
        tokens are computed. Called after its full pages were registered in the prefix cache. The base class does
        nothing.
        """

    def complete(self, batch: ScheduledBatch) -> None:
        """Add this capability's data to the replica's batch, in place. Called before the batch's tokens are counted as
        computed. The base class does nothing.
        """

    def release(self, slot: int) -> None:
        """Free what the capability holds for a slot, whose request has just lost it (it ended, was preempted or is
        held). The base class does nothing.
        """

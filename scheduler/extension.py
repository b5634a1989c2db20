"""Protocol between a replica's schedule and optional capabilities.

A capability is a file in `scheduler/extensions`. A replica (Rank) calls all capabilities with which its engine was
started in the same way, and does not refer to any of them by name.
"""

from __future__ import annotations

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledBatch
from jaxengine.scheduler.pages.snapshots import Hits


class RankExtension:
    """Base class of a capability's part in one replica's schedule. The methods are in the order in which a step calls
    them.
    """

    def begin(self) -> None:
        """Prepare for a new step, which has no rows yet. The base class does nothing."""

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return how many of a request's tokens [start, start + count) the step can compute; 0 defers the request.

        hits: the cached prefix of a request that is not admitted yet; None for a running request. Nothing may be
        reserved here, because the request may get no row. The base class returns `count`.
        """
        return count

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Reserve what the request's tokens [start, start + count), which `chunk` has allowed, need in the step being
        scheduled. The request already has its slot and pages. The base class does nothing.
        """

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Set up the slot of an admitted request with `num_known` known tokens, of which those in `hits` are already
        computed. Called once per admission, after `reserve`. The base class does nothing.
        """

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Record that the step computes `count` > 0 tokens of a prefill, so that `num_computed` of the request's tokens
        will be computed. Called after its full pages were registered in the prefix cache. The base class does nothing.
        """

    def complete(self, batch: ScheduledBatch) -> None:
        """Add this capability's data to the replica's batch, in place. Called before the batch's tokens are counted as
        computed. The base class does nothing.
        """

    def release(self, slot: int) -> None:
        """Free what the capability holds for a slot whose request has just lost it, because it has ended, was preempted
        or is held outside the queue. The base class does nothing.
        """

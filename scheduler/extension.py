"""Protocol between a replica's schedule and optional capabilities.

A capability is a file of `scheduler/extensions`. A replica (Rank) calls all those that its engine was started with
alike, and names none.
"""

from __future__ import annotations

from jaxengine.scheduler.batch import ScheduledBatch
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.request import Request


class RankExtension:
    """Base class of a capability's part in one replica's schedule. Methods are listed in the order in which a step
    calls them.
    """

    def begin(self) -> None:
        """Prepare for a new step."""

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return how many of a request's tokens [start, start + count) the step can compute; 0 defers the request.

        hits: the cached prefix of a request that is not admitted yet; None for a running one.
        """
        return count

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Reserve what these tokens, which `chunk` allowed, need. The request has its slot."""

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Set up the slot of an admitted request with `num_known` known tokens, of which those in
        `hits` are computed.
        """

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Record that the step computes `count` tokens of a request, after which `num_computed` of its tokens are
        computed.
        """

    def complete(self, batch: ScheduledBatch) -> None:
        """Add this capability's data to the replica's batch, before its tokens are counted as computed."""

    def release(self, slot: int) -> None:
        """Free what the capability holds for a slot."""

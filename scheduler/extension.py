"""What an optional capability does in one rank's schedule.

A capability is a file of `scheduler/extensions`. The rank calls all of those that its engine was started with alike,
and names none.
"""

from __future__ import annotations

from jaxengine.scheduler.batch import ScheduledBatch
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.request import Request


class RankExtension:
    """Takes part in one rank's schedule. The methods are listed in the order in which a step calls them."""

    def begin(self) -> None:
        """Starts a step."""

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Tokens of [start, start + count) of a request that the step can compute, at most `count`; 0 defers it.

        hits: the cached prefix of a request that is not admitted yet; None for a running one.
        """
        return count

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Takes what the tokens that `chunk` allowed need. The request has its slot."""

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Sets up the slot of a request that was admitted with `num_known` tokens, those of `hits` computed."""

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Records that the step computes `count` tokens of a request, after which `num_computed` are computed."""

    def complete(self, batch: ScheduledBatch) -> None:
        """Adds this capability's part to the rank's batch, before its tokens are counted as computed."""

    def release(self, slot: int) -> None:
        """Gives back what a slot has taken."""

"""Protocol between the scheduler and optional capabilities, for decisions that concern all replicas.

`SchedulerConfig.extensions` holds the options of the capabilities that an engine was started with. Each becomes one
`SchedulerExtension`, which has a `RankExtension` for every replica if it takes part in their schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.rank import Rank


class SchedulerExtension:
    """Base class of a capability's part in decisions that concern all replicas.

    Attributes:
      name: of the capability.
      ranks: its RankExtension of each replica, in order; empty if it has none.
    """

    name: ClassVar[str]
    ranks: Sequence[RankExtension] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Attach to the scheduler's replicas and make `ranks`, if it has any; called once, when they exist. Does
        nothing here.
        """

    def admits(self, request: Request) -> bool:
        """Whether the first request in the queue may run; if not, it waits apart until `ready` returns it. True here.
        May be asked again for one request, since another extension or want of room may keep it waiting.
        """
        return True

    def ready(self) -> Iterable[Request]:
        """Return the requests that need not wait apart any longer; the scheduler asks in every step and queues them.
        Returns none here.
        """
        return ()

    def decode_width(self) -> int:
        """Give drafts to the decodes of the step being scheduled, whose rows are chosen; return the most tokens that
        one has, at least 1. Returns 1 here.
        """
        return 1

    def complete(self, step: ScheduledStep) -> None:
        """Add this capability's data to the step of all replicas, in place, after their batches were committed. Does
        nothing here.
        """

    def preempted(self, request: Request) -> str | None:
        """Note that a request has lost its slot for want of pages. Returns the mode, in capitals, by which it gets them
        back, for the log; None (here) leaves "RECOMPUTE".
        """
        return None

    def weights_replaced(self) -> None:
        """Note that requests go on with other weights than those that the digests of their pages name. Does nothing
        here.
        """

    def reset_cache(self) -> None:
        """Drop cached state that only later requests could use. Does nothing here."""

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
      ranks: the RankExtension of each replica, in order; empty if there is none.
    """

    name: ClassVar[str]
    ranks: Sequence[RankExtension] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Attach to the scheduler's replicas and create `ranks`, if there are any. Called once, when the replicas
        exist. The base class does nothing.
        """

    def admits(self, request: Request) -> bool:
        """Return whether the first request in the queue may run. If not, it is held outside the queue until `ready`
        returns it. May be called again for one request, since another extension or lack of room may keep it waiting.
        The base class returns True.
        """
        return True

    def ready(self) -> Iterable[Request]:
        """Return the requests that need not be held outside the queue any longer. The scheduler calls it in every step
        and queues them. The base class returns none.
        """
        return ()

    def decode_width(self) -> int:
        """Give drafts to the decodes of the step being scheduled, whose rows are chosen, and return the number of
        tokens per decode of the bucket that the step needs, at least 1. The base class returns 1.
        """
        return 1

    def complete(self, step: ScheduledStep) -> None:
        """Add this capability's data to the step of all replicas, in place. Called after their batches were committed.
        The base class does nothing.
        """

    def preempted(self, request: Request) -> str | None:
        """Called when a request has lost its slot for lack of pages. Return the mode, in capitals, by which it gets its
        pages back, for the log. The base class returns None, for which the log says "RECOMPUTE".
        """
        return None

    def weights_replaced(self) -> None:
        """Called when requests continue with other weights than those that the digests of their pages name. The base
        class does nothing.
        """

    def reset_cache(self) -> None:
        """Drop cached state that only later requests could use. The base class does nothing."""

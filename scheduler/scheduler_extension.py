"""Protocol between the scheduler and optional capabilities, for decisions that concern all replicas.

`SchedulerConfig.extensions` has the options of the capabilities with which an engine was started. A
`SchedulerExtension` is created for each of them. If it takes part in the schedules of replicas, it has a
`RankExtension` for every replica.
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
      name: name of the capability.
      ranks: the RankExtension of each replica, in order; empty if there are none.
    """

    name: ClassVar[str]
    ranks: Sequence[RankExtension] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Attach to the scheduler's replicas, and create `ranks` if there are any. Called once, when the replicas have
        been created. The base class does nothing.
        """

    def admits(self, request: Request) -> bool:
        """Return whether the first request in the queue may run. If not, it is held outside the queue until `ready`
        returns it. It may be called several times for a request. The base class returns True.
        """
        return True

    def ready(self) -> Iterable[Request]:
        """Return the requests that need no longer be held outside the queue. The scheduler calls this in every step and
        queues them. The base class returns none.
        """
        return ()

    def decode_width(self) -> int:
        """Assign drafts to the decodes of the step being scheduled, whose rows are already chosen. Return the number of
        tokens per decode, at least 1, for which the step needs a bucket. The base class returns 1.
        """
        return 1

    def complete(self, step: ScheduledStep) -> None:
        """Add this capability's data to the step, in place. Called after the batches of all replicas were committed.
        The base class does nothing.
        """

    def preempted(self, request: Request) -> str | None:
        """Called when a request has lost its slot for lack of pages. Return how it gets its pages back, in capitals for
        the log. The base class returns None, which stands for "RECOMPUTE".
        """
        return None

    def weights_replaced(self) -> None:
        """Called when running requests continue with new weights, although the digests of their pages are of the old
        ones. The base class does nothing.
        """

    def reset_cache(self) -> None:
        """Drop cached state that no running request needs. The base class does nothing."""

"""Protocol between the scheduler and optional capabilities, for decisions that concern all replicas.

`SchedulerConfig.extensions` holds the options of the capabilities that an engine was started with. Each becomes one
`SchedulerExtension`, which has a `RankExtension` for every replica if it takes part in their schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from jaxengine.scheduler.batch import ScheduledStep
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.request import Request


class SchedulerExtension:
    """Base class of a capability's part in decisions that concern all replicas.

    Attributes:
      name: of the capability.
      ranks: its RankExtension of each replica, in order; empty if it has none.
    """

    name: ClassVar[str]
    ranks: Sequence[RankExtension] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Attach to the scheduler's replicas; called once, when they exist."""

    def admits(self, request: Request) -> bool:
        """Whether the first request in the queue may run; if not, it waits apart until `ready` returns it."""
        return True

    def ready(self) -> Iterable[Request]:
        """Return the requests that need not wait apart any longer."""
        return ()

    def decode_width(self) -> int:
        """Give drafts to the decodes of the step being scheduled; return the most tokens that one has, at least 1."""
        return 1

    def complete(self, step: ScheduledStep) -> None:
        """Add this capability's data to the step of all replicas."""

    def preempted(self, request: Request) -> str | None:
        """Note that a request has lost its slot for want of pages. Returns how it gets them back, for the log, if not
        by computing them again.
        """
        return None

    def weights_replaced(self) -> None:
        """Note that requests go on with other weights than those that the digests of their pages name."""

    def reset_cache(self) -> None:
        """Drop cached state that only later requests could use."""

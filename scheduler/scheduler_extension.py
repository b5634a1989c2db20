"""What an optional capability does in decisions that concern all ranks.

`SchedulerConfig.extensions` holds the options of the capabilities that an engine was started with. Each becomes one
`SchedulerExtension`, which has a `RankExtension` for every rank where it takes part in their schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from jaxengine.scheduler.batch import ScheduledStep
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.request import Request


class SchedulerExtension:
    """Takes part in decisions that concern all ranks.

    Attributes:
      name: the capability's.
      ranks: its part of each rank, in their order; empty where it has none.
    """

    name: ClassVar[str]
    ranks: Sequence[RankExtension] = ()

    def start(self, ranks: Sequence[Rank]) -> None:
        """Takes part from now on; called once, when the ranks are there."""

    def admits(self, request: Request) -> bool:
        """Return whether the first request in line may run; otherwise it waits apart until `ready` returns it."""
        return True

    def ready(self) -> Iterable[Request]:
        """Requests that need not wait apart any longer."""
        return ()

    def decode_width(self) -> int:
        """Widens the decodes of the step being put together; returns the most tokens that one has, at least 1."""
        return 1

    def complete(self, step: ScheduledStep) -> None:
        """Adds this capability's part to the step of all ranks."""

    def reset_cache(self) -> None:
        """Forgets what is kept for later requests alone."""

"""Snapshots of recurrent states at prefixes: cuts prefills where a snapshot is to be taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.pages.snapshots import Hits, Snapshots
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension


@dataclass(frozen=True)
class SnapshotOptions:
    """Options of snapshots; SchedulerConfig.num_snapshots is their number."""

    def extension(self) -> KeptStates:
        """Make the scheduler extension."""
        return KeptStates()


class KeptStates(SchedulerExtension):
    """Scheduler extension with the snapshots of all replicas."""

    name: ClassVar[str] = "snapshots"

    def start(self, ranks: Sequence[Rank]) -> None:
        """Make `ranks` for replicas that keep snapshots."""
        self.ranks = [_RankStates(rank.pages.snapshots) for rank in ranks if rank.pages.snapshots is not None]


class _RankStates(RankExtension):
    """One replica's part, which passes schedule events on to the replica's snapshots."""

    def __init__(self, snapshots: Snapshots):
        """Keep the replica's snapshots."""
        self._snapshots = snapshots

    def begin(self) -> None:
        """Make snapshots saved by the previous step available."""
        self._snapshots.begin_step()

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return how many of `count` tokens do not pass the next border, after which a state is to be saved."""
        if hits is None:
            return self._snapshots.cut(request.slot, start, count)
        borders = self._snapshots.borders(hits, len(request.known_token_ids()))
        return min([count, *(border - start for border in borders)])

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Have the slot begin from the state after its cached prefix, if it has one, and set its borders."""
        digest = request.page_hashes[hits.num_columns - 1] if hits.num_columns else None
        self._snapshots.begin(request.slot, digest, self._snapshots.borders(hits, num_known))

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Have the step save the slot's state after its `num_computed` tokens if that is a border (Snapshots.keep)."""
        self._snapshots.keep(request.slot, request.page_hashes, num_computed, count)

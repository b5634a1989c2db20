"""Snapshots of recurrent states at prefixes: cuts prefills where a snapshot is to be saved."""

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
    """Options of snapshots; SchedulerConfig.num_snapshots is their number.

    Attributes:
      whole: whether a step must compute all of an image's remaining tokens or none (PictureOptions.whole).
    """

    whole: bool = False

    def extension(self) -> KeptStates:
        """Return a new scheduler extension with these options."""
        return KeptStates(self.whole)


class KeptStates(SchedulerExtension):
    """Scheduler extension for the snapshots of all replicas."""

    name: ClassVar[str] = "snapshots"

    def __init__(self, whole: bool):
        """Store an option, see SnapshotOptions. `start` creates the replicas' parts."""
        self._whole = whole

    def start(self, ranks: Sequence[Rank]) -> None:
        """Create `ranks` for the replicas that keep snapshots."""
        stored = [rank.pages.snapshots for rank in ranks if rank.pages.snapshots is not None]
        self.ranks = [_RankStates(snapshots, self._whole) for snapshots in stored]


class _RankStates(RankExtension):
    """Snapshots in one replica's schedule: passes its events on to the replica's Snapshots."""

    def __init__(self, snapshots: Snapshots, whole: bool):
        """Store the replica's snapshots. whole: see SnapshotOptions."""
        self._snapshots = snapshots
        self._whole = whole

    def begin(self) -> None:
        """Start a step: snapshots saved by the previous step can be found from now on."""
        self._snapshots.begin_step()

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return how many of `count` tokens from `start` on lie before the next border, after which a state is to be
        saved. hits: what the caches have of a request without a slot; None for a running one.
        """
        if hits is None:
            return self._snapshots.cut(request.slot, start, count)
        borders = self._borders(request, hits, len(request.known_token_ids()))
        return min([count, *(border - start for border in borders)])

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Make the slot start from the state after its cached prefix, if it has one, and set its borders."""
        digest = request.page_hashes[hits.num_columns - 1] if hits.num_columns else None
        self._snapshots.begin(request.slot, digest, self._borders(request, hits, num_known))

    def register(self, request: Request, num_computed: int, count: int) -> None:
        """Save the slot's state after its `num_computed` tokens in this step, if that is a border (Snapshots.keep)."""
        self._snapshots.keep(request.slot, request.page_hashes, num_computed, count)

    def _borders(self, request: Request, hits: Hits, num_known: int) -> list[int]:
        """Return Snapshots.borders. Those inside an image that may not be split are moved back to the last page
        boundary before it, and left out if that is not after the cached prefix.
        """
        borders = self._snapshots.borders(hits, num_known)
        if not self._whole or request.media is None:
            return borders
        page_size, moved = self._snapshots.page_size, set[int]()
        for border in borders:
            for item in reversed(request.media.items):
                if item.begin < border < item.end:
                    border = item.begin // page_size * page_size
            moved.add(border)
        return sorted(border for border in moved if border > hits.num_columns * page_size)

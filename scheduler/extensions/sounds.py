"""Pool of encoded sounds: which row holds which sound, which slots need it, and which sounds a step encodes.

All tokens of a request attend to its sound, so a slot keeps the sound's row for as long as a request has it. The sound
is encoded before the forward pass with the first tokens of a request that takes a slot, also after a preemption, unless
some row still holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxengine.scheduler.batch import ScheduledBatch
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.extensions.pictures import EncoderRows
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.request import Request
from jaxengine.scheduler.scheduler_extension import SchedulerExtension

NAME = "sounds"


@dataclass(frozen=True)
class SoundOptions:
    """Options of a model with cross-attention to sounds.

    Attributes:
      num_rows: sounds that a replica's pool holds.
      max_frames: most frames of spectrograms that a replica encodes in one step.
    """

    num_rows: int
    max_frames: int

    def extension(self) -> Sounds:
        return Sounds(self)


class Sounds(SchedulerExtension):
    """Scheduler extension with the pools of encoded sounds of all replicas."""

    name: ClassVar[str] = NAME
    ranks: Sequence[RankSounds]

    def __init__(self, options: SoundOptions):
        self._options = options

    @property
    def rows(self) -> list[EncoderRows]:
        """Return the pool of each replica."""
        return [rank.rows for rank in self.ranks]

    def start(self, ranks: Sequence[Rank]) -> None:
        self.ranks = [RankSounds(self._options) for _ in ranks]

    def reset_cache(self) -> None:
        for rows in self.rows:
            rows.clear()


class RankSounds(RankExtension):
    """One replica's pool of sounds in its schedule. Its section of a batch lists the sounds to be encoded before the
    forward pass.
    """

    def __init__(self, options: SoundOptions):
        self.rows = EncoderRows(options.num_rows, options.max_frames)

    def row(self, request: Request) -> int:
        """Return the pool's row of a running request's sound."""
        assert request.media is not None
        return int(self.rows.index(request.media, 0, 1)[0])

    def begin(self) -> None:
        self.rows.begin_step()

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        # A cached prefix does not matter: the tokens after it attend to the sound, too.
        return count if hits is None or self.rows.reach(request.media, 0, 1) else 0

    def reserve(self, request: Request, start: int, count: int) -> None:
        self.rows.take(request.slot, request.media, 0, 1)

    def complete(self, batch: ScheduledBatch) -> None:
        if self.rows.encodes:
            batch.sections[NAME] = self.rows.encodes

    def release(self, slot: int) -> None:
        self.rows.release(slot)

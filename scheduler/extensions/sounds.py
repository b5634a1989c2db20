"""Pool of encoded sounds: which row holds which sound, which slots need it, and which sounds a step encodes.

All tokens of a request attend to its sound, so a slot keeps the sound's row for as long as a request has it. The sound
is encoded before the forward pass with the first tokens of a request that takes a slot, also after a preemption, unless
some row still holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.extensions.pictures import EncoderPools, EncoderRows, RankEncoderPool
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank

NAME = "sounds"
# Prompts that a replica aligns with their sounds in one step: their results stay on the devices until the step is read.
MAX_ALIGNED = 4


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
        """Return a new scheduler extension with these options."""
        return Sounds(self)


class Sounds(EncoderPools):
    """Scheduler extension with the pools of encoded sounds of all replicas."""

    name: ClassVar[str] = NAME

    def start(self, ranks: Sequence[Rank]) -> None:
        self.ranks = [RankSounds(self._options) for _ in ranks]


class RankSounds(RankEncoderPool):
    """One replica's pool of sounds in its schedule."""

    section = NAME

    def __init__(self, options: SoundOptions):
        """Create an empty pool, with no prompt to align in the present step."""
        self.rows = EncoderRows(options.num_rows, options.max_frames)
        self._num_aligned = 0

    def row(self, request: Request) -> int:
        """Return the pool row of a running request's sound. Raises KeyError if the sound has none."""
        assert request.media is not None
        return int(self.rows.index(request.slot, request.media, 0, 1)[0])

    def begin(self) -> None:
        super().begin()
        self._num_aligned = 0

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return `count` for a running request (hits None). For a request to be admitted, return 0 if its sound finds
        no pool row, if the step has no room to encode it, or if it is to be aligned after MAX_ALIGNED others in this
        step.
        """
        if hits is None:
            return count
        if request.params.alignment is not None and self._num_aligned == MAX_ALIGNED:
            return 0
        # A cached prefix does not matter: the tokens after it attend to the sound, too.
        return count if self.rows.reach(request.media, 0, 1) else 0

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Reserve a pool row for the request's sound; a sound not in the pool is added to those to be encoded."""
        self.rows.take(request.slot, request.media, 0, 1)

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Count the request if its prompt is to be aligned with its sound, for the limit in `chunk`."""
        self._num_aligned += request.params.alignment is not None

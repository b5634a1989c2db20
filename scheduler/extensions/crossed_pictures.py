"""Pool of encoded images that all tokens of a request may attend to: which row holds which image, which slots need it,
and which images a step encodes.

A slot keeps the rows of all images of its request for as long as the request has it. They are encoded before the
forward pass with the first tokens of a request that takes a slot, also after a preemption, unless some row still holds
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.extensions.pictures import EncoderPools, EncoderRows, RankEncoderPool
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank

NAME = "crossed_pictures"


@dataclass(frozen=True)
class CrossedPictureOptions:
    """Options of a model with cross-attention to images.

    Attributes:
      num_rows: images that a replica's pool holds, and most that a prompt has.
      max_patches: most patches that a replica encodes in one step.
    """

    num_rows: int
    max_patches: int

    def extension(self) -> CrossedPictures:
        """Return a new scheduler extension with these options."""
        return CrossedPictures(self)


class CrossedPictures(EncoderPools):
    """Scheduler extension with the pools of encoded images of all replicas."""

    name: ClassVar[str] = NAME

    def start(self, ranks: Sequence[Rank]) -> None:
        self.ranks = [RankCrossedPictures(self._options) for _ in ranks]


class RankCrossedPictures(RankEncoderPool):
    """One replica's pool of images in its schedule."""

    section = NAME

    def __init__(self, options: CrossedPictureOptions):
        """Create an empty pool."""
        self.rows = EncoderRows(options.num_rows, options.max_patches)

    def rows_of(self, request: Request) -> list[int]:
        """Return the pool row of each image of a running request, in the order of its prompt. Raises KeyError for an
        image without one.
        """
        if (media := request.media) is None:
            return []
        return [int(self.rows.index(request.slot, media, item.begin, 1)[0]) for item in media.items]

    def chunk(self, request: Request, start: int, count: int, hits: Hits | None = None) -> int:
        """Return `count` for a running request (hits None). For a request to be admitted, return 0 if any of its images
        finds no pool row, or if the step has no room to encode it.
        """
        media = request.media
        if hits is not None and media is not None and self.rows.reach(media, 0, media.end) < media.end:
            return 0  # whatever prefix is cached: the tokens after it attend to the images, too
        return count

    def reserve(self, request: Request, start: int, count: int) -> None:
        """Reserve pool rows for all images of the request; those not in the pool are added to those to be encoded."""
        if request.media is not None:
            self.rows.take(request.slot, request.media, 0, request.media.end)

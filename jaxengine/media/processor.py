"""MediaProcessor: what a family does with decoded pictures and videos before its tower gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from scheduler.errors import RequestError


class Processed(NamedTuple):
    """A picture or video as a tower takes it.

    Attributes:
      patches, columns, rows: as scheduler.media.MediaItem has them.
      num_rows: embeddings that stand for it in a prompt.
      grid: its size in patches before they are merged: time, height, width.
      seconds: of a video whose family asks, when each step of the grid in time is shown.
    """

    patches: np.ndarray
    columns: np.ndarray
    rows: np.ndarray
    num_rows: int
    grid: tuple[int, int, int]
    seconds: tuple[float, ...] = ()


class Expanded(NamedTuple):
    """A prompt with room for all embeddings.

    Attributes:
      token_ids: with as many placeholders for each item as it has embeddings, and what else its family puts around.
      positions: i32[num_rows] for each item, in the order of the prompt; `order` says which items these are.
      order: (modality, number among those of the modality) of each.
      rope_positions, rope_delta: as scheduler.media.Media has them.
    """

    token_ids: list[int]
    positions: list[np.ndarray]
    order: list[tuple[str, int]]
    rope_positions: np.ndarray | None = None
    rope_delta: int = 0


def check_room(modality: str, num_patches: int, most: int | None) -> None:
    """RequestError for an item of more patches than a tower's largest call has, None for any number. A processor asks
    before it makes them, for a small picture may be told to become a large one."""
    if most is not None and num_patches > most:
        problem = (
            f"an item of {modality} makes {num_patches} patches of pixels; at most {most} are possible: give a smaller "
            "one, say less in mm_processor_kwargs, or raise max_num_batched_encoder_tokens"
        )
        raise RequestError(problem, param=modality, value=num_patches)


class MediaProcessor(Protocol):
    """Made once for a checkpoint (jaxengine.media.registry). Knows no devices.

    Attributes:
      modalities: those that the model takes, of "image" and "video".
      settings: all that decides what `process` gives, as text: part of digests.
    """

    modalities: tuple[str, ...]
    settings: str

    def placeholder(self, modality: str) -> str:
        """What stands for one item in a prompt's text, as the checkpoint's chat template writes it."""
        ...

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """An item ready for the tower.

        value: uint8 [H, W, 3] for an image, jaxengine.media.videos.Video for a video. options: mm_processor_kwargs, of
        the engine and then of the request. most: as check_room has it. Raises RequestError for an option that is
        unknown or out of range, and for a picture that the family does not take or that makes too many patches.
        """
        ...

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """The grid of a picture that came as so many embeddings, with this grid or none.

        Raises RequestError for a number that no picture has, and where the family needs a grid and there is none."""
        ...

    def largest(self, modality: str, size: tuple[int, int] | None = None) -> Processed:
        """What the largest item would be, or one of a size (height, width): for plans and limits, its numbers mean
        nothing and may be left out, patches of F = 0."""
        ...

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """The prompt with the placeholders of its items, by modality in the order of the prompt.

        Raises RequestError where it has another number of placeholders than there are items.
        """
        ...

"""Interface MediaProcessor: preprocessing of decoded images, videos and sounds for a model family's tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxengine.scheduler.base.errors import RequestError


class Processed(NamedTuple):
    """Image, video or sound, preprocessed for the tower.

    Attributes:
      patches, columns, rows: fields of the same names of jaxengine.scheduler.base.media.MediaItem.
      num_rows: number of embeddings in the prompt.
      grid: size in patches before merging: time, height, width.
      seconds: for videos of families that use it, the time of each temporal step of the grid; for sounds of such
        families, their duration; empty otherwise.
      crops: for images that are cut into crops of several sizes, (height, width) of each in patches; empty otherwise.
      size: (height, width) of an image as it was given, in pixels, for families whose prompts state it; None otherwise.
    """

    patches: np.ndarray
    columns: np.ndarray
    rows: np.ndarray
    num_rows: int
    grid: tuple[int, int, int]
    seconds: tuple[float, ...] = ()
    crops: tuple[tuple[int, int], ...] = ()
    size: tuple[int, int] | None = None


class Expanded(NamedTuple):
    """Prompt with positions for all embeddings.

    Attributes:
      token_ids: the prompt, with as many placeholders for each item as it has embeddings, and the family's tokens
        around them.
      positions: i32[num_rows] for each item, in the order of the prompt, which `order` gives.
      order: (modality, number within the modality) of each item.
      rope_positions, rope_delta: M-RoPE positions and position delta, fields of jaxengine.scheduler.base.media.Media.
      joint: i32[n], ascending, for TowerConfig.attends_across the tokens that attend to each other; otherwise None.
    """

    token_ids: list[int]
    positions: list[np.ndarray]
    order: list[tuple[str, int]]
    rope_positions: np.ndarray | None = None
    rope_delta: int = 0
    joint: np.ndarray | None = None


def check_room(modality: str, num_patches: int, most: int | None) -> None:
    """Raise RequestError for an item of the modality if num_patches is more than `most`, the limit of the tower's
    largest call; None for no limit. It is called before patches are computed, as a small image may be resized to a
    large one.
    """
    if most is not None and num_patches > most:
        problem = (
            f"an item of {modality} makes {num_patches} patches of pixels; at most {most} are possible: give a smaller "
            "one, lower the limit in mm_processor_kwargs, or raise max_num_batched_encoder_tokens"
        )
        raise RequestError(problem, param=modality, value=num_patches)


class MediaProcessor(Protocol):
    """Interface of the preprocessing of media for one checkpoint (jaxengine.media.registry).

    A processor may have two further methods. `encode(text, token_ids)` returns the token ids of a prompt whose
    placeholders are texts; `in_texts` names the modalities that have such placeholders, all without it.
    `among(options, counts)` returns the options of a prompt's items, for families that preprocess an item otherwise
    among many; counts: number of items by modality.

    Attributes:
      modalities: modalities that the model takes, of "image", "video" and "audio".
      settings: text of everything that affects the results of `process`; part of digests.
    """

    modalities: tuple[str, ...]
    settings: str

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for one item of the modality in a prompt, as the checkpoint's chat template
        writes it.
        """
        ...

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an item for the tower.

        value: uint8 [H, W, 3] for an image, jaxengine.media.base.frames.Video for a video,
          jaxengine.media.base.samples.Sound for a sound.
        options: mm_processor_kwargs of the engine, overridden by the request's.
        most: limit of the item's patches; None for no limit.

        Raises RequestError for an option that is unknown or out of range, and for an item that the family does not take
        or that has too many patches.
        """
        ...

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return the grid (time, height, width), in patches, of an image that is given as `num_rows` embeddings.

        grid: the grid given with the embeddings; None if there is none. Raises RequestError for a number of embeddings
        that no image has, and for a missing grid if the family needs one.
        """
        ...

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest possible item (of sounds: one window), for memory plans and limits.

        size: (height, width) in pixels of an image or frames to be measured instead; None for the largest. num_frames:
        number of frames of a video; None for LARGEST_FRAMES. The values of `patches` are meaningless, and may be
        missing: f32[P, 0].
        """
        ...

    def with_options(self, options: Mapping[str, Any]) -> MediaProcessor:
        """Return a processor whose `largest` is that of an engine with these mm_processor_kwargs, where the family lets
        them enlarge images; this processor may be returned if they do not.

        Raises RequestError for a name or value that is not allowed.
        """
        ...

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with its placeholders expanded for its items, given by modality in the order of the prompt.

        Raises RequestError if the number of placeholders differs from the number of items.
        """
        ...

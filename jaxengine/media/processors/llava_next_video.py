"""Processor of LLaVA-NeXT-Video: LLaVA-NeXT's for images; each frame of a video is a square, a quarter of whose patches
become embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.llava import LlavaProcessor
from jaxengine.media.processors.llava_next import LlavaNextProcessor
from jaxengine.media.processors.settings import IMAGES, VIDEOS, Pixels, read_settings
from jaxengine.models.config.fields import ModelConfigError


class LlavaNextVideoProcessor(LlavaNextProcessor):
    """Processor of LlavaNextVideoForConditionalGeneration. Frames are resized and cropped as the whole of an image is,
    without black margins. A checkpoint with other settings of videos than of images takes no videos.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        self.modalities = ("image", "video") if self.makes_videos_alike(Path(folder)) else ("image",)

    def makes_videos_alike(self, folder: Path) -> bool:
        _, found = read_settings(folder, VIDEOS, IMAGES)
        fields, other = found.with_defaults(**self.defaults), copy(self)
        try:
            LlavaProcessor.read_settings(other, fields)
            return (Pixels.read(fields), other.size, other.crops) == (self.pixels, self.size, self.crops)
        except ModelConfigError:
            return False

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        return tuple(self.placeholder_id_of(modality) for modality in self.modalities)

    def placeholder_id_of(self, modality: str) -> int:
        """Return the token of config.json that stands for an image or a video. Raises ModelConfigError if it is missing
        or invalid.
        """
        return self.token_id("video_token_index", "video_token_id") if modality == "video" else self.placeholder_id()

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles, or a frames.Video, each of whose frames is a unit.

        most: limit of patches; None for no limit. Raises RequestError for any option, other values, extreme aspect
        ratios, and more patches.
        """
        if modality != "video":
            made = super().process(modality, value, options, most)
            return made._replace(columns=np.zeros((1, len(made.patches)), np.int32))
        frames = self.checked_frames(modality, value, options, most)
        patches = self.with_ends(self._cut([LlavaProcessor.units(self, frame, {})[0][0] for frame in frames]))
        side = self.tower.frame_lines
        rows = np.full((len(frames), self.tower.unit), -1, np.int32)
        rows[:, : side * side] = np.arange(len(frames) * side * side, dtype=np.int32).reshape(len(frames), -1)
        count = len(frames) * side * side
        columns = np.ones((1, len(patches)), np.int32)
        return Processed(patches, columns, rows.ravel(), count, (len(frames), side, side))

    def largest(self, modality: str, size: tuple[int, int] | None = None) -> Processed:
        """Return the item of a black image of the largest size, or of `size`, (height, width) in pixels; for "video" a
        video of LARGEST_FRAMES frames, whatever the size.
        """
        if modality == "video":
            return self.process(modality, np.zeros((LARGEST_FRAMES, self.side, self.side, 3), np.uint8), {})
        return super().largest(modality, size)

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`): the placeholder once for each embedding."""
        return [self.placeholder_id_of("video")] * item.num_rows

"""Processor of LLaVA-NeXT-Video: LLaVA-NeXT's for images; each frame of a video is a square, a quarter of whose patches
become embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.llava import LlavaProcessor
from jaxengine.media.processors.llava_next import LlavaFramesProcessor
from jaxengine.media.processors.settings import IMAGES, VIDEOS, Pixels, read_settings
from jaxengine.models.config.fields import ModelConfigError


class LlavaNextVideoProcessor(LlavaFramesProcessor):
    """Processor of LlavaNextVideoForConditionalGeneration. Frames are resized and cropped as the whole of an image is,
    without black margins, by their own settings. If these make no squares of the tower's size, there are no videos.
    """

    def reads_frames(self, folder: Path) -> bool:
        _, found = read_settings(folder, VIDEOS, IMAGES)
        fields, other = found.with_defaults(**self.defaults), copy(self)
        try:
            LlavaProcessor.read_settings(other, fields)
            pixels = Pixels.read(fields)
        except ModelConfigError:
            return False
        self.set_frames(other, pixels)
        self.settings += f" {other.size} {other.crops}"
        return True

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles, or a frames.Video, each of whose frames is a unit. The one
        column of patches is 0 for an image, 1 for frames.

        most: limit of patches, if any. Raises RequestError for any option, other values, extreme aspect ratios, and
        more patches.
        """
        if modality != "video":
            made = super().process(modality, value, options, most)
            return made._replace(columns=np.zeros((1, len(made.patches)), np.int32))
        frames = self.checked_frames(modality, value, options, most)
        units = [LlavaProcessor.units(self.of_frames, frame, {})[0][0] for frame in frames]
        patches = self.with_ends(self.of_frames._cut(units))
        side = self.tower.frame_lines
        rows = np.full((len(frames), self.tower.unit), -1, np.int32)
        rows[:, : side * side] = np.arange(len(frames) * side * side, dtype=np.int32).reshape(len(frames), -1)
        count = len(frames) * side * side
        columns = np.ones((1, len(patches)), np.int32)
        return Processed(patches, columns, rows.ravel(), count, (len(frames), side, side))

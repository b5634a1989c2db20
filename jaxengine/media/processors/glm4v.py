"""Pictures for GLM-4.1V: Qwen2-VL's, but bounds are of the pixels of all frames of a patch, and a picture is two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor
from jaxengine.media.processors.qwen3_vl import resized_frames


class Glm4vProcessor(Qwen2VLProcessor):
    """A jaxengine.media.processor.MediaProcessor of pictures only."""

    modalities: tuple[str, ...] = ("image",)
    around_name: ClassVar[str] = "image"
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(112 * 112, 28 * 28 * 15000)}

    def resized_size(self, modality: str, num_frames: int, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        del modality, num_frames
        depth = self.tower.temporal_patch_size
        return resized_frames(depth, height, width, bounds, self.factor, depth)

    def largest_size(self, modality: str, num_frames: int, bounds: Bounds) -> tuple[int, int]:
        del modality, num_frames
        return self.widest(bounds.most // self.tower.temporal_patch_size)

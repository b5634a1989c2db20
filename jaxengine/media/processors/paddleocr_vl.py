"""Processor of PaddleOCR-VL: Qwen2-VL's for images alone, with other bounds of their pixels and patches of one
frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxengine.media.processors.grids import check_ratio
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor
from jaxengine.models.config.model_config import ModelConfig

# The token after an image, which the published configuration leaves out.
_END = 101306


class PaddleOcrVLProcessor(Qwen2VLProcessor):
    """Processor of PaddleOCRVLForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(384 * 384, 1536 * 1536)}

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        super().__init__(folder, {"vision_end_token_id": _END, **config_json}, model_config, tokenizer)

    def resized_size(self, modality: str, num_frames: int, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels of an image after resizing: a side below `factor` pixels is first enlarged
        to it, and the other in proportion, rounded; then Qwen2-VL's rule applies.

        Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        if height < self.factor:
            height, width = self.factor, round(width * self.factor / height)
        if width < self.factor:
            height, width = round(height * self.factor / width), self.factor
        return super().resized_size(modality, num_frames, height, width, bounds)

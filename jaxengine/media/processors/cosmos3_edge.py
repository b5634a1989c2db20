"""Processor of Cosmos 3 Edge: Qwen3-VL's, but bounds of pixels are those of all frames of a video together, patches are
of one frame, and the three colours of a pixel are adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxengine.media.processors.glm4v import Glm4vProcessor
from jaxengine.media.processors.qwen2_vl import Bounds
from jaxengine.media.processors.qwen3_vl import Qwen3VLProcessor


class Cosmos3EdgeProcessor(Qwen3VLProcessor):
    """Processor of Cosmos3EdgeForConditionalGeneration."""

    colours_last = True
    video_tokens: ClassVar[int | None] = None
    image_defaults: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen3VLProcessor.defaults, "temporal_patch_size": 1}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {
        "image": Bounds(256 * 256, 4096 * 4096),
        "video": Bounds(64 * 64, 24 * 1024 * 1024),
    }
    resized_size = Glm4vProcessor.resized_size
    largest_size = Glm4vProcessor.largest_size

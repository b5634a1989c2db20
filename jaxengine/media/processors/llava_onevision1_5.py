"""Processor of LLaVA-OneVision 1.5: Qwen2-VL's for images alone, with patches of one frame.

An image's patches fill blocks of attention of their own, for the tower has a class token in each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.qwen2_vl import Qwen2VLProcessor
from jaxengine.media.processors.token_positions import TokenPositions


class LlavaOnevision15Processor(TokenPositions):
    """Processor of LLaVAOneVision1_5_ForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1}

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of a grid's patches, followed by padding up to a multiple of the tower's unit."""
        made, merge = super().processed(patches, grid, seconds), self.tower.merge
        missing = -len(made.patches) % self.tower.unit
        return made._replace(
            patches=np.pad(made.patches, ((0, missing), (0, 0))),
            columns=np.pad(made.columns, ((0, 0), (0, missing)), constant_values=-1),
            rows=np.pad(made.rows, (0, missing // merge), constant_values=-1),
        )

"""Keye-VL (Kwai Keye Team 2025, arXiv:2507.01949) and Keye-VL 1.5 (arXiv:2509.01563): Qwen3 with M-RoPE (rotation by
positions in time, height and width) and a vision tower for images of any shape.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.paddleocr_vl import PaddleOCRVLForConditionalGeneration
from jaxengine.models.families.qwen2_vl import with_sight, without_mrope
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.paddleocr_vl import PaddleOcrVLTowerConfig, read_paddleocr_vl


class KeyeForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3 with M-RoPE and a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = PaddleOCRVLForConditionalGeneration.checkpoint_names
    joined_norm: ClassVar[bool] = False

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # In the published files the text's fields are not nested.
        text = without_mrope(text_fields(fields) if fields.has("text_config") else fields)
        return with_sight(super().read_hf(text), text, fields, cls._read_tower)

    @classmethod
    def _read_tower(cls, vision: ConfigFields, hidden_size: int) -> PaddleOcrVLTowerConfig:
        """Return the tower's configuration from a vision_config, with the class's `joined_norm`. Raises
        ModelConfigError for wrong fields.
        """
        return replace(read_paddleocr_vl(vision, hidden_size), joined_norm=cls.joined_norm)


class KeyeVL1_5ForConditionalGeneration(KeyeForConditionalGeneration):
    """Keye-VL whose projector norms a square of patches as a whole."""

    joined_norm: ClassVar[bool] = True

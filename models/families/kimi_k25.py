"""Kimi K2.5 and K2.6 (Kimi Team 2026), text part: DeepSeek-V3's layers, as in Kimi K2."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.hf import text_fields
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxengine.models.params.source import CheckpointNames


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """Text part of Kimi K2.5, read from checkpoints that also have a vision tower."""

    gguf_architecture: ClassVar[str | None] = None  # not read from GGUF
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.blocks.", "model.layers."),  # as transformers saves them
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        unused=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        if text.text("model_type", "kimi_k2") not in ("kimi_k2", "deepseek_v3"):
            raise text.fail("model_type", "kimi_k2 or deepseek_v3 in text_config")
        return super().read_hf(text)

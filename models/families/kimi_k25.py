"""Kimi K2.5 and K2.6 (Kimi Team 2026): Kimi K2, which has DeepSeek-V3's layers, with a vision tower."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.moonvit import POSITIONS, TOWER, read_moonvit_3d


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """DeepSeek-V3's layers with a vision tower that reads images and a few frames of videos at a time."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.blocks.", "model.layers."),  # as transformers saves them
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
            (f"{TOWER}.encoder.patch_embed.", f"{TOWER}.patch_embed."),
            ("model.mm_projector.", "mm_projector."),
        ),
        tower=(f"{TOWER}.", "mm_projector."),
        flattened=(".patch_embed.proj.weight", POSITIONS),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, "kimi_k2", "deepseek_v3")
        shared = super().read_hf(text)
        return shared | {"tower": read_moonvit_3d(fields, shared["hidden_size"])}

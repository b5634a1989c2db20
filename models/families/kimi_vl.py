"""Kimi-VL (Kimi Team 2025, arXiv:2504.07491): Moonlight, which has DeepSeek-V3's layers, with a vision tower."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.moonvit import POSITIONS, PROJECTOR, TOWER, read_moonvit


class KimiVLForConditionalGeneration(DeepseekV3ForCausalLM):
    """DeepSeek-V3's layers with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=(".patch_embed.proj.weight", POSITIONS),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, "deepseek_v3")
        return super().read_hf(text) | {"tower": read_moonvit(fields)}

"""GLM-OCR (Z.ai 2026): GLM-4-0414 without biases, with M-RoPE over whole heads, and GLM-4.1V's vision tower without
learned positions, whose queries and keys are normed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import predicting, text_fields
from jaxengine.models.families.glm4 import Glm4ForCausalLM
from jaxengine.models.families.glm4v import Glm4vForConditionalGeneration
from jaxengine.models.families.qwen2_vl import with_sight, without_mrope
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.glm4v import read_glm_ocr


class GlmOcrForConditionalGeneration(Glm4ForCausalLM):
    """GLM-4-0414 without biases, with M-RoPE and a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = Glm4vForConditionalGeneration.checkpoint_names

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        heads, size = text.integer("num_attention_heads"), text.integer("hidden_size")
        # GLM-4's default end tokens belong to another vocabulary.
        defaults = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "eos_token_id": None}
        text = without_mrope(text.with_defaults(head_dim=size // heads, num_key_value_heads=8, **defaults))
        text = ConfigFields({**text.raw, "attention_bias": False})  # whatever it says: there are none
        return predicting(with_sight(super().read_hf(text), text, fields, read_glm_ocr))

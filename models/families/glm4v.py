"""GLM-4.1V, GLM-4.5V and GLM-4.6V (GLM-V Team 2025, arXiv:2507.01006): GLM-4-0414 or GLM-4.5 with M-RoPE (rotation by
positions in time, height and width) and a vision tower.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.glm4 import Glm4ForCausalLM
from jaxengine.models.families.glm4_moe import Glm4MoeForCausalLM
from jaxengine.models.families.qwen2_vl import QWEN_NAMES, with_sight, without_mrope
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.glm4v import read_glm4v


class Glm4vForConditionalGeneration(Glm4ForCausalLM):
    """GLM-4-0414 with M-RoPE and a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES._replace(
        flattened=(".patch_embed.proj.weight", ".downsample.weight")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        heads, size = text.integer("num_attention_heads"), text.integer("hidden_size")
        text = without_mrope(text.with_defaults(head_dim=size // heads, rms_norm_eps=1e-5))
        text = ConfigFields({**text.raw, "attention_bias": True})  # whatever it says: there are biases always
        return with_sight(super().read_hf(text), text, fields, read_glm4v)


class Glm4vMoeForConditionalGeneration(Glm4MoeForCausalLM):
    """GLM-4.5 with M-RoPE and the vision tower of GLM-4.1V: GLM-4.5V, and GLM-4.6V with experts."""

    checkpoint_names: ClassVar[CheckpointNames] = Glm4vForConditionalGeneration.checkpoint_names

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields).with_defaults(attention_bias=True, n_shared_experts=1, first_k_dense_replace=1)
        text = without_mrope(text)
        return with_sight(super().read_hf(text), text, fields, read_glm4v)

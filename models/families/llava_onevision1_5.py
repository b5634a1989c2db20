"""LLaVA-OneVision 1.5 (An et al. 2025, arXiv:2509.23661): Qwen3 with a vision tower for images of any shape, whose
embeddings have the positions of tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.qwen2_vl import QWEN_NAMES, without_mrope
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.rice import read_rice

# Sizes of a file that leaves them out.
_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}


class LLaVAOneVision1_5_ForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3 with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(without_mrope(text_fields(fields).with_defaults(**_SIZES)))
        return shared | {"tower": read_rice(fields.part("vision_config"), shared["hidden_size"])}

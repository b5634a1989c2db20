"""OpenCUA (Wang et al. 2025, arXiv:2508.09123): Qwen2 with Qwen2.5-VL's vision tower, for agents that use computers.
Unlike in Qwen2.5-VL, embeddings of images have the positions of tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.families.qwen2_vl import QWEN_NAMES
from jaxengine.models.families.wrapped import of_kind
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.qwen2_vl import VISUAL, read_qwen2_5_vl


class OpenCUAForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2 with a vision tower for images, whatever model_type text_config has."""

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES._replace(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("vision_tower.", f"{VISUAL}."),
            *QWEN_NAMES.prefixes,
        )
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(of_kind(text_fields(fields), "qwen2"))
        return shared | {"tower": read_qwen2_5_vl(fields.part("vision_config"), shared["hidden_size"])}

"""InternVL whose text model has other layers than Llama's: Qwen3-MoE (InternVL 3.5 of 30 and 241 billion parameters,
Intern-S1), gpt-oss (InternVL 3.5 of 20 billion) and InternLM 2 (InternVL 2.5 of 2, 8 and 26 billion). Their files have
the class names of other InternVL checkpoints.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.declared import declared_class
from jaxengine.models.families.declared_hub import HUB_ROWS
from jaxengine.models.families.gpt_oss import GptOssForCausalLM
from jaxengine.models.families.internvl import InternVLForConditionalGeneration, fields_and_tower
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.params.source import CheckpointNames

_NAMES = InternVLForConditionalGeneration.checkpoint_names
_INTERNLM2 = "InternLM2ForCausalLM"
_InternLM2: Any = declared_class(_INTERNLM2, HUB_ROWS[_INTERNLM2])


class InternVLQwen3MoeForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-MoE with InternVL's vision tower."""

    gguf_architecture: ClassVar[str | None] = None  # its GGUF files are those of the text part
    checkpoint_names: ClassVar[CheckpointNames] = _NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields, tower = fields_and_tower(fields)
        return super().read_hf(text_fields(fields)) | {"tower": tower}


class InternVLGptOssForConditionalGeneration(GptOssForCausalLM):
    """gpt-oss with InternVL's vision tower."""

    gguf_architecture: ClassVar[str | None] = None  # its GGUF files are those of the text part
    checkpoint_names: ClassVar[CheckpointNames] = _NAMES._replace(
        stacked_experts=GptOssForCausalLM.checkpoint_names.stacked_experts
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields, tower = fields_and_tower(fields)
        return super().read_hf(text_fields(fields)) | {"tower": tower}


class InternVLInternLM2ForConditionalGeneration(_InternLM2):
    """InternLM 2 with InternVL's vision tower, in the form of the first InternVL checkpoints."""

    gguf_architecture: ClassVar[str | None] = None
    checkpoint_names: ClassVar[CheckpointNames] = _NAMES._replace(
        prefixes=(
            *((f"language_model.{old}", new) for old, new in _InternLM2.checkpoint_names.prefixes),
            *_NAMES.prefixes,
        )
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields, tower = fields_and_tower(fields)
        return super().read_hf(text_fields(fields)) | {"tower": tower}

"""Eagle 2.5 (Chen et al. 2025, arXiv:2504.15271): Qwen2 with a vision tower over tiles; and NVIDIA's Llama Nemotron
Embed VL and Rerank VL (2026), which pool a Llama, whose tokens see the whole prompt, with the same tower.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.eagle2_5 import read_eagle
from jaxengine.models.vision.llava import PROJECTOR, TOWER

# The text of Llama Nemotron Embed VL: a Llama by another name.
_BIDIRECTIONAL = "llama_bidirec"
_PROJECTION = {"0": "layer_norm", "1": "linear_1", "3": "linear_2"}
# Beginnings of the names of all parts: none, and in rerankers that of the model without its scores.
_OUTER = ("", "model.")


class Eagle2_5_VLForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Qwen2, or another model with Llama's layers, with a vision tower over tiles."""

    text: ClassVar[str] = "qwen2"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=tuple(
            (outer + old, new)
            for outer in _OUTER
            for old, new in (
                ("vision_model.vision_model.", f"{TOWER}."),
                ("vision_model.", f"{TOWER}."),
                *((f"mlp1.{number}.", f"{PROJECTOR}.{name}.") for number, name in _PROJECTION.items()),
                ("language_model.model.", "model."),
                ("language_model.lm_head.", "lm_head."),
                ("language_model.", "model."),
            )
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=FLATTENED,
    )

    @classmethod
    def text_kind(cls, fields: ConfigFields) -> str:
        kind = super().text_kind(fields)
        return "llama" if kind == _BIDIRECTIONAL else kind

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        if fields.has("llm_config"):
            fields = ConfigFields({**fields.raw, "text_config": fields.value("llm_config")})
        return cls.read_text(fields) | {"tower": read_eagle(fields)}

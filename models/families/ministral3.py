"""Ministral 3, Mistral Small 3.1 and later (Mistral AI 2025, 2026): Mistral or Mistral 4, in some of them with queries
scaled by the position, and with Pixtral's vision tower.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.attention import TemperatureTuning
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_temperature
from jaxengine.models.config.readers.hf import require_rope
from jaxengine.models.families.llama import gated_fields
from jaxengine.models.families.mistral import MistralForCausalLM
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.pixtral import PROJECTOR, TOWER, read_pixtral


class Ministral3ForCausalLM(MistralForCausalLM):
    """Mistral whose queries are multiplied by 1 + beta * ln(1 + floor(position / original context))."""

    gguf_architecture: ClassVar[str | None] = "mistral3"

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        has_mscale = fields.has(name := "rope.scaling.yarn_log_multiplier")
        yarn = {"mscale": 1.0, "mscale_all_dim": fields.value(name)} if has_mscale else {}
        return gguf_fields(gguf, yarn=yarn, temperature=gguf_temperature(fields))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        require_rope(fields)
        fields = fields.with_defaults(rms_norm_eps=1e-5)
        rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
        temperature, beta = None, rope.number("llama_4_scaling_beta", None)
        if beta is not None:
            original = rope.integer("original_max_position_embeddings")
            temperature = TemperatureTuning(floor_scale=float(original), attn_scale=beta)
        window = fields.integer("sliding_window", None)
        return gated_fields(fields, windows=window, head_dim=128, temperature=temperature)


class Mistral3ForConditionalGeneration(Wrapper, Ministral3ForCausalLM):
    """Mistral, Ministral 3, Mistral 4 or another text model with Pixtral's vision tower."""

    text: ClassVar[str] = "mistral"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
            (f"model.{TOWER}.", f"{TOWER}."),
            (f"model.{PROJECTOR}.", f"{PROJECTOR}."),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=(".patch_conv.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = cls.read_text(fields)
        return shared | {"tower": read_pixtral(fields, shared["rms_norm_eps"])}

"""Ministral 3 and Mistral Small 3.1 and later (Mistral AI 2025): Mistral, in some of them with queries that grow with
the position; of checkpoints that see pictures, the text."""

from __future__ import annotations

from typing import Any, ClassVar

from models.config.attention import TemperatureTuning
from models.config.fields import ConfigFields
from models.config.hf import hf_fields, text_fields
from models.families.mistral import MistralForCausalLM
from models.weights.source import CheckpointNames


class Ministral3ForCausalLM(MistralForCausalLM):
    """Mistral whose queries are multiplied by 1 + beta * ln(1 + floor(position / original context))."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
        temperature, beta = None, rope.number("llama_4_scaling_beta", None)
        if beta is not None:
            original = rope.integer("original_max_position_embeddings")
            temperature = TemperatureTuning(floor_scale=float(original), attn_scale=beta)
        window = fields.integer("sliding_window", None)
        return hf_fields(fields, windows=window, head_dim=128, temperature=temperature)


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The text part of a Mistral that sees pictures."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        unused=(
            *("vision_tower.", "multi_modal_projector."),
            *("model.vision_tower.", "model.multi_modal_projector."),
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        kind = text.text("model_type", "mistral")
        if kind == "ministral3":
            return super().read_hf(text)
        if kind != "mistral":
            raise text.fail("model_type", "mistral or ministral3 in text_config")
        return MistralForCausalLM.read_hf(text)

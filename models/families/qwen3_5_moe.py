"""Qwen3.5 with experts (Qwen Team 2026): Qwen3.5's layers with experts and a gated shared MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.gguf_states import gguf_delta_fields
from jaxengine.models.config.readers.hf import predicting, text_fields
from jaxengine.models.families.qwen2_moe import gated_experts, gated_gguf_experts
from jaxengine.models.families.qwen2_vl import with_sight, without_mrope
from jaxengine.models.families.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from jaxengine.models.families.qwen3_next import hybrid_fields
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.qwen3_vl import read_qwen3_5


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts: layers of gated delta nets or gated attention, each with a mixture of experts."""

    gguf_architecture: ClassVar[str | None] = "qwen35moe"
    checkpoint_names: ClassVar[CheckpointNames] = Qwen3_5ForCausalLM.checkpoint_names

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # No layer has a dense MLP, and none is given a size.
        experts = replace(gated_experts(fields, norm_weights=True), dense_layers=())
        sized = fields.with_defaults(intermediate_size=experts.intermediate_size)
        return predicting(hybrid_fields(sized)) | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        experts = gated_gguf_experts(gguf.fields, norm_weights=True)
        name = f"{gguf.fields.prefix}feed_forward_length"
        metadata = {name: experts.intermediate_size, **gguf.metadata}
        return gguf_delta_fields(gguf._replace(metadata=metadata), experts=experts)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        return self.make_experts(build)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """Qwen3.5 with experts as published: with a vision tower, and positions in three dimensions (M-RoPE)."""

    # Intern-S2 has a further tower, of time series.
    checkpoint_names: ClassVar[CheckpointNames] = Qwen3_5ForConditionalGeneration.checkpoint_names._replace(
        unused=("model.time_series.", "time_series.")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = without_mrope(text_fields(fields))
        return with_sight(super().read_hf(text), text, fields, read_qwen3_5)

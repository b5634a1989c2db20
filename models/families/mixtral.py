"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import WITH_EXPERTS, GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts


class MixtralForCausalLM(LlamaForCausalLM):
    """Llama without biases, with experts and, in some checkpoints, one sliding window for all layers."""

    gguf_architecture: ClassVar[str | None] = WITH_EXPERTS["llama"]
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        stacked_experts=StackedExperts(modules=("w1", "w3", "w2")), parts=((".mlp.", ".block_sparse_moe."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
        )
        fields = fields.with_defaults(rope_theta=1_000_000.0, rms_norm_eps=1e-5)
        return gated_fields(fields, windows=fields.integer("sliding_window", None)) | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, experts=gguf_experts(gguf.fields, norm_weights=True))

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        names = ExpertNames(gate="w1", up="w3", down="w2")
        return MixtureOfExperts(self.config, source=f"{LAYER}.block_sparse_moe", names=names, build=build)

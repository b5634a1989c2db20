"""Qwen1.5-MoE and Qwen2-57B-A14B (Yang et al. 2024, arXiv:2407.10671): Qwen2 with experts and a shared MLP with a
sigmoid gate.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.gguf import EXPERT_SIZE, GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.qwen2 import read_layer_windows
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM, dense_layers
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts


class Qwen2MoeForCausalLM(Qwen3MoeForCausalLM):
    """Llama with q, k, v biases, experts and a shared MLP with a sigmoid gate."""

    gguf_architecture: ClassVar[str | None] = "qwen2moe"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # Versions of transformers differ in which layers have the window.
        if fields.boolean("use_sliding_window", False) and not fields.has("layer_types"):
            raise ModelConfigError("layer_types must be given where use_sliding_window is true, got none")
        shared = gated_fields(fields, windows=read_layer_windows(fields), bias=fields.boolean("qkv_bias", True))
        return shared | {"experts": gated_experts(fields, norm_weights=False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, experts=gated_gguf_experts(gguf.fields, norm_weights=False), bias=True)

    def make_experts(self, build: Build) -> nnx.Module:
        names = ExpertNames(shared="shared_expert")
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", names=names, build=build)


def gated_experts(fields: ConfigFields, *, norm_weights: bool) -> ExpertsConfig:
    """Return the configuration of experts and of a shared MLP of size `shared_expert_intermediate_size` whose output is
    multiplied by a sigmoid gate.

    norm_weights: the default of ExpertsConfig.norm_weights, used if `norm_topk_prob` is absent. Raises ModelConfigError
    for wrong fields.
    """
    return ExpertsConfig(
        num_experts=fields.integer("num_experts"),
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        norm_weights=fields.boolean("norm_topk_prob", norm_weights),
        dense_layers=dense_layers(fields),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def gated_gguf_experts(fields: ConfigFields, *, norm_weights: bool) -> ExpertsConfig:
    """Return the ExpertsConfig of a GGUF file, with a gated shared MLP. Raises ModelConfigError for wrong fields."""
    size = fields.integer("expert_shared_feed_forward_length")
    more: dict[str, Any] = {"shared_intermediate_size": size, "shared_gate": True}
    return gguf_experts(fields, norm_weights=norm_weights, size=EXPERT_SIZE, **more)

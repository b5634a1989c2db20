"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in some or all of its layers."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.experts.moe import MixtureOfExperts


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Llama with RMS norms of q and k, experts, and at most one sliding window, which all layers share."""

    gguf_architecture: ClassVar[str | None] = "qwen3moe"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        windowed = fields.boolean("use_sliding_window", False)
        window = fields.with_defaults(sliding_window=4096).integer("sliding_window", None) if windowed else None
        bias = fields.boolean("attention_bias", False)
        experts = ExpertsConfig(
            # transformers 5 writes the second name
            num_experts=fields.integer("num_experts", None) or fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            norm_weights=fields.boolean("norm_topk_prob", False),
            dense_layers=dense_layers(fields),
        )
        shared = gated_fields(fields, windows=window, qk_norm=True, bias=bias, output_bias=bias)
        return shared | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        experts = gguf_experts(gguf.fields, norm_weights=True, size="expert_feed_forward_length")
        return gguf_fields(gguf, experts=experts, qk_norm=True)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        experts = self.config.experts
        if experts is not None and layer in experts.dense_layers:
            return super().make_mlp(layer, build)
        return self.make_experts(build)

    def make_experts(self, build: Build) -> nnx.Module:
        """Return a new feed-forward module for a layer with experts; it maps ([T, D], Rows) to [T, D]."""
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", build=build)


def dense_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Return the indices of layers with a dense MLP in place of experts, in ascending order.

    These are the layers in `mlp_only_layers` (default: none) and those whose index plus one is not a multiple of
    `decoder_sparse_step` (default: 1). Raises ModelConfigError if either field is invalid.
    """
    listed = fields.value("mlp_only_layers", [])
    if not isinstance(listed, list) or any(type(layer) is not int or layer < 0 for layer in listed):
        raise fields.fail("mlp_only_layers", "a list of layer indices >= 0")
    step, dense = fields.integer("decoder_sparse_step", 1), set(listed)
    num_layers = fields.integer("num_hidden_layers")
    return tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % step)

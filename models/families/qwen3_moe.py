"""Qwen3-MoE (Yang et al. 2025, arXiv:2505.09388): Qwen3 with experts in some or all of its layers."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from models.config.experts import ExpertsConfig
from models.config.fields import ConfigFields
from models.config.model_config import ModelConfig
from models.families.llama import LlamaForCausalLM
from models.layers.moe import ExpertNames, MixtureOfExperts
from sharding.layout import MeshLayout


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Llama with q/k norm, experts, and one sliding window for all layers if any."""

    gguf_architecture: ClassVar[str | None] = None  # not read from GGUF

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        num_layers = fields.integer("num_hidden_layers")
        windowed = fields.boolean("use_sliding_window", False)
        window = fields.integer("sliding_window", None) if windowed else None
        bias = fields.boolean("attention_bias", False)
        experts = ExpertsConfig(
            # transformers 5 writes the second name
            num_experts=fields.integer("num_experts", None) or fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            norm_weights=fields.boolean("norm_topk_prob", False),
            dense_layers=_dense_layers(fields, num_layers),
        )
        return {
            "experts": experts,
            "qk_norm": True,
            "attention_bias": bias,
            "output_bias": bias,
            "sliding_window": (window,) * num_layers,
        }

    @classmethod
    def make_mlp(cls, config: ModelConfig, *, layer: int, source: str, dtype: Any, mesh: MeshLayout) -> nnx.Module:
        if config.experts is not None and layer in config.experts.dense_layers:
            return super().make_mlp(config, layer=layer, source=source, dtype=dtype, mesh=mesh)
        names = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")
        return MixtureOfExperts(config, source=source, names=names, dtype=dtype, mesh=mesh)


def _dense_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Layers listed in `mlp_only_layers`, and all but every `decoder_sparse_step`-th."""
    listed = fields.value("mlp_only_layers", [])
    if not isinstance(listed, list) or any(type(layer) is not int or layer < 0 for layer in listed):
        raise fields.fail("mlp_only_layers", "a list of layer indices >= 0")
    step = fields.integer("decoder_sparse_step", 1)
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)

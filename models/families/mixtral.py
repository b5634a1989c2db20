"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from models.config.experts import ExpertsConfig
from models.config.fields import ConfigFields
from models.config.model_config import ModelConfig
from models.families.llama import LlamaForCausalLM
from models.layers.moe import ExpertNames, MixtureOfExperts
from sharding.layout import MeshLayout


class MixtralForCausalLM(LlamaForCausalLM):
    """Llama without biases, with experts and, in some checkpoints, one sliding window for all layers."""

    gguf_architecture: ClassVar[str | None] = None  # GGUF files of Mixtral say "llama"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
        )
        window = fields.integer("sliding_window", None)
        return {"experts": experts, "sliding_window": (window,) * fields.integer("num_hidden_layers")}

    @classmethod
    def make_mlp(cls, config: ModelConfig, *, layer: int, source: str, dtype: Any, mesh: MeshLayout) -> nnx.Module:
        source = source.removesuffix("mlp") + "block_sparse_moe"
        names = ExpertNames(gate="w1", up="w3", down="w2")
        return MixtureOfExperts(config, source=source, names=names, dtype=dtype, mesh=mesh)

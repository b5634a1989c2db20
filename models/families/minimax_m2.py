"""MiniMax-M2 (MiniMax 2025): sigmoid-scored experts in every layer, one norm over all heads of q and one over all of k,
rope on a part of each head."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import EXPERT_SIZE, SIGMOID, GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.config.readers.hf import read_head_dim
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.olmoe import OlmoeForCausalLM
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts


class MiniMaxM2ForCausalLM(OlmoeForCausalLM):
    """OLMoE's layers with sigmoid scores and a correction bias."""

    gguf_architecture: ClassVar[str | None] = "minimax-m2"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        stacked_experts=StackedExperts(modules=("w1", "w3", "w2")), parts=((".mlp.", ".block_sparse_moe."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(scoring_func="sigmoid", qk_norm_type="per_layer", use_qk_norm=True, use_routing_bias=True)
        fields.require(shared_intermediate_size=0)
        kinds = fields.value("attn_type_list", [])
        if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
            raise fields.fail("attn_type_list", "ones (full attention) for all layers")
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            scoring_func="sigmoid",
            correction_bias=True,
        )
        defaults: dict[str, Any] = {"rope_theta": 5000000.0, "head_dim": 128}
        if fields.has("rotary_dim"):
            defaults["partial_rotary_factor"] = fields.integer("rotary_dim") / read_head_dim(fields, 128)
        return gated_fields(fields.with_defaults(**defaults), partial_rotary=True) | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        if gguf.fields.integer("expert_gating_func", SIGMOID) != SIGMOID:
            raise gguf.fields.fail("expert_gating_func", f"{SIGMOID} (sigmoid) or absent")
        experts = gguf_experts(
            gguf.fields, norm_weights=True, size=EXPERT_SIZE, scoring_func="sigmoid", correction_bias=True
        )
        return gguf_fields(gguf, partial_rotary=True, experts=experts)

    def make_experts(self, build: Build) -> nnx.Module:
        names = ExpertNames(gate="w1", up="w3", down="w2", correction_bias="e_score_correction_bias")
        source = f"{LAYER}.block_sparse_moe"
        return MixtureOfExperts(self.config, source=source, names=names, router_dtype=jnp.float32, build=build)

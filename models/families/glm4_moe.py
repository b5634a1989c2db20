"""GLM-4.5 and GLM-4.6 (GLM-4.5 Team 2025, arXiv:2508.06471): DeepSeek-V3's experts after some dense layers, rope on
half of each head. Multi-token-prediction (MTP) layers make drafts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_shared_experts
from jaxengine.models.config.readers.hf import listed_dense, predicting
from jaxengine.models.families.llama import gated_fields
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM


class Glm4MoeForCausalLM(Qwen3MoeForCausalLM):
    """Llama with a part of each head rotated, in some checkpoints biases and norms of q and k, and experts."""

    gguf_architecture: ClassVar[str | None] = "glm4moe"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(partial_rotary_factor=0.5, rms_norm_eps=1e-5)
        fields = fields.with_defaults(first_k_dense_replace=1, n_shared_experts=1)
        shared = gated_fields(
            fields,
            partial_rotary=True,
            qk_norm=fields.boolean("use_qk_norm", False),
            bias=fields.boolean("attention_bias", False),
        )
        return predicting(shared) | {"experts": sigmoid_experts(fields)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        experts = gguf_shared_experts(gguf.fields, scoring_func="sigmoid")
        return gguf_fields(gguf, partial_rotary=True, experts=experts, qk_norm="attn_q_norm" in gguf.stored)


def sigmoid_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of a config.json with DeepSeek-V3's fields: sigmoid scores with a correction bias,
    groups (`n_group` and `topk_group`, 1 by default), `n_shared_experts` shared experts (0 by default), and dense
    layers, the first `first_k_dense_replace` (0 by default) or those that `mlp_layer_types` lists. Weights add up to 1
    unless `norm_topk_prob` is false or null. Raises ModelConfigError for wrong fields, and for another scoring_func or
    topk_method.
    """
    for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if fields.text(name, value) not in ("sigmoid", "noaux_tc"):  # dots.llm1 gives noaux_tc for both
            raise fields.fail(name, f"{value!r} or absent")
    size = fields.integer("moe_intermediate_size")
    first = min(fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("num_hidden_layers"))
    dense = listed_dense(fields)
    return ExpertsConfig(
        num_experts=fields.integer("n_routed_experts"),
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        norm_weights=fields.boolean("norm_topk_prob", True, null_is_false=True),
        dense_layers=tuple(range(first)) if dense is None else dense,
        scoring_func="sigmoid",
        correction_bias=True,
        num_expert_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=size * fields.integer("n_shared_experts", 0, minimum=0),
    )

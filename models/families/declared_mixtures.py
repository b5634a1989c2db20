"""Families with experts whose files differ from those of declared_experts in more than names: a row each, as there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.declared import ROWS, UNBIASED, DeclaredForm
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.declared_experts import softmax_experts
from jaxengine.models.families.declared_row import EPS, Row
from jaxengine.models.layers.experts.moe import ExpertNames
from jaxengine.models.params.source import ExpertRows


def _dbrx_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the fields of `attn_config` and `ffn_config` under usual names, with defaults for absent ones. Raises
    ModelConfigError, also where moe_normalize_expert_weights is neither 1 nor null.
    """
    attention, experts = (ConfigFields(fields.mapping(name) or {}) for name in ("attn_config", "ffn_config"))
    experts.require(moe_normalize_expert_weights=1.0)
    activation = ConfigFields(experts.mapping("ffn_act_fn") or {})
    return {
        "num_key_value_heads": attention.integer("kv_n_heads", 1),
        "clip_qkv": attention.number("clip_qkv", None),
        "rope_theta": attention.number("rope_theta", 10000.0),
        "intermediate_size": experts.integer("ffn_hidden_size", 3584),
        "num_experts": experts.integer("moe_num_experts", 4),
        "num_experts_per_tok": experts.integer("moe_top_k", 1),
        "norm_topk_prob": experts.raw.get("moe_normalize_expert_weights", 1.0) is not None,  # null: they are not
        "hidden_act": activation.text("name", "silu"),
    }


# Keys are the class names that config.json lists under "architectures".
MIXTURE_ROWS: dict[str, Row] = {
    "DbrxForCausalLM": Row(
        "DBRX (Databricks 2024): layer norms without biases, bounded queries, keys and values, experts of softmax "
        "scores.",
        DeclaredForm(
            norm=UNBIASED,
            norms=("norm_attn_norm.norm_1", "norm_attn_norm.norm_2"),
            qkv=("norm_attn_norm.attn.Wqkv",),
            joined=ROWS,
            out="norm_attn_norm.attn.out_proj",
        ),
        names=(
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.norm_f.", "model.norm."),
            ("transformer.blocks.", "model.layers."),
        ),
        spelled={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        defaults={EPS: 1e-5},
        only={"tie_word_embeddings": False},
        grouped=True,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        adapt=_dbrx_fields,
        choose=lambda fields, form: replace(form, clip=fields.number("clip_qkv", None)),
        experts=softmax_experts,
        experts_in="ffn",
        expert_names=ExpertNames(gate="w1", up="v1", down="w2", router="router.layer"),
        expert_rows=ExpertRows(rows=("w1", "v1"), turned=("w2",)),
    ),
}

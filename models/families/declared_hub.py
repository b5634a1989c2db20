"""Rows, like those of declared_rows, of families for which transformers has no class of that name. Their code was
published with their weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.declared import GROUPS, LAYER, RMS, ROWS, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import read_rope
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.declared_row import Row, softmax_experts
from jaxengine.models.families.declared_rows import ROWS_BY_NAME, transformer_names

_RMS: dict[str, Any] = {"eps": "rms_norm_eps", "mlp_bias": False, "grouped": True}


def _chatglm_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the number of KV heads (`multi_query_group_num` with `multi_query_attention`, otherwise all heads), the
    base of rope, 10000 times `rope_ratio`, and a partial_rotary_factor of 0.5. Raises ModelConfigError for wrong
    fields.
    """
    heads, groups = fields.integer("num_attention_heads"), fields.integer("multi_query_group_num", 1)
    return {
        "num_key_value_heads": groups if fields.boolean("multi_query_attention", False) else heads,
        "rope_theta": 10000.0 * fields.number("rope_ratio", 1.0),
        "partial_rotary_factor": 0.5,
    }


def _internlm_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `rope_theta` from the base in `rotary`, or {} if that is absent. Raises ModelConfigError for wrong fields,
    and for a type in it other than origin (without scaling) and dynamic (whose scaling begins only after
    `max_position_embeddings`).
    """
    rotary = ConfigFields(fields.mapping("rotary") or {})
    if rotary.text("type", "dynamic") not in ("dynamic", "origin"):
        raise rotary.fail("type", "dynamic or origin")
    base = rotary.number("base", None)
    return {} if base is None else {"rope_theta": base}


def _qwen_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the feed-forward size, which is half of the file's, and `seq_length` as the longest context, since these
    models scale rope and queries beyond it. Raises ModelConfigError for an odd size and for wrong fields.
    """
    size = fields.integer("intermediate_size")
    if size % 2:
        raise fields.fail("intermediate_size", "an even number")
    return {"intermediate_size": size // 2, "max_position_embeddings": fields.integer("seq_length")}


def _refined_web_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the fields with the sizes of FalconForCausalLM added. A file with `n_head_kv` (the model of 40 billion
    parameters) has the new decoder architecture. Raises ModelConfigError for wrong fields.
    """
    named = {**fields.raw, "new_decoder_architecture": fields.has("num_kv_heads")}
    adapt = ROWS_BY_NAME["FalconForCausalLM"].adapt
    assert adapt is not None
    own = ConfigFields(named)
    return {**named, **adapt(own)}


def _half_of_neighbours(fields: ConfigFields, head_dim: int) -> Rope:
    """Return rope that pairs neighbouring elements, for the share `partial_rotary_factor` of each head. Raises
    ModelConfigError for wrong fields.
    """
    return read_rope(fields, head_dim, partial_rotary=True, interleaved=True)


def _deepseek_experts(fields: ConfigFields) -> ExpertsConfig | None:
    """Return the ExpertsConfig of experts with softmax scores and a shared MLP, after `first_k_dense_replace` dense
    layers (none by default); None for a model without `n_routed_experts`. Raises ModelConfigError for wrong fields, and
    for another scoring_func or moe_layer_freq.
    """
    if fields.value("n_routed_experts", None) is None:
        return None
    fields.require(scoring_func="softmax", moe_layer_freq=1)
    own = ConfigFields({**fields.raw, "num_experts": fields.integer("n_routed_experts")})
    first = min(fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("num_hidden_layers"))
    size = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", 0, minimum=0)
    return replace(softmax_experts(own), dense_layers=tuple(range(first)), shared_intermediate_size=size)


# Keys are the class names that config.json lists under "architectures".
HUB_ROWS: dict[str, Row] = {
    "InternLM2ForCausalLM": Row(
        "InternLM 2 and 2.5 (Cai et al. 2024, arXiv:2403.17297): Llama with a projection that joins the queries, the "
        "key and the value of each group of heads.",
        DeclaredForm(
            norm=RMS,
            norms=("attention_norm", "ffn_norm"),
            qkv=("attention.wqkv",),
            joined=GROUPS,
            out="attention.wo",
            up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
        ),
        names=(("model.tok_embeddings.", "model.embed_tokens."), ("output.", "lm_head.")),
        defaults={"rms_norm_eps": 1e-6, "bias": True},
        bias="bias",
        output_bias="bias",
        **_RMS,
    ),
    "ChatGLMModel": Row(
        "ChatGLM 2 and 3, and GLM-4-9B as first published (GLM Team 2024, arXiv:2406.12793): GLM under earlier names.",
        DeclaredForm(
            norm=RMS,
            qkv=("self_attention.query_key_value",),
            joined=ROWS,
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            joined_up=True,
            down="mlp.dense_4h_to_h",
        ),
        names=(
            ("transformer.embedding.word_embeddings.", "model.embed_tokens."),
            ("transformer.encoder.final_layernorm.", "model.norm."),
            ("transformer.encoder.layers.", "model.layers."),
            ("transformer.output_layer.", "lm_head."),
        ),
        spelled={
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "layernorm_epsilon": "rms_norm_eps",
            "seq_length": "max_position_embeddings",
        },
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "add_qkv_bias": False},
        only={
            "rmsnorm": True,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
            "add_bias_linear": False,
            "original_rope": True,
            "pre_seq_len": None,
        },
        rope=_half_of_neighbours,
        bias="add_qkv_bias",
        output_bias=False,
        adapt=_chatglm_fields,
        unused=("transformer.rotary_pos_emb.",),
        **_RMS,
    ),
    "DeepseekForCausalLM": Row(
        "DeepSeekMoE (Dai et al. 2024, arXiv:2401.06066): Llama with experts of softmax scores beside a shared MLP.",
        DeclaredForm(norm=RMS),
        defaults={"rms_norm_eps": 1e-6, "attention_bias": False, "norm_topk_prob": False},
        bias="attention_bias",
        output_bias="attention_bias",
        experts=_deepseek_experts,
        **_RMS,
    ),
    "BailingMoeForCausalLM": Row(
        "Ling 1 and 1.5 (Ling Team 2025, arXiv:2503.05139): DeepSeekMoE with a joined projection before attention.",
        DeclaredForm(norm=RMS, qkv=("attention.query_key_value",), joined=ROWS, out="attention.dense"),
        names=(("model.word_embeddings.", "model.embed_tokens."),),
        spelled={
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "score_function": "scoring_func",
        },
        defaults={"rms_norm_eps": 1e-5, "use_qkv_bias": False, "norm_topk_prob": True},
        only={"use_bias": False, "use_qk_norm": False, "norm_head": False, "norm_softmax": False, "n_group": 1},
        bias="use_qkv_bias",
        output_bias=False,
        experts=_deepseek_experts,
        **_RMS,
    ),
    "InternLMForCausalLM": Row(
        "InternLM (Shanghai AI Laboratory 2023) and openPangu-Embedded (Huawei 2025): Llama with biases of all "
        "projections of attention.",
        DeclaredForm(norm=RMS),
        defaults={"rms_norm_eps": 1e-6, "bias": True},
        only={"mlp_bias": False},
        bias="bias",
        output_bias="bias",
        adapt=_internlm_fields,
        **_RMS,
    ),
    "OrionForCausalLM": Row(
        "Orion-14B (OrionStar 2024, arXiv:2401.12246): Llama with layer norms.",
        DeclaredForm(norm=LAYER),
        defaults={"rms_norm_eps": 1e-5},
        only={"attention_bias": False, "mlp_bias": False},
        bias=False,
        output_bias=False,
        **_RMS,
    ),
    "QWenLMHeadModel": Row(
        "Qwen (Bai et al. 2023, arXiv:2309.16609): Llama with biases and a joined projection before attention; its "
        "context is `seq_length`.",
        DeclaredForm(
            norm=RMS,
            norms=("ln_1", "ln_2"),
            qkv=("attn.c_attn",),
            joined=ROWS,
            out="attn.c_proj",
            up=("mlp.w2", "mlp.w1"),
            down="mlp.c_proj",
        ),
        names=transformer_names(wte="embed_tokens"),
        spelled={
            "layer_norm_epsilon": "rms_norm_eps",
            "kv_channels": "head_dim",
            "rotary_emb_base": "rope_theta",
        },
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
        only={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True, "use_cache_quantization": False}
        | {"visual": None},  # Qwen-VL has this class's name, too
        output_bias=False,
        adapt=_qwen_fields,
        unused=("transformer.rotary_emb.",),
        **{**_RMS, "grouped": False},
    ),
    "RWForCausalLM": ROWS_BY_NAME["FalconForCausalLM"]._replace(
        about="Falcon under its first name, RefinedWeb.",
        spelled={**ROWS_BY_NAME["FalconForCausalLM"].spelled, "n_head_kv": "num_kv_heads"},
        adapt=_refined_web_fields,
    ),
    "StableLMEpochForCausalLM": ROWS_BY_NAME["StableLmForCausalLM"]._replace(
        about="StableLM under its first name.",
        spelled={"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
        only={"rotary_scaling_factor": 1.0},
    ),
}

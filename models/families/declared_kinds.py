"""Rows, like those of declared_rows, of families with experts and two kinds of layers, one of which has windows and a
rope of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import CHUNKS, RMS, ROWS, DeclaredForm
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import (
    EXPERT_SIZE,
    GGUFConfig,
    gguf_by_layer,
    gguf_experts,
    gguf_fields,
    gguf_of_layers,
    gguf_shared_experts,
)
from jaxengine.models.config.readers.hf import FULL, SLIDING, read_each_layer
from jaxengine.models.families.declared_experts import ALL_NORMED, BIASED, COUNTS, gguf_after_dense, shared_of_size
from jaxengine.models.families.declared_row import GGUFRow, Row, kinds_of_ropes, no_rope, softmax_experts
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.layers.experts.moe import ExpertNames
from jaxengine.models.params.source import NextLayer

_FORM = DeclaredForm(norm=RMS, qk_norm=RMS)
_NORMED = replace(_FORM, qk_norms=("self_attn.q_norm", "self_attn.k_norm"))
_NEW: dict[str, Any] = {"rope_scaling": None}  # Mellum and Laguna, whose ropes have no older spelling
_ROUTER_CAP = "moe_router_logit_softcapping"
_BASE, _LOCAL = {"rope_theta": 500000.0}, {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
_TWO_ROPES: dict[str, Any] = {"rms_norm_eps": 1e-6, **_BASE, "head_dim": 128, "attention_bias": False}


def _laguna_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window and the rope of its kind, and with the number of heads that
    `num_attention_heads_per_layer` lists for it, if present. Raises ModelConfigError for wrong fields.
    """
    counts, num_layers = fields.value("num_attention_heads_per_layer", None), fields.integer("num_hidden_layers")
    attention = kinds_of_ropes(fields, layer, attention)
    if counts is None:
        return attention
    if not isinstance(counts, list) or len(counts) != num_layers:
        raise fields.fail("num_attention_heads_per_layer", f"a list of {num_layers} numbers")
    return replace(attention, num_heads=counts[layer])


def _laguna_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with a gate for each head or, if `gating` is "per-element" or false, as in transformers, for each
    element. Raises ModelConfigError for values other than these, "per-head" and true, the default.
    """
    gating = fields.value("gating", True)
    if gating not in ("per-head", "per-element") and not isinstance(gating, bool):
        raise fields.fail("gating", "true, false, per-head or per-element")
    return replace(form, gates_heads=gating in (True, "per-head"))


def _gguf_laguna(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields`; layers with a window have unscaled rope on `rope.dimension_count_swa` elements, by default
    all. Without `attention.sliding_window`, or for 0, all layers are alike. Raises ModelConfigError for wrong fields,
    and without experts.
    """
    fields, size = gguf.fields, gguf.fields.integer("expert_shared_feed_forward_length")
    if (experts := gguf_shared_experts(fields, scoring_func="sigmoid", norm_weights=True)) is None:
        raise fields.fail("expert_count", "at least 1")
    local = fields.integer("rope.dimension_count_swa", fields.integer("attention.key_length"))
    options: dict[str, Any] = {"partial_rotary": True, "experts": replace(experts, shared_intermediate_size=size)}
    if not fields.integer("attention.sliding_window", 0, minimum=0):  # all layers are alike
        return gguf_fields(gguf, **options)
    return gguf_by_layer(
        gguf,
        4,
        lambda each: replace(each, rope=each.rope and replace(each.rope, rotary_dim=local, scaling=None)),
        full_first=True,
        **options,
    )


def _gguf_laguna_form(gguf: GGUFConfig, form: DeclaredForm) -> DeclaredForm:
    """Return the form of a GGUF file, with a gate for each head if attn_gate has as many rows as the first layer has
    heads, else for each element. Raises ModelConfigError for wrong numbers of heads.
    """
    heads = gguf_of_layers(gguf.fields, "attention.head_count")[0]
    return replace(form, gates_heads=gguf.stored.get("attn_gate", (0,))[0] == heads)


def _mimo_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the rope of its kind, values of `v_head_dim` elements, no bias of the output
    and, if it is SLIDING, a window, sinks and twice the KV heads. Raises ModelConfigError for wrong fields.
    """
    own = kinds_of_ropes(fields, layer, attention, sliding_theta="swa_rope_theta")
    own = replace(own, value_size=fields.integer("v_head_dim"), output_bias=False)
    return own if own.window is None else replace(own, num_kv_heads=2 * own.num_kv_heads, sinks=True)


def _mimo_layer_of_v2(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the rope of its kind, values of `v_head_dim` elements, no bias of the output
    and, if it is SLIDING, a window, `swa_num_key_value_heads` KV heads, and sinks if `add_swa_attention_sink_bias`.
    Raises ModelConfigError for wrong fields.
    """
    own = kinds_of_ropes(fields, layer, attention, sliding_theta="swa_rope_theta")
    own = replace(own, value_size=fields.integer("v_head_dim"), output_bias=False)
    sinks = fields.boolean("add_swa_attention_sink_bias", False)
    kv_heads = fields.integer("swa_num_key_value_heads", own.num_kv_heads)
    return own if own.window is None else replace(own, num_kv_heads=kv_heads, sinks=sinks)


def _mimo_form_of_v2(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with values scaled by `attention_value_scale` and, if `attention_projection_layout` is
    "fused_qkv", one projection of queries, keys and values. With scales of blocks its rows are those of as many devices
    as FULL layers have KV heads, one after the other. Raises ModelConfigError for wrong fields, and for heads that
    cannot be divided so.
    """
    form = replace(form, value_scale=fields.number("attention_value_scale", 1.0))
    fields.require(attention_projection_layout="fused_qkv")
    if not fields.has("attention_projection_layout"):
        return form
    form = replace(form, qkv=("self_attn.qkv_proj",), joined=ROWS)
    if not (fields.mapping("quantization_config") or {}).get("weight_block_size"):
        return form
    chunks = fields.integer("num_key_value_heads")
    for name in ("num_attention_heads", "swa_num_key_value_heads"):
        if fields.integer(name, chunks) % chunks:
            raise fields.fail(name, f"a multiple of num_key_value_heads, {chunks}")
    return replace(form, joined=CHUNKS, chunks=chunks)


def _mimo_fields_of_v2(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the fields of `_mimo_kinds`, `v_head_dim`, by default `head_dim`, and `swa_rope_theta`, by default
    `rope_theta`. Raises ModelConfigError for wrong fields, and if heads of SLIDING layers differ from those of FULL
    ones in number or size.
    """
    size, heads = fields.integer("head_dim"), fields.integer("num_attention_heads")
    values = fields.integer("v_head_dim", size)
    fields.require(swa_num_attention_heads=heads, swa_head_dim=size, swa_v_head_dim=values)
    theta = fields.number("swa_rope_theta", fields.number("rope_theta"))
    return {"v_head_dim": values, "swa_rope_theta": theta, **_mimo_kinds(fields)}


def _mimo_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the fields of `_mimo_kinds`. Raises ModelConfigError for wrong fields, and if SLIDING layers do not have
    the heads of FULL ones, the sizes of their keys and values included, and twice their KV heads.
    """
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    fields.require(swa_num_attention_heads=heads, swa_num_key_value_heads=2 * kv_heads)
    fields.require(swa_head_dim=fields.integer("head_dim"), swa_v_head_dim=fields.integer("v_head_dim"))
    return _mimo_kinds(fields)


def _mimo_kinds(fields: ConfigFields) -> dict[str, Any]:
    """Return `layer_types` (by default as `hybrid_layer_pattern` says, or the first and every sixth layer FULL),
    `mlp_layer_types` (by default as `moe_layer_freq` says, or all but the first sparse), and `sliding_window`, which
    counts the token itself: `sliding_window_size`, which does not, plus one; without that field the file's own, 129 by
    default. Raises ModelConfigError for wrong fields.
    """
    count, size = fields.integer("num_hidden_layers"), fields.integer("sliding_window_size", None)
    slides = read_each_layer(fields, "hybrid_layer_pattern", (0, 1))
    slides = slides or [layer > 0 and (layer + 1) % 6 > 0 for layer in range(count)]
    sparse = read_each_layer(fields, "moe_layer_freq", (0, 1)) or [layer > 0 for layer in range(count)]
    return {
        "layer_types": fields.value("layer_types", [SLIDING if each else FULL for each in slides]),
        "mlp_layer_types": fields.value("mlp_layer_types", ["sparse" if each else "dense" for each in sparse]),
        # sliding_window_size does not count the token itself.
        "sliding_window": fields.integer("sliding_window", 129) if size is None else size + 1,
    }


def _gguf_mellum(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields`; layers with a window have unscaled rope. Raises ModelConfigError for wrong fields."""
    experts = gguf_experts(gguf.fields, norm_weights=True, size=EXPERT_SIZE)
    return gguf_by_layer(
        gguf, 4, lambda each: replace(each, rope=each.rope and replace(each.rope, scaling=None)), experts=experts
    )


def _gguf_mimo(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields` with windows in all but every sixth layer, which have sinks if the file does. Values may be
    shorter than keys. Raises ModelConfigError for wrong fields, and without experts.
    """
    fields, size = gguf.fields, "attention.value_length"
    keys = {f"{fields.prefix}{size}": fields.integer("attention.key_length")}
    options = {"experts": gguf_after_dense(gguf), "partial_rotary": True, "value_size": fields.integer(size)}
    own = gguf._replace(metadata={**gguf.metadata, **keys})
    return gguf_by_layer(own, 6, lambda each: replace(each, sinks="attn_sinks" in gguf.stored), **options)


def _gguf_mimo_form(gguf: GGUFConfig, form: DeclaredForm) -> DeclaredForm:
    """Return the form of a GGUF file, with its scale of values (default: 1), and q, k and v in one product if they are.
    Raises ModelConfigError for a wrong scale.
    """
    form = replace(form, value_scale=gguf.fields.number("attention.value_scale", 1.0))
    return replace(form, qkv=("self_attn.qkv_proj",), joined=ROWS) if "attn_qkv" in gguf.stored else form


_MIMO_NEXT = NextLayer(
    (("model.mtp.layers.0.pre_mlp_layernorm", "post_attention_layernorm"), ("model.mtp.layers.0.", "")),
    norm="final_layernorm",
    normed=True,
    dense=True,
    windowed=True,
)
# Keys are the class names that config.json lists under "architectures".
KIND_ROWS: dict[str, Row] = {
    "MiMoV2FlashForCausalLM": Row(
        "MiMo-V2-Flash (Xiaomi 2025): windows with sinks in most layers, which have twice the heads of keys and "
        "values, values of a size of their own, experts picked by corrected sigmoid scores.",
        _FORM,
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "rope_theta": 5000000.0,
            "swa_rope_theta": 10000.0,
            "partial_rotary_factor": 0.334,
            "attention_value_scale": 0.707,
            "num_nextn_predict_layers": 1,  # which files do not say
        },
        only={"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None},
        spelled={"layernorm_epsilon": "rms_norm_eps"},
        rope=no_rope,
        adapt=_mimo_fields,
        next_layer=_MIMO_NEXT,
        choose=lambda fields, form: replace(form, value_scale=fields.number("attention_value_scale")),
        each_layer=_mimo_layer,
        experts=sigmoid_experts,
        suffixes=((".self_attn.attention_sink_bias", ".self_attn.sinks"),),
        **BIASED,
    ),
    "MiMoV2ForCausalLM": Row(
        "MiMo-V2.5 (Xiaomi 2026), its text part alone: MiMo-V2-Flash with any number of heads of keys and values in "
        "layers with windows, and a joined projection of queries, keys and values.",
        _FORM,
        defaults={
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 1.0,
        },
        only={"add_full_attention_sink_bias": False, "n_shared_experts": None},
        spelled={"layernorm_epsilon": "rms_norm_eps"},
        rope=no_rope,
        adapt=_mimo_fields_of_v2,
        choose=_mimo_form_of_v2,
        each_layer=_mimo_layer_of_v2,
        experts=sigmoid_experts,
        names=(("model.language_model.", "model."),),
        suffixes=((".self_attn.attention_sink_bias", ".self_attn.sinks"),),
        unused=("visual.", "model.visual.", "audio_encoder.", "speech_embeddings.", "audio_tokenizer."),
        gguf=GGUFRow("mimo2", read=_gguf_mimo, choose=_gguf_mimo_form),
        **BIASED,
    ),
    "MellumForCausalLM": Row(
        "Mellum 2 (JetBrains 2026): Qwen3-MoE's layers, in some of them windows and a rope of their own.",
        _NORMED,
        defaults={
            **_TWO_ROPES,
            "rope_parameters": {FULL: _BASE, SLIDING: _LOCAL},
            "sliding_window": 1024,
            "norm_topk_prob": True,
        },
        only=_NEW,
        rope=no_rope,
        each_layer=kinds_of_ropes,
        experts=softmax_experts,
        gguf=GGUFRow("mellum", read=_gguf_mellum),
        **BIASED,
    ),
    "LagunaForCausalLM": Row(
        "Laguna (Poolside 2026): a softplus gate after attention, numbers of heads and ropes by layer, experts picked "
        "by corrected sigmoid scores.",
        replace(_NORMED, gate="self_attn.g_proj", gate_activation="softplus"),
        spelled={**COUNTS, "moe_routed_scaling_factor": "routed_scaling_factor"},
        defaults={
            **_TWO_ROPES,
            "rope_parameters": {FULL: {**_BASE, "partial_rotary_factor": 0.5}, SLIDING: _LOCAL},
            "sliding_window": 512,
            "first_k_dense_replace": 1,
        },
        only={"moe_apply_router_weight_on_input": False, **ALL_NORMED, **_NEW},
        rope=no_rope,
        choose=_laguna_form,
        each_layer=_laguna_layer,
        experts=lambda fields: replace(shared_of_size(fields), logit_soft_cap=fields.zero_or_more(_ROUTER_CAP) or None),
        expert_names=ExpertNames(correction_bias="experts.e_score_correction_bias", shared="shared_expert"),
        parts=((".mlp.gate.e_score", ".mlp.experts.e_score"), (".mlp.shared_experts.", ".mlp.shared_expert.")),
        gguf=GGUFRow("laguna", read=_gguf_laguna, choose=_gguf_laguna_form),
        **BIASED,
    ),
}

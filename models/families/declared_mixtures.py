"""Rows, like those of declared_experts, of families with experts whose files differ from those in more than names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxengine.models.config.attention import LayerAttention, TemperatureTuning
from jaxengine.models.config.declared import AROUND, OFFSET, PARALLEL, RMS, ROWS, UNBIASED, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, RopeFactors, gguf_by_layer, gguf_experts, gguf_limits
from jaxengine.models.config.readers.hf import FULL, LAYER_CONFIG, SLIDING, layer_kinds
from jaxengine.models.families.declared_experts import gguf_after_dense, shared_of_size
from jaxengine.models.families.declared_row import (
    EPS,
    GGUFRow,
    Row,
    clipped,
    kinds_of_ropes,
    no_rope,
    rope_in_windows,
    softmax_experts,
)
from jaxengine.models.families.gemma2 import read_cap
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.qwen3_moe import dense_layers
from jaxengine.models.layers.experts.moe import ExpertNames
from jaxengine.models.params.source import ExpertRows

_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_UNBIASED: dict[str, Any] = {"bias": "attention_bias", "output_bias": "attention_bias", "mlp_bias": False}


def _dbrx_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return, under the usual names, of `attn_config` kv_n_heads (default: 1), clip_qkv (none) and rope_theta (10,000),
    and of `ffn_config` ffn_hidden_size (3584), moe_num_experts (4), moe_top_k (1), whether weights are normed, and the
    name in ffn_act_fn (silu). Raises ModelConfigError for wrong fields, and if moe_normalize_expert_weights is neither
    1 nor null.
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


def _flint_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types`; if they are not listed, the first two layers, every fourth one after them and the last are
    FULL. Raises ModelConfigError for a wrong number of layers.
    """
    count = fields.integer("num_hidden_layers")
    full = [layer < 2 or layer % 4 == 1 or layer == count - 1 for layer in range(count)]
    return {"layer_types": fields.value("layer_types", [FULL if each else SLIDING for each in full])}


def _flint_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of experts with sigmoid scores and a shared MLP of size
    `shared_expert_intermediate_size`, in all layers but those that `dense_layers` returns. Raises ModelConfigError for
    wrong fields.
    """
    own, size = softmax_experts(fields), fields.integer("shared_expert_intermediate_size")
    return replace(own, scoring_func="sigmoid", dense_layers=dense_layers(fields), shared_intermediate_size=size)


def _of_layers(fields: ConfigFields, name: str, count: int) -> list[Any] | None:
    """Return the entries of the list `name` for the first `count` layers; entries for the `num_nextn_predict_layers`
    after them are left out. Returns None if the list is absent. Raises ModelConfigError for a list of another length.
    """
    listed = fields.value(name, None)
    most = count + fields.integer("num_nextn_predict_layers", 0, minimum=0)
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) not in (count, most):
        raise fields.fail(
            name, f"a list of {count} entries" if most == count else f"a list of {count} or {most} entries"
        )
    return listed[:count]


def _step_dense(fields: ConfigFields, count: int) -> list[str]:
    """Return `mlp_layer_types`. If they are absent, layers in `moe_layers_enum` (a list, or a text separated by commas;
    by default all from the fourth on) are "sparse" and the others "dense"; it may name the `num_nextn_predict_layers`
    after them, too. Raises ModelConfigError for wrong lists.
    """
    if (kinds := _of_layers(fields, "mlp_layer_types", count)) is not None:
        return kinds
    listed = fields.value("moe_layers_enum", list(range(3, count)))
    listed = [part.strip() for part in listed.split(",") if part.strip()] if isinstance(listed, str) else listed
    most = count + fields.integer("num_nextn_predict_layers", 0, minimum=0)
    if not isinstance(listed, list) or not all(
        str(each).isdecimal() and len(str(each)) < 9 and int(each) < most for each in listed
    ):
        allowed = f"numbers of layers, 0 to {most - 1}, a list or separated by commas"
        raise fields.fail("moe_layers_enum", allowed)
    sparse = {int(each) for each in listed}
    return ["sparse" if layer in sparse else "dense" for layer in range(count)]


def _step_ropes(fields: ConfigFields, kinds: list[str]) -> Mapping[str, Any]:
    """Return a rope mapping for each kind of layer. If `rope_parameters` does not contain them, they are composed of
    `rope_theta` and `partial_rotary_factors`, which are numbers or lists with one per layer, and, for FULL layers,
    `rope_scaling`. Raises ModelConfigError for wrong fields, and if layers of one kind differ.
    """
    given = fields.mapping("rope_parameters") or {}
    if all(isinstance(given.get(kind), Mapping) for kind in kinds):
        return given
    ropes: dict[str, Any] = {}
    for kind in dict.fromkeys(kinds):
        ropes[kind] = {"rope_type": "default"}
        for name, own in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
            listed = fields.value(name, None)
            if isinstance(listed, list):
                each = _of_layers(fields, name, len(kinds)) or []
                listed, *others = [value for value, of in zip(each, kinds, strict=True) if of == kind]
                if any(other != listed for other in others):
                    raise fields.fail(name, f"a list with one number for all layers of {kind}")
            if listed is not None:
                ropes[kind][own] = listed
        if kind == FULL:
            ropes[kind] |= fields.mapping("rope_scaling") or {}
    return ropes


def _step_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the kinds of attention and of MLPs, the ropes by kind, the window, and the heads of SLIDING layers
    (`num_sliding_attention_heads`, or else those of `attention_other_setting`, or else all layers'), under the usual
    names. Raises ModelConfigError for wrong fields, and if `per_layer_config` contains anything else. The outer
    `rope_theta` is 10,000, and the window 1 if no layer is SLIDING; `per_layer_config` and `rope_scaling` are None, as
    what they say is in the other fields.
    """
    count, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    own = ConfigFields({**fields.raw, "layer_types": _of_layers(fields, "layer_types", count)})
    kinds = list(layer_kinds(own))
    if (other := fields.mapping("attention_other_setting")) is not None:
        other = ConfigFields(other)
        other.require(attention_type=SLIDING, head_dim=fields.integer("head_dim"))
        other.require(num_attention_groups=fields.integer("num_key_value_heads"))
        heads = other.integer("num_attention_heads", heads)
    heads = fields.integer("num_sliding_attention_heads", heads)
    for layer, given in (fields.mapping(LAYER_CONFIG) or {}).items():
        slides = layer in {str(at) for at, kind in enumerate(kinds) if kind == SLIDING}
        if given != ({"num_attention_heads": heads} if slides else {}):
            raise fields.fail(LAYER_CONFIG, f"num_attention_heads = {heads} for each layer of {SLIDING}, or absent")
    return {
        LAYER_CONFIG: None,
        "layer_types": kinds,
        "mlp_layer_types": _step_dense(fields, count),
        "rope_parameters": _step_ropes(fields, kinds),
        "rope_scaling": None,
        "sliding_window": fields.integer("sliding_window") if SLIDING in kinds else 1,
        "rope_theta": 10000.0,
        "num_sliding_attention_heads": heads,
    }


def _step_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window, rope and number of heads of its kind, and with the scale
    query_pre_attn_scalar ** -0.5 if that field is set. Raises ModelConfigError for wrong fields.
    """
    if (scalar := fields.number("query_pre_attn_scalar", None)) is not None:
        attention = replace(attention, scale=scalar**-0.5)
    attention = kinds_of_ropes(fields, layer, attention)
    if layer_kinds(fields)[layer] != SLIDING:
        return attention
    return replace(attention, num_heads=fields.integer("num_sliding_attention_heads"))


def _step_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with `limits`, for each layer the bounds of experts (swiglu_limits) and of the shared MLP
    (swiglu_limits_shared); 0, null and an absent list mean none. Entries of next-token layers at the end are left out.
    Raises ModelConfigError for lists of other lengths or with other values.
    """
    count, limits = fields.integer("num_hidden_layers"), []
    for name in ("swiglu_limits", "swiglu_limits_shared"):
        listed = _of_layers(fields, name, count) or [None] * count
        if not all(each is None or (type(each) in (int, float) and 0 <= each < 1e30) for each in listed):
            raise fields.fail(name, "a list of numbers >= 0, or null")
        limits.append([float(each) if each else None for each in listed])
    return replace(form, limits=tuple(zip(*limits, strict=True)))


def _gguf_step(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields`; layers without a window rotate half of each head, with the file's factors, and the first
    `leading_dense_block_count` (default: 0) layers are dense. Raises ModelConfigError for wrong fields.
    """
    fields, half = gguf.fields, gguf.fields.integer("attention.key_length") // 2
    experts = gguf_after_dense(gguf, shared_intermediate_size=fields.integer("expert_shared_feed_forward_length"))
    dense = tuple(range(fields.integer("leading_dense_block_count", 0, minimum=0)))
    return gguf_by_layer(
        gguf._replace(
            metadata={**gguf.metadata, f"{fields.prefix}rope.dimension_count": half},
            rope_factors=RopeFactors(gguf.rope_factors.factors[: half // 2]),
        ),
        4,
        lambda each: replace(each, rope=each.rope and replace(each.rope, rotary_dim=2 * half, scaling=None)),
        partial_rotary=True,
        experts=replace(experts, dense_layers=dense),
    )


# (End of a tensor's name in published files, end of its name in transformers).
STEP_NAMES = tuple(
    (f".moe.{part}_proj{end}", f".mlp.experts.{part}_proj{new}")
    for part in ("gate", "up", "down")
    for end, new in {".weight": "", ".weight_scale_inv": "_scale_inv", "": ""}.items()
)
_STEP = Row(
    "Step 3.5 Flash (StepFun 2026): windows with more heads and a rope of their own in most layers, a gate for "
    "each head, experts as DeepSeek-V3 has them, bounds of gate and up in the last layers. MTP layers are not read.",
    DeclaredForm(norm=OFFSET, qk_norm=OFFSET, qk_norms=_QK_NORMS, gate="self_attn.g_proj", gates_heads=True),
    suffixes=(
        *STEP_NAMES,
        (".moe.gate.weight", ".mlp.gate.weight"),
        (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
    ),
    parts=((".share_expert.", ".mlp.shared_experts."),),
    spelled={
        "num_attention_groups": "num_key_value_heads",
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "share_expert_dims": "shared_expert_intermediate_size",
        "share_expert_dim": "shared_expert_intermediate_size",
        "moe_router_scaling_factor": "routed_scaling_factor",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
        "shared_expert_intermediate_size": 1280,
        "attention_bias": False,
        "mlp_bias": False,
    },
    only={
        "hidden_act": "silu",  # transformers has no other, whatever the file says
        "gating": True,
        "use_head_wise_attn_gate": True,
        "use_qk_norm": True,
        "zero_centered": True,
        "sink": False,
        "att_impl_type": "GQA",
        "use_rope_layers": [],
        "yarn_only_types": [FULL],
        "use_bidirectional_attention": False,
        "sparse_attention_config": None,
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "moe_every_n_layer": 1,
    },
    eps="rms_norm_eps",
    rope=no_rope,
    grouped=True,
    adapt=_step_fields,
    choose=_step_form,
    each_layer=_step_layer,
    experts=shared_of_size,
    bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    gguf=GGUFRow("step35", read=_gguf_step, choose=lambda gguf, form: replace(form, limits=gguf_limits(gguf.fields))),
)


def _compass_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window and the rope of its kind, or without rope if `rope_parameters` has
    null for the kind. Raises ModelConfigError for wrong fields.
    """
    kind, ropes = layer_kinds(fields)[layer], fields.mapping("rope_parameters") or {}
    if kind not in ropes or ropes[kind] is not None:
        return kinds_of_ropes(fields, layer, attention, partial_rotary=False)
    return replace(attention, window=fields.integer("sliding_window") if kind == SLIDING else None)


_COMPASS = Row(
    "Compass (Cohere 2026): Cohere 2's layers, with a rope of halves of a head, or none, by kind of layer.",
    DeclaredForm(placement=PARALLEL, norm=UNBIASED, norms=("input_layernorm",)),
    defaults={EPS: 1e-5, "sliding_window": 4096, "attention_bias": False, "bos_token_id": 5}
    | {"eos_token_id": 255001, "rope_theta": 10000.0},
    only={"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False},
    rope=no_rope,
    grouped=True,
    tied=True,
    each_layer=_compass_layer,
    more=lambda fields: {"logit_scale": fields.number("logit_scale", 1.0)},
    **_UNBIASED,
)


def _beam_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types` (by default every sixth layer and the last are FULL), `mlp_layer_types` (by default the
    first three are dense), ropes by kind (by default none in FULL layers), and `rope_theta`, 10,000. Raises
    ModelConfigError for wrong fields.
    """
    count = fields.integer("num_hidden_layers")
    usual = {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, FULL: None}
    dense = ["dense" if layer < 3 else "sparse" for layer in range(count)]
    return {
        "layer_types": fields.value(
            "layer_types", [*layer_kinds(ConfigFields({"num_hidden_layers": count}), 6)[:-1], FULL]
        ),
        "mlp_layer_types": fields.value("mlp_layer_types", dense),
        "rope_parameters": fields.mapping("rope_parameters") or usual,
        "rope_theta": 10000.0,
    }


def _beam_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window of its kind, and with its rope or, if it has none, a factor of
    queries, (1 + (position + 1) / 2048) ** 0.1. Raises ModelConfigError for wrong fields.
    """
    own = _compass_layer(fields, layer, attention)
    return own if own.rope is not None else replace(own, temperature=TemperatureTuning(2048.0, 0.1, 1, power=True))


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
        each_layer=clipped,
        experts=softmax_experts,
        experts_in="ffn",
        expert_names=ExpertNames(gate="w1", up="v1", down="w2", router="router.layer"),
        expert_rows=ExpertRows(rows=("w1", "v1"), turned=("w2",)),
        gguf=GGUFRow(
            "dbrx",
            eps="attention.layer_norm_epsilon",
            clip="attention.clamp_kqv",
            experts=partial(gguf_experts, norm_weights=True),
        ),
    ),
    "BeamForCausalLM": Row(
        "Beam 1.0 (Reflection AI 2026): norms before and after both parts of a layer, which are added up with factors "
        "by depth, a gate with a bias for each head, windows with rope in five of six layers, a factor of queries in "
        "the sixth, experts as DeepSeek-V3 has them.",
        DeclaredForm(
            norm=RMS,
            placement=AROUND,
            norms=(
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            qk_norm=RMS,
            qk_norms=_QK_NORMS,
            gate="self_attn.gate_proj",
            gate_bias="self_attn.gate_bias",
            depth_scaled=True,
        ),
        spelled={"num_experts": "n_routed_experts"},
        defaults={
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "sliding_window": 512,
            "attention_bias": False,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
        },
        only={"n_shared_experts": 0, "rope_scaling": None},
        eps="rms_norm_eps",
        rope=no_rope,
        grouped=True,
        adapt=_beam_fields,
        each_layer=_beam_layer,
        more=lambda fields: {"logit_soft_cap": read_cap(fields, "final_logit_softcapping", 30.0)},
        experts=sigmoid_experts,
        **_UNBIASED,
    ),
    "FlintForCausalLM": Row(
        "Flint (Recursive 2026): sinks in all layers, rope in windows alone, experts picked by sigmoid scores.",
        DeclaredForm(norm=RMS, qk_norm=RMS, qk_norms=_QK_NORMS),
        defaults={
            "rms_norm_eps": 1e-6,
            "head_dim": 128,
            "sliding_window": 513,
            "attention_bias": False,
            "mlp_only_layers": [0, 1],
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 1024,
        },
        eps="rms_norm_eps",
        grouped=True,
        adapt=_flint_fields,
        each_layer=lambda fields, layer, attention: replace(rope_in_windows(fields, layer, attention), sinks=True),
        experts=_flint_experts,
        expert_names=ExpertNames(shared="shared_expert"),
        suffixes=((".self_attn.softmax_offset", ".self_attn.sinks"),),
        **_UNBIASED,
    ),
    "SolarOpenForCausalLM": Row(
        "Solar Open (Upstage 2025): Llama with experts as DeepSeek-V3 has them in all layers.",
        DeclaredForm(norm=RMS, qk_norm=RMS),
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "head_dim": 128,
            "attention_bias": False,
            "n_shared_experts": 1,
        },
        eps="rms_norm_eps",
        grouped=True,
        adapt=lambda fields: {"intermediate_size": fields.integer("moe_intermediate_size")},
        experts=sigmoid_experts,
        **{**_UNBIASED, "output_bias": False},
    ),
    "Step3p5ForCausalLM": _STEP,
    "Step3p7ForConditionalGeneration": _STEP._replace(
        gguf=None,
        about="Step 3.7 Flash (StepFun 2026), its text part alone: Step 3.5's layers.",
        wrapped=True,
        names=(("model.language_model.", "model."),),
        unused=("vision_model.", "vit_large_projector.", "model.vision_model.", "model.multi_modal_projector."),
    ),
    "CohereCompassForCausalLM": _COMPASS,
    "CohereCompassForConditionalGeneration": _COMPASS._replace(
        about="North Micro Vision (Cohere 2026), its text part alone: Compass's layers.",
        wrapped=True,
        names=(("model.language_model.", "model."),),
        unused=("model.visual.",),
    ),
}

"""Rows, like those of declared_rows, of families with experts or with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxengine.models.config.attention import LayerAttention, TemperatureTuning
from jaxengine.models.config.declared import ALL_HEADS, AROUND, OUTPUT, PARALLEL, RMS, ROWS, UNBIASED, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import (
    GGUFConfig,
    gguf_fields,
    gguf_layers,
    gguf_shared_experts,
    gguf_sliding,
)
from jaxengine.models.config.readers.hf import (
    FULL,
    SLIDING,
    layer_kinds,
    listed_dense,
    require_rope,
)
from jaxengine.models.families.declared_row import (
    EPS,
    GGUFRow,
    Row,
    neighbours,
    parts_of_heads,
    rope_in_windows,
    softmax_experts,
)
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.layers.experts.moe import ExpertNames
from jaxengine.models.params.source import MTP_LAYER, NextLayer

_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_FORM = DeclaredForm(norm=RMS, qk_norm=RMS)
_NORMED = replace(_FORM, qk_norms=_QK_NORMS)
# Names of the numbers of experts -> DeepSeek-V3's names.
COUNTS = {"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"}
COUNTS |= {"num_shared_experts": "n_shared_experts"}
_RMS_EPS: dict[str, Any] = {"eps": "rms_norm_eps", "mlp_bias": False, "grouped": True}
_PLAIN: dict[str, Any] = {"bias": False, "output_bias": False, **_RMS_EPS}
BIASED: dict[str, Any] = {"bias": "attention_bias", "output_bias": "attention_bias", **_RMS_EPS}
_LIKE_V3: dict[str, Any] = {"rms_norm_eps": 1e-6, "attention_bias": False, "first_k_dense_replace": 1}
_LIKE_V3 |= {"n_shared_experts": 1, "routed_scaling_factor": 2.5}
# Values that the classes of some families in transformers use, whatever a file says.
_NO_GROUPS: dict[str, Any] = {"n_group": 1, "topk_group": 1}
ALL_NORMED: dict[str, Any] = {**_NO_GROUPS, "norm_topk_prob": True}


def sliding_but(every: int, name: str = "") -> Any:
    """Return a function for Row.adapt that gives `layer_types`. If they are not listed, every `every`-th layer is FULL
    and the others are SLIDING; the field `name`, if it is given and present, contains that period instead. The function
    raises ModelConfigError for wrong fields.
    """

    def adapt(fields: ConfigFields) -> Mapping[str, Any]:
        count = fields.integer(name, every) if name else every
        return {"layer_types": list(layer_kinds(fields, count))}

    return adapt


def _exaone_kinds(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types`. If they are not listed, `sliding_window_pattern` gives them: a period, as in `sliding_but`
    (4 by default), or a text of L (SLIDING) and G (FULL), which is repeated and after which the last layer is made
    FULL. Raises ModelConfigError for wrong fields.
    """
    pattern, count = fields.value("sliding_window_pattern", 4), fields.integer("num_hidden_layers")
    if fields.has("layer_types") or not isinstance(pattern, str):
        return sliding_but(4, "sliding_window_pattern")(fields)
    if not pattern or set(pattern) - {"L", "G"}:
        raise fields.fail("sliding_window_pattern", "an integer, or L and G")
    kinds = [SLIDING if pattern[layer % len(pattern)] == "L" else FULL for layer in range(count)]
    return {"layer_types": [*kinds[:-1], FULL]}


# Returns the ExpertsConfig of a GGUF file as `sigmoid_experts` does of a config.json.
gguf_sigmoid_experts = partial(gguf_shared_experts, scoring_func="sigmoid")


def _exaone_layers(fields: ConfigFields, layers: tuple[LayerAttention, ...]) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer of a GGUF file: with a window and rope in three of four layers, neither in the
    fourth, or `layers` if `attention.sliding_window` is absent or 0. Raises ModelConfigError for wrong fields.
    """
    if not fields.integer("attention.sliding_window", 0, minimum=0):
        return layers
    return gguf_layers(fields, layers[0], replace(layers[0], window=None, rope=None), full_every=4)


def gguf_after_dense(gguf: GGUFConfig, **own: Any) -> ExpertsConfig:
    """Return the ExpertsConfig of a file whose first layer has an MLP instead if the file has an ffn_gate. own: further
    fields. Raises ModelConfigError for wrong fields, and without experts.
    """
    experts = gguf_sigmoid_experts(gguf.fields, norm_weights=True)
    if experts is None:
        raise gguf.fields.fail("expert_count", "at least 1")
    return replace(experts, dense_layers=(0,) if "ffn_gate" in gguf.stored else (), **own)


def _gguf_hunyuan(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields` with the experts of Hunyuan 3, whose shared MLP has `expert_shared_feed_forward_length`
    elements (default: 0, for none). Raises ModelConfigError for wrong fields.
    """
    size = gguf.fields.integer("expert_shared_feed_forward_length", 0, minimum=0)
    return gguf_fields(gguf, experts=gguf_after_dense(gguf, shared_intermediate_size=size))


def _cohere_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types`, `mlp_layer_types` and the epsilon of norms. By default the first `first_k_dense_replace`
    layers are dense and the others sparse, and in each of these two runs every n-th layer is FULL, with n from
    `prefix_dense_sliding_window_pattern` (1) and `sliding_window_pattern` (4). Raises ModelConfigError for wrong
    fields.
    """
    count, first = fields.integer("num_hidden_layers"), fields.integer("first_k_dense_replace", 0, minimum=0)
    first = min(first, count)
    periods = fields.integer("prefix_dense_sliding_window_pattern", 1), fields.integer("sliding_window_pattern", 4)
    numbers = [(layer, periods[0]) for layer in range(first)] + [(layer, periods[1]) for layer in range(count - first)]
    kinds = [SLIDING if (number + 1) % period else FULL for number, period in numbers]
    mlps = ["dense"] * first + ["sparse"] * (count - first)
    return {
        "layer_types": fields.value("layer_types", kinds),
        "mlp_layer_types": fields.value("mlp_layer_types", mlps),
        EPS: fields.number("rms_norm_eps", None) or fields.number(EPS),
    }


def _cohere_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention: SLIDING layers with the window, or without rope if there is no window; FULL ones
    without rope, except that dense layers keep it if `prefix_dense_sliding_window_pattern` is 1, the default. Raises
    ModelConfigError for wrong fields.
    """
    if layer_kinds(fields)[layer] == SLIDING:
        window = fields.integer("sliding_window", None)  # without one its layers have no rope
        return replace(attention, window=window, rope=None if window is None else attention.rope)
    keeps_rope = layer in (listed_dense(fields) or ()) and fields.integer("prefix_dense_sliding_window_pattern", 1) == 1
    return attention if keeps_rope else replace(attention, rope=None)


def _cohere_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of `num_experts` experts of size `intermediate_size`, in all layers that
    `mlp_layer_types` does not list as dense. The shared MLP, `num_shared_experts` (0 by default) times as wide, is
    added to the experts' output or averaged with it, as `shared_expert_combination_strategy` ("sum" or "average") says.

    `expert_selection_fn` is softmax, whose weights of a token's experts always add up to 1, or sigmoid, whose weights
    do with `norm_topk_prob`. Raises ModelConfigError for wrong fields.
    """
    scores, mix = fields.text("expert_selection_fn"), fields.text("shared_expert_combination_strategy")
    if scores not in ("softmax", "sigmoid"):
        raise fields.fail("expert_selection_fn", "softmax or sigmoid")
    if mix not in ("average", "sum"):
        raise fields.fail("shared_expert_combination_strategy", "average or sum")
    size, shared = fields.integer("intermediate_size"), fields.integer("num_shared_experts", 0, minimum=0)
    return ExpertsConfig(
        num_experts=fields.integer("num_experts"),
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        norm_weights=scores == "softmax" or fields.boolean("norm_topk_prob"),
        dense_layers=listed_dense(fields) or (),
        scoring_func=scores,
        shared_intermediate_size=size * shared,
        output_scale=0.5 if shared and mix == "average" else 1.0,
    )


def _gguf_cohere_experts(fields: ConfigFields) -> ExpertsConfig | None:
    """Return the ExpertsConfig of a GGUF file: sigmoid scores without correction, and the average with the shared MLP.
    None without experts. Raises ModelConfigError for wrong fields.
    """
    experts = gguf_sigmoid_experts(fields)
    if experts is None:
        return None
    return replace(experts, correction_bias=False, output_scale=0.5 if experts.shared_intermediate_size else 1.0)


def _gguf_cohere_layers(fields: ConfigFields, layers: tuple[LayerAttention, ...]) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer of a GGUF file. SLIDING layers (by default all but the first of every four)
    have the window; they and the first `leading_dense_block_count` layers keep rope. Raises ModelConfigError for wrong
    fields.
    """
    fields.integer("attention.sliding_window")
    first, full = fields.integer("leading_dense_block_count", minimum=0), replace(layers[0], window=None)
    found = gguf_layers(fields, layers[0], full, 4, full_first=True)
    turned = (slides or layer < first for layer, slides in enumerate(gguf_sliding(fields, 4, full_first=True)))
    return tuple(each if turns else replace(each, rope=None) for each, turns in zip(found, turned, strict=True))


def shared_of_size(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of `sigmoid_experts` with a shared MLP of size `shared_expert_intermediate_size`. Raises
    ModelConfigError for wrong fields.
    """
    size = fields.integer("shared_expert_intermediate_size")
    return replace(sigmoid_experts(fields), shared_intermediate_size=size)


def _mistral_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention, with a temperature of queries from original_max_position_embeddings on if
    `rope_parameters` has a llama_4_scaling_beta. Raises ModelConfigError for wrong fields.
    """
    rope = ConfigFields(fields.mapping("rope_parameters") or {})
    if (beta := rope.number("llama_4_scaling_beta", None)) is None:
        return attention
    original = rope.integer("original_max_position_embeddings")
    return replace(attention, temperature=TemperatureTuning(original, beta))


def _mistral_rope(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `rope_parameters`, the file's or its `rope_scaling`, without partial_rotary_factor, and with what
    `llama_4_scaling` of Mistral Large 3's files says, if present; None if empty. `rope_scaling` is None. Raises
    ModelConfigError without rope, and for two different original lengths.
    """
    require_rope(fields)
    rope = dict(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
    rope.pop("partial_rotary_factor", None)
    if fields.has("llama_4_scaling"):
        own, name = fields.part("llama_4_scaling"), "original_max_position_embeddings"
        own.require(**({name: rope[name]} if name in rope else {}))
        rope |= {"llama_4_scaling_beta": own.number("beta"), name: own.integer(name)}
    return {"rope_parameters": rope or None, "rope_scaling": None}


def _mistral_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig as `sigmoid_experts` does, but with softmax scores and without correction. Raises
    ModelConfigError for wrong fields, and for another scoring_func or moe_layer_freq.
    """
    fields.require(scoring_func="softmax", moe_layer_freq=1)
    own = ConfigFields({key: value for key, value in fields.raw.items() if key != "scoring_func"})
    return replace(sigmoid_experts(own), scoring_func="softmax", correction_bias=False)


def _sarvam_rope(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `rope_scaling` with type yarn in place of "deepseek_yarn"; {} for a file with another type. Raises
    ModelConfigError for a field that is not a mapping.
    """
    rope = fields.mapping("rope_scaling") or {}
    named = {"rope_type": "yarn", **{key: value for key, value in rope.items() if key not in ("type", "rope_type")}}
    return {"rope_scaling": named} if "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")) else {}


def ling(about: str, **defaults: Any) -> Row:
    """Return a Row for layers as in Ling 2.0. about: the row's description. defaults: further defaults."""
    return Row(
        about,
        replace(
            _FORM,
            qkv=("attention.query_key_value",),
            joined=ROWS,
            out="attention.dense",
            qk_norms=("attention.query_layernorm", "attention.key_layernorm"),
        ),
        names=(("model.word_embeddings.", "model.embed_tokens."),),
        parts=((".self_attn.o_proj", ".attention.dense"),),
        divided={".attention.query_key_value": tuple(f".self_attn.{part}_proj" for part in "qkv")},
        spelled={**COUNTS, "use_qkv_bias": "attention_bias", "score_function": "scoring_func"},
        defaults={"attention_bias": False, "use_qk_norm": True, "first_k_dense_replace": 1, **defaults},
        only={"use_bias": False, "moe_router_enable_expert_bias": True},
        rope=parts_of_heads,
        choose=lambda fields, form: form if fields.boolean("use_qk_norm") else replace(form, qk_norms=()),
        experts=sigmoid_experts,
        expert_names=ExpertNames(correction_bias="gate.expert_bias"),
        bias="attention_bias",
        output_bias=False,
        **_RMS_EPS,
    )


# Keys are the class names that config.json lists under "architectures".
EXPERT_ROWS: dict[str, Row] = {
    "ExaoneMoeForCausalLM": Row(
        "K-EXAONE (LG AI Research 2026): EXAONE 4's attention, norms before it, experts as DeepSeek-V3 has them.",
        _NORMED,
        spelled=COUNTS,
        defaults={**_LIKE_V3, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        adapt=_exaone_kinds,
        each_layer=rope_in_windows,
        experts=sigmoid_experts,
        expert_names=ExpertNames(correction_bias="e_score_correction_bias"),
        parts=((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
        gguf=GGUFRow("exaone-moe", experts=gguf_sigmoid_experts, layers=_exaone_layers),
        next_layer=MTP_LAYER._replace(dense=True, windowed=True),
        **_PLAIN,
    ),
    "Cohere2MoeForCausalLM": Row(
        "Command A with experts (Cohere 2026): Cohere 2's layers, experts after some dense layers, in some models RMS "
        "norms.",
        DeclaredForm(placement=PARALLEL, norm=UNBIASED, norms=("input_layernorm",)),
        defaults={
            EPS: 1e-5,
            "sliding_window": 4096,
            "attention_bias": False,
            "norm_topk_prob": True,
            "expert_selection_fn": "softmax",
            "shared_expert_combination_strategy": "average",
            "head_dim": 128,
            "bos_token_id": 5,
            "eos_token_id": 255001,
        },
        # `rope_scaling` scales, as in Cohere 2 and as the documentation of transformers' class says. Its code never
        # applies it: the class has a field of this name, which so does not reach what reads it in other families.
        rope=neighbours,
        grouped=True,
        tied=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        adapt=_cohere_fields,
        choose=lambda fields, form: replace(form, norm=RMS) if fields.has("rms_norm_eps") else form,
        each_layer=_cohere_layer,
        experts=_cohere_experts,
        gguf=GGUFRow(
            "cohere2moe",
            eps="attention.layer_norm_epsilon",
            experts=_gguf_cohere_experts,
            layers=_gguf_cohere_layers,
            more=lambda fields: {"logit_scale": fields.number("logit_scale")},
            interleaved=True,
        ),
        more=lambda fields: {
            "logit_scale": fields.number("logit_scale", 0.0625),
            "intermediate_size": fields.integer("prefix_dense_intermediate_size", fields.integer("intermediate_size")),
        },
    ),
    "AfmoeForCausalLM": Row(
        "Trinity (Arcee AI 2025): norms before and after both parts of a layer, a gate after attention, windows with "
        "rope in three of four layers, neither in the fourth, experts picked by corrected sigmoid scores.",
        replace(
            _NORMED,
            placement=AROUND,
            norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            gate="self_attn.gate_proj",
        ),
        spelled={**COUNTS, "route_scale": "routed_scaling_factor", "num_dense_layers": "first_k_dense_replace"},
        defaults={
            "rms_norm_eps": 1e-5,
            "head_dim": 128,
            "sliding_window": 1024,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "attention_bias": False,
        },
        only={"score_func": "sigmoid", "route_norm": True, **ALL_NORMED},
        adapt=sliding_but(4, "global_attn_every_n_layers"),
        each_layer=rope_in_windows,
        experts=sigmoid_experts,
        expert_names=ExpertNames(router="router.gate", correction_bias="expert_bias"),
        more=lambda fields: {
            "embedding_multiplier": fields.integer("hidden_size") ** 0.5
            if fields.boolean("mup_enabled", False)
            else 1.0
        },
        gguf=GGUFRow(
            "afmoe",
            experts=partial(gguf_sigmoid_experts, norm_weights=True),
            layers=_exaone_layers,
            more=lambda fields: {"embedding_multiplier": fields.integer("embedding_length") ** 0.5},
        ),
        **BIASED,
    ),
    "HYV3ForCausalLM": Row(
        "Hunyuan 3 (Tencent 2026): RMS norms on each head of q and k, experts picked by corrected sigmoid scores.",
        _NORMED,
        spelled={**COUNTS, "router_scaling_factor": "routed_scaling_factor"},
        defaults={
            **_LIKE_V3,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "head_dim": 128,
            "routed_scaling_factor": 2.826,
            "mlp_bias": False,
        },
        only=ALL_NORMED,
        experts=sigmoid_experts,
        expert_names=ExpertNames(router="router.gate", correction_bias="expert_bias", shared="shared_mlp"),
        parts=(
            (".mlp.gate.", ".mlp.router.gate."),
            (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
            (".mlp.shared_experts.", ".mlp.shared_mlp."),
        ),
        gguf=GGUFRow("hy_v3", read=_gguf_hunyuan),
        next_layer=NextLayer(norm="final_layernorm", normed=True),
        **{**BIASED, "mlp_bias": "mlp_bias"},
    ),
    "Mistral4ForCausalLM": Row(
        "Mistral 4 (Mistral AI 2026): DeepSeek-V2's latent attention and experts, queries scaled by the position.",
        _FORM,
        latent=True,
        defaults={"rms_norm_eps": 1e-6, "attention_bias": False, "n_shared_experts": 1, "q_lora_rank": 1024},
        only={"n_group": 1, "topk_group": 1},
        adapt=_mistral_rope,
        each_layer=_mistral_layer,
        experts=_mistral_experts,
        **BIASED,
    ),
    "YoutuForCausalLM": Row(
        "Youtu-LLM (Tencent 2025): Llama with DeepSeek-V2's latent attention.",
        _FORM,
        latent=True,
        tied=True,
        defaults={"rms_norm_eps": 1e-6, "attention_bias": False, "q_lora_rank": 1536},
        **BIASED,
    ),
    "SarvamMLAForCausalLM": Row(
        "Sarvam 105B (Sarvam AI 2026): DeepSeek-V3's layers without a latent of queries.",
        _FORM,
        latent=True,
        spelled=COUNTS,
        defaults=_LIKE_V3,
        adapt=_sarvam_rope,
        experts=sigmoid_experts,
        **BIASED,
    ),
    "AXK1ForCausalLM": Row(
        "A.X K1 (SK Telecom 2026): DeepSeek-V3's layers with a norm after the experts.",
        replace(_FORM, experts_norm="post_mlp_layernorm"),
        latent=True,
        defaults={**_LIKE_V3, "n_group": 8, "topk_group": 4},
        only={"moe_layer_freq": 1},
        experts=sigmoid_experts,
        suffixes=((".mlp.post_mlp_layernorm.weight", ".post_mlp_layernorm.weight"),),
        **BIASED,
    ),
    "FlexOlmoForCausalLM": Row(
        "FlexOlmo (Shi et al. 2025, arXiv:2507.07024): OLMo 2's layers with experts.",
        replace(
            _NORMED,
            placement=OUTPUT,
            norms=("post_attention_layernorm", "post_feedforward_layernorm"),
            qk_norm=ALL_HEADS,
        ),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 500000.0, "attention_bias": False},
        only={"clip_qkv": None},
        experts=softmax_experts,
        **BIASED,
    ),
    "Kolibri1ForCausalLM": Row(
        "Kolibri 1 (Aleph Alpha 2026): GLM-4-0414's norms, EXAONE 4's attention, experts picked by corrected logits.",
        replace(
            _NORMED,
            placement=AROUND,
            norms=("input_layernorm", "post_attn_norm", "post_attention_layernorm", "post_ffn_norm"),
        ),
        spelled=COUNTS,
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128, "sliding_window": 513},
        adapt=lambda fields: {
            "intermediate_size": fields.integer("moe_intermediate_size"),
            "norm_topk_prob": fields.boolean("norm_topk_prob", False),
            **sliding_but(5)(fields),
        },
        only=_NO_GROUPS,
        each_layer=rope_in_windows,
        experts=lambda fields: replace(shared_of_size(fields), corrects_logits=True),
        suffixes=((".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),),
        parts=((".post_self_attn_layernorm", ".post_attn_norm"), (".post_mlp_layernorm", ".post_ffn_norm")),
        **_PLAIN,
    ),
    "SarvamMoEForCausalLM": ling(
        "Sarvam 30B (Sarvam AI 2026): Ling 2.0's layers with all of each head rotated.",
        rms_norm_eps=1e-6,
        rope_theta=8000000.0,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    ),
}

"""Rows, like those of declared_rows, of families for which transformers has no class of that name. Their code was
published with their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import AROUND, GROUPS, LAYER, OFFSET, RMS, ROWS, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import gguf_fields, gguf_layers, gguf_shared_experts
from jaxengine.models.config.readers.hf import FULL, SLIDING, layer_kinds, read_head_dim, read_rope
from jaxengine.models.config.rope import stretched_base
from jaxengine.models.families.declared_experts import gguf_sigmoid_experts, ling
from jaxengine.models.families.declared_mixtures import STEP_NAMES
from jaxengine.models.families.declared_row import GGUFRow, Row, kinds_of_ropes, no_rope, softmax_experts
from jaxengine.models.families.declared_rows import ROWS_BY_NAME, transformer_names
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.params.source import NextLayer

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
    """Return the feed-forward size, which is half of the file's, and `seq_length` as the longest context. Raises
    ModelConfigError for an odd size and for wrong fields.
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


def _deepseek_experts(fields: ConfigFields) -> ExpertsConfig | None:
    """Return the ExpertsConfig of experts with softmax scores and a shared MLP of `n_shared_experts` (default: 0) times
    their size, after `first_k_dense_replace` dense layers (none by default); None for a model without
    `n_routed_experts`. Raises ModelConfigError for wrong fields, and for another scoring_func or moe_layer_freq.
    """
    if fields.value("n_routed_experts", None) is None:
        return None
    fields.require(scoring_func="softmax", moe_layer_freq=1)
    own = ConfigFields({**fields.raw, "num_experts": fields.integer("n_routed_experts")})
    first = min(fields.integer("first_k_dense_replace", 0, minimum=0), fields.integer("num_hidden_layers"))
    size = fields.integer("moe_intermediate_size") * fields.integer("n_shared_experts", 0, minimum=0)
    return replace(softmax_experts(own), dense_layers=tuple(range(first)), shared_intermediate_size=size)


def _telechat_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `rope_theta` (10000 by default), for a `training_seqlen` above `base_seqlen` as `stretched_base` with
    alpha = 2 ** ceil(log2(training_seqlen / base_seqlen) + 1) - 1, and `max_position_embeddings`: `training_seqlen`, or
    `seq_length` without it. Raises ModelConfigError for wrong fields, and as `stretched_base` does.
    """
    trained, base = fields.integer("training_seqlen", None), fields.integer("base_seqlen", None)
    theta, size = fields.number("rope_theta", 10000.0), read_head_dim(fields)
    longest = trained or fields.integer("seq_length")
    if trained is not None and base is not None and trained > base:
        alpha = 2 ** math.ceil(math.log2(trained / base) + 1) - 1
        theta = stretched_base(theta, alpha, size)
    return {"rope_theta": theta, "max_position_embeddings": longest}


def _teleflm_scales(fields: ConfigFields) -> dict[str, float]:
    """Return `input_mult` as the factor of embeddings, and `output_mult` / `mup_scale_factor` as that of logits, if
    `use_mup` is true; {} otherwise. Each is 1 by default. Raises ModelConfigError for wrong fields.
    """
    if not fields.boolean("use_mup", False):
        return {}
    embeddings, logits, width = (fields.number(name, 1.0) for name in ("input_mult", "output_mult", "mup_scale_factor"))
    return {"embedding_multiplier": embeddings, "logit_scale": logits / width}


def _plamo_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types` (every `sliding_window_pattern`-th layer is FULL, by default every eighth), the window
    (`window_size`, 128 by default, or the one in `sliding_window`, a number or a list with null for FULL layers) and
    ropes by kind, from `rope_theta` and, of SLIDING layers, `rope_local_theta`; of FULL layers with YaRN, not
    truncated, if `rope_scaling_factor` is not 1, from `initial_context_length` on. `rope_parameters` or else
    `rope_scaling` that is no mapping by kind is of FULL layers. Raises ModelConfigError for wrong fields, and for both
    YaRN and these.
    """
    window, thetas = fields.value("sliding_window", None), (fields.number("rope_theta"), fields.number(_LOCAL))
    listed = [each for each in (window if isinstance(window, list) else [window]) if each is not None]
    if any(type(each) is not int or each < 1 for each in listed) or len(set(listed)) > 1:
        raise fields.fail("sliding_window", "an integer >= 1, or a list of one such number and null")
    plain = [{"rope_type": "default", "rope_theta": theta} for theta in thetas]
    if (own := fields.mapping("rope_parameters") or fields.mapping("rope_scaling")) and FULL not in own:
        plain[0] = {"rope_theta": thetas[0], **own}
    if (factor := fields.number("rope_scaling_factor", 1.0)) != 1.0:
        if own:
            raise fields.fail("rope_scaling_factor", "1 or absent beside rope_parameters or rope_scaling")
        original = fields.integer("initial_context_length")
        plain[0] |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        plain[0] |= {"truncate": False}
    return {
        "layer_types": list(layer_kinds(fields, fields.integer("sliding_window_pattern", 8))),
        "sliding_window": listed[0] if listed else fields.integer("window_size", 128),
        "rope_parameters": own if own and FULL in own else {FULL: plain[0], SLIDING: plain[1]},
        "rope_scaling": None,
    }


def _gguf_plamo(fields: ConfigFields, layers: tuple[LayerAttention, ...]) -> tuple[LayerAttention, ...]:
    """Return the layers of a GGUF file, by default with a window in all but every eighth. Those with a window have an
    unscaled rope. Raises ModelConfigError for wrong fields.
    """
    own, rope = layers[0], layers[0].rope
    return gguf_layers(fields, replace(own, rope=rope and replace(rope, scaling=None)), replace(own, window=None), 8)


def _pangu_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with norms before and after both parts of a layer if `sandwich_norm` is true, and with
    `rms_norm_eps` in the norms of latents. Raises ModelConfigError for wrong fields.
    """
    form = replace(form, latent_eps=fields.number("rms_norm_eps"))
    if not fields.boolean("sandwich_norm"):
        return form
    return replace(form, placement=AROUND, norms=(*form.norms, "pre_mlp_layernorm", "post_mlp_layernorm"))


def _pangu_experts(fields: ConfigFields) -> ExpertsConfig | None:
    """Return the ExpertsConfig that `sigmoid_experts` reads, with scores corrected if `router_enable_expert_bias` is
    true; None for a model without `n_routed_experts`. Raises ModelConfigError for wrong fields.
    """
    if fields.value("n_routed_experts", None) is None:
        return None
    corrected = fields.boolean("router_enable_expert_bias", False)
    return replace(sigmoid_experts(fields), correction_bias=corrected)


def _param_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of Ling 2.0's experts, whose shared MLP has the size
    `moe_shared_expert_intermediate_size` if that is set. Raises ModelConfigError for wrong fields.
    """
    own = sigmoid_experts(fields)
    size = fields.integer("moe_shared_expert_intermediate_size", own.shared_intermediate_size)
    return replace(own, shared_intermediate_size=size if own.shared_intermediate_size else 0)


def _step_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `num_key_value_heads`, 1, and `mlp_layer_types`, in which the layers that `moe_layers_enum` names (a list,
    or a text separated by commas; all but the first without it) are sparse. Raises ModelConfigError for wrong fields.
    """
    count, listed = fields.integer("num_hidden_layers"), fields.value("moe_layers_enum", None)
    listed = list(range(1, count)) if listed is None else listed
    listed = [part.strip() for part in listed.split(",") if part.strip()] if isinstance(listed, str) else listed
    known = {str(layer) for layer in range(count)}
    if not isinstance(listed, (list, tuple)) or not {str(each) for each in listed} <= known:
        raise fields.fail("moe_layers_enum", f"numbers of layers, 0 to {count - 1}, a list or separated by commas")
    sparse = {str(each) for each in listed}
    return {
        "num_key_value_heads": 1,
        "mlp_layer_types": ["sparse" if str(layer) in sparse else "dense" for layer in range(count)],
    }


_LOCAL = "rope_local_theta"
# openPangu's first names of DeepSeek-V3's fields.
_PANGU_NAMES = {
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_q_lora_dim": "q_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
    "num_dense_layers": "first_k_dense_replace",
    "num_mtp_layers": "num_nextn_predict_layers",
    "num_routed_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
_STEP3 = Row(
    "Step 3 (StepFun 2025, arXiv:2507.19427): one head of keys and values, queries projected from a vector of low "
    "rank, experts of softmax scores beside a shared MLP.",
    DeclaredForm(norm=RMS),
    spelled={
        "max_seq_len": "max_position_embeddings",
        "max_position_embedding": "max_position_embeddings",
        "moe_num_experts": "num_experts",
        "moe_top_k": "num_experts_per_tok",
        "norm_expert_weight": "norm_topk_prob",
    },
    defaults={"rms_norm_eps": 1e-5, "head_dim": 256, "rope_theta": 500000.0, "norm_topk_prob": False},
    only={"num_attention_groups": 1, "attention_bias": False, "mlp_bias": False},
    bias=False,
    output_bias=False,
    adapt=_step_fields,
    choose=lambda fields, form: replace(form, query_rank=fields.integer("share_q_dim", read_head_dim(fields))),
    experts=lambda fields: replace(
        softmax_experts(fields), shared_intermediate_size=fields.integer("share_expert_dim")
    ),
    suffixes=(*STEP_NAMES, (".moe.gate.weight", ".mlp.gate.weight")),
    parts=((".share_expert.", ".mlp.shared_experts."),),
    **_RMS,
)


_gguf_experts = partial(gguf_shared_experts, scoring_func="softmax")

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
        gguf=GGUFRow("internlm2"),
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
        rope=lambda fields, head_dim: read_rope(fields, head_dim, partial_rotary=True, interleaved=True),
        bias="add_qkv_bias",
        output_bias=False,
        adapt=_chatglm_fields,
        gguf=GGUFRow("chatglm", interleaved=True),
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
        gguf=GGUFRow("deepseek", experts=_gguf_experts),
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
        gguf=GGUFRow("bailingmoe", experts=_gguf_experts),
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
        gguf=GGUFRow("orion", eps="attention.layer_norm_epsilon"),
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
        gguf=GGUFRow("qwen", more=lambda fields: {"intermediate_size": fields.integer("feed_forward_length") // 2}),
        **{**_RMS, "grouped": False},
    ),
    "RWForCausalLM": ROWS_BY_NAME["FalconForCausalLM"]._replace(
        about="Falcon under its first name, RefinedWeb.",
        spelled={**ROWS_BY_NAME["FalconForCausalLM"].spelled, "n_head_kv": "num_kv_heads"},
        adapt=_refined_web_fields,
        gguf=None,
    ),
    "StableLMEpochForCausalLM": ROWS_BY_NAME["StableLmForCausalLM"]._replace(
        about="StableLM under its first name.",
        spelled={"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
        only={"rotary_scaling_factor": 1.0},
        gguf=None,
    ),
    "BailingMoeV2ForCausalLM": ling(
        "Ling 2.0 (Ant Group 2025): GLM-4.5's layers with a joined projection of queries, keys and values.",
        rms_norm_eps=1e-6,
        rope_theta=600000.0,
        n_shared_experts=0,
    )._replace(gguf=GGUFRow("bailingmoe2", experts=gguf_sigmoid_experts)),
    "Param2MoEForCausalLM": ling(
        "Param 2 (BharatGen 2026): Ling 2.0's layers.",
        rms_norm_eps=1e-6,
        n_shared_experts=1,
        use_qk_norm=False,
    )._replace(experts=_param_experts),
    "TeleChat2ForCausalLM": Row(
        "TeleChat 2 (TeleAI 2024): Llama with a joined projection of keys and values, and biases where attention and "
        "MLP end.",
        DeclaredForm(
            norm=RMS,
            qkv=("self_attention.query", "self_attention.key_value"),
            out="self_attention.dense",
            down_bias=True,
        ),
        names=transformer_names(word_embeddings="embed_tokens"),
        spelled={
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "ffn_hidden_size": "intermediate_size",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        defaults={"rms_norm_eps": 1e-5},
        only={"apply_residual_connection_post_layernorm": False, "embed_layernorm": False},
        bias=False,
        adapt=_telechat_fields,
        **_RMS,
    ),
    "TeleFLMForCausalLM": Row(
        "Tele-FLM (Li et al. 2024, arXiv:2404.16645): Llama with embeddings and logits multiplied by constants.",
        DeclaredForm(norm=RMS),
        defaults={"rms_norm_eps": 1e-6},
        only={"attention_bias": False, "mlp_bias": False},
        bias=False,
        output_bias=False,
        more=_teleflm_scales,
        **_RMS,
    ),
    "Plamo3ForCausalLM": Row(
        "PLaMo 3 (Preferred Networks 2025): norms before and after both parts of a layer, whose weights are stored as "
        "their difference from small numbers, windows with a rope of their own in most layers.",
        DeclaredForm(
            norm=OFFSET,
            placement=AROUND,
            norms=("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
            norm_offsets=(1.0, 1 / 5, 1.0, 1 / 5**1.5),
            qkv=("mixer.qkv_proj",),
            joined=ROWS,
            out="mixer.o_proj",
            qk_norm=OFFSET,
            qk_norms=("mixer.q_norm", "mixer.k_norm"),
            up=("mlp.gate_up_proj",),
            joined_up=True,
        ),
        names=(("model.layers.layers.", "model.layers."),),
        spelled={"rope_global_theta": "rope_theta"},
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128, "num_key_value_heads": 4, "rope_theta": 150000.0}
        | {_LOCAL: 10000.0},
        only={"scale_embedding": False},
        rope=no_rope,
        bias=False,
        output_bias=False,
        tied=True,
        adapt=_plamo_fields,
        each_layer=kinds_of_ropes,
        gguf=GGUFRow("plamo3", layers=_gguf_plamo, read=partial(gguf_fields, yarn={"truncate": False})),
        **_RMS,
    ),
    "PanguUltraMoEForCausalLM": Row(
        "openPangu Ultra MoE (Huawei 2025, arXiv:2505.04519): DeepSeek-V3's layers, in some models with norms after "
        "both parts, and experts of sigmoid scores without groups.",
        DeclaredForm(norm=RMS),
        latent=True,
        spelled=_PANGU_NAMES,
        defaults={"rms_norm_eps": 1e-5, "sandwich_norm": False, "n_shared_experts": 0, "q_lora_rank": None},
        only={"attention_bias": False, "mlp_bias": False, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1}
        | {"param_sink_number": 0},
        bias=False,
        output_bias=False,
        choose=_pangu_form,
        experts=_pangu_experts,
        next_layer=NextLayer(),
        **_RMS,
    ),
    "Step3TextForCausalLM": _STEP3,
    "Step3VLForConditionalGeneration": _STEP3._replace(
        about="Step 3 with a vision tower (StepFun 2025, arXiv:2507.19427), its text part alone: Step 3's layers.",
        wrapped=True,
        unused=("vision_model.", "vit_downsampler.", "vit_downsampler2.", "vit_large_projector."),
    ),
}

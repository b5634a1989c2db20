"""Rows, like those of declared_rows, of families in which all or most layers keep states instead of keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ml_dtypes import bfloat16

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import AROUND, BEFORE, OFFSET, RMS, WITHIN, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import MAX_HEADS, ConfigFields
from jaxengine.models.config.readers.gguf_states import gguf_jamba, gguf_mamba, gguf_mamba2
from jaxengine.models.config.readers.hf import (
    FULL,
    SLIDING,
    read_each_layer,
    read_head_dim,
    read_rope,
    ropes_by_kind,
)
from jaxengine.models.config.readers.state_space import read_dt_limits, read_state_space
from jaxengine.models.config.rope import Rope
from jaxengine.models.config.state import (
    GatedRecurrence,
    LinearState,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)
from jaxengine.models.families.declared_row import EPS, GGUFRow, Row, no_rope, parts_of_heads, softmax_experts
from jaxengine.models.families.declared_rows import EPSILON
from jaxengine.models.layers.base.activations import SILU
from jaxengine.models.layers.experts.moe import ExpertNames

# Default of the longest context, which sizes page tables. A model without attention does not limit it.
MAX_POSITIONS = 131_072
SQUEEZED = (".conv1d.weight",)
_BACKBONE = tuple(
    (f"backbone.{old}.", f"model.{new}.")
    for old, new in (
        ("embeddings", "embed_tokens"),
        ("embedding", "embed_tokens"),
        ("norm_f", "norm"),
        ("layers", "layers"),
    )
)


def _inner_size(fields: ConfigFields) -> int:
    """Return the number of Mamba's inputs: `intermediate_size`, or else `expand` (2 by default) times the hidden size.
    Raises ModelConfigError for wrong fields.
    """
    return fields.integer("intermediate_size", int(fields.number("expand", 2.0) * fields.integer("hidden_size")))


def _channels_as_heads(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `intermediate_size`, the number of inputs, and sizes of attention, which no layer has: heads of one
    element, gcd(inputs, MAX_HEADS) in number. Raises ModelConfigError for wrong fields.
    """
    size = _inner_size(fields)
    return {"intermediate_size": size, "num_attention_heads": math.gcd(size, MAX_HEADS), "head_dim": 1}


def _scan_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with Mamba's state, from the fields of Mamba's own configurations. By default states
    have 16 elements (`state_size`), the convolution has a kernel of 4 (`conv_kernel`), and only it has a bias
    (`use_conv_bias`, `use_bias`); `time_step_rank` is as in `_time_rank`. Raises ModelConfigError for wrong fields.
    """
    state = SelectiveScan(
        channels=fields.integer("intermediate_size"),
        state_size=fields.integer("state_size", 16),
        time_rank=_time_rank(fields, "time_step_rank"),
        conv_kernel=fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        bias=fields.boolean("use_bias", False),
        activation=fields.text("hidden_act", SILU),
    )
    return replace(attention, state=state)


def _normed_scan_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with Falcon Mamba's state: Mamba's, with norms without weights and the epsilon
    `mixer_rms_eps`, 1e-6 by default. Raises ModelConfigError for wrong fields.
    """
    own = _scan_layer(fields, layer, attention)
    assert isinstance(own.state, SelectiveScan)
    return replace(own, state=replace(own.state, norms="plain", eps=fields.number("mixer_rms_eps", 1e-6)))


def _time_rank(fields: ConfigFields, name: str) -> int:
    """Return SelectiveScan.time_rank from the field `name`; a sixteenth of the hidden size, rounded up, if it is "auto"
    or absent. Raises ModelConfigError for other values that are not integers.
    """
    auto = fields.value(name, "auto") == "auto"
    return -(-fields.integer("hidden_size") // 16) if auto else fields.integer(name)


def _mamba2_heads(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `intermediate_size`, which is `expand` (2 by default) times the hidden size, and the heads of Mamba-2
    (`num_heads`, by default 128, of `head_dim`, by default 64, elements) as sizes of attention. Raises ModelConfigError
    for wrong fields, and if num_heads * head_dim is not that size.
    """
    heads, head_dim = fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    size = int(fields.number("expand", 2.0) * fields.integer("hidden_size"))
    if heads * head_dim != size:
        raise fields.fail("num_heads", f"such that num_heads * head_dim, {head_dim}, is expand * hidden_size, {size}")
    return {"intermediate_size": size, "num_attention_heads": heads, "head_dim": head_dim}


def _mamba2_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with Mamba-2's state, from the fields of Mamba-2's own configurations, with the
    heads of `attention`. By default there are 8 groups (`n_groups`), states have 128 elements (`state_size`), the
    convolution has a kernel of 4 (`conv_kernel`), and only it has a bias (`use_conv_bias`, `use_bias`). Raises
    ModelConfigError for wrong fields.
    """
    bias = fields.boolean("use_bias", False)
    state = StateSpace(
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        num_groups=fields.integer("n_groups", 8),
        state_size=fields.integer("state_size", 128),
        conv_kernel=fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        bias=bias,
        output_bias=bias,
        activation=fields.text("hidden_act", SILU),
        dt_limits=read_dt_limits(fields),
    )
    return replace(attention, state=state)


def _bamba_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention unchanged if `attn_layer_indices` lists the layer; otherwise with a Mamba-2 state,
    of `mamba_expand` (default: 2) times the hidden size, normed after its gate, and without rope. Without the list all
    layers get a state. Raises ModelConfigError for a list of anything but layers, and for wrong fields.
    """
    attending = fields.value("attn_layer_indices", None) or []
    count = fields.integer("num_hidden_layers")
    if not isinstance(attending, list) or any(type(each) is not int or not 0 <= each < count for each in attending):
        raise fields.fail("attn_layer_indices", f"a list of layers from 0 to {count - 1}")
    if layer in attending:
        return attention
    state = read_state_space(fields, fields.integer("mamba_expand", 2) * fields.integer("hidden_size"), norm="after")
    return replace(attention, rope=None, state=replace(state, output_bias=state.bias))


def _is_chosen(fields: ConfigFields, layer: int, kind: str, period: int, offset: int) -> bool:
    """Return whether a layer is chosen by the fields `KIND_layer_period` and `KIND_layer_offset`: layer % period ==
    offset. period, offset: defaults of these fields. Raises ModelConfigError for wrong fields.
    """
    period = fields.integer(f"{kind}_layer_period", period)
    return layer % period == fields.integer(f"{kind}_layer_offset", offset, minimum=0)


def _jamba_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention unchanged if the layer attends (by default every eighth, from number 4 on),
    otherwise with Mamba's state, with norms, from `mamba_expand` (default: 2), `mamba_d_state` (16), `mamba_dt_rank`,
    `mamba_d_conv` (4), `mamba_conv_bias` (true) and `mamba_proj_bias` (false). Raises ModelConfigError for wrong
    fields.
    """
    if _is_chosen(fields, layer, "attn", 8, 4):
        return attention
    state = SelectiveScan(
        channels=fields.integer("mamba_expand", 2) * fields.integer("hidden_size"),
        state_size=fields.integer("mamba_d_state", 16),
        time_rank=_time_rank(fields, "mamba_dt_rank"),
        conv_kernel=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        bias=fields.boolean("mamba_proj_bias", False),
        norms="weighted",
        eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.text("hidden_act", SILU),
    )
    return replace(attention, state=state)


def _jamba_experts(fields: ConfigFields) -> ExpertsConfig | None:
    """Return the ExpertsConfig, by default with 2 of 16 experts for a token, in every second layer from number 1 on;
    None for a file with one expert, which is a dense MLP. Raises ModelConfigError for wrong fields.
    """
    if (count := fields.integer("num_experts", 16)) == 1:
        return None
    layers = range(fields.integer("num_hidden_layers"))
    return ExpertsConfig(
        num_experts=count,
        num_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
        norm_weights=False,
        dense_layers=tuple(layer for layer in layers if not _is_chosen(fields, layer, "expert", 2, 1)),
    )


def _lfm3_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types` and `rope_parameters`, those of LFM3-1.7B if the file has none. Raises ModelConfigError for
    other kinds of layers or a list of another length.
    """
    count = fields.integer("num_hidden_layers")
    usual = [FULL if each % 4 == 2 else SLIDING if each % 4 == 0 and each else _CONV for each in range(count)]
    kinds = read_each_layer(fields, "layer_types", (FULL, SLIDING, _CONV)) or usual
    return {"layer_types": kinds, "rope_parameters": fields.mapping("rope_parameters") or _LFM3_ROPES}


def _lfm3_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window and the rope of its kind or, for a convolution layer, with the state
    of a short convolution of kernel `conv_L_cache`. Raises ModelConfigError for wrong fields.
    """
    if (kind := fields.value("layer_types")[layer]) == _CONV:
        kernel, bias = fields.integer("conv_L_cache"), fields.boolean("conv_bias", False)
        return replace(attention, state=ShortConvolution(fields.integer("hidden_size"), kernel, bias))
    rope = ropes_by_kind(fields, read_head_dim(fields), (kind,))[0]
    return replace(attention, rope=rope, window=fields.integer("sliding_window") if kind == SLIDING else None)


def _lfm3_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form, without the norms after both parts of a layer if `use_sandwich_norm` is false, and without the
    gate after attention if `use_attention_gate` is false. Raises ModelConfigError for values that are not bools.
    """
    if not fields.boolean("use_sandwich_norm"):
        form = replace(form, placement=BEFORE, norms=("operator_norm", "ffn_norm"))
    return form if fields.boolean("use_attention_gate") else replace(form, gate=None)


def _minimax_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types`. If they are not listed, they follow from MiniMax's own `attn_type_list` (0: linear, 1:
    full) or, without that, every second layer, from number 1 on, is linear. Raises ModelConfigError for wrong lists.
    """
    numbers = read_each_layer(fields, "attn_type_list", (0, 1))
    numbers = numbers or [(each + 1) % 2 for each in range(fields.integer("num_hidden_layers"))]
    usual = [FULL if each else _LINEAR for each in numbers]
    return {"layer_types": read_each_layer(fields, "layer_types", (FULL, _LINEAR)) or usual}


def _minimax_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with `sliding_window`, if it is set, or, for a linear layer, with the state of
    linear attention and without rope. Raises ModelConfigError for a wrong window.
    """
    if fields.value("layer_types")[layer] == FULL:
        return replace(attention, window=fields.integer("sliding_window", None))
    state = LinearState(attention.num_heads, attention.head_dim, activation=fields.text("hidden_act", SILU))
    return replace(attention, rope=None, state=state)


def _minimax_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with DeclaredForm.residuals: the factors alpha and beta of full attention, of linear attention
    and of the MLP, each 1 by default. Raises ModelConfigError for values that are not numbers > 0.
    """
    names = "full_attn", "linear_attn", "mlp"
    factors = [[fields.number(f"{name}_{kind}_factor", 1.0) for kind in ("alpha", "beta")] for name in names]
    return replace(form, residuals=tuple((alpha, beta) for alpha, beta in factors))


def _minimax_rope(fields: ConfigFields, head_dim: int) -> Rope:
    """Return rope of the first `rotary_dim` elements of a head, by default of the share `partial_rotary_factor`, or of
    all. Raises ModelConfigError for wrong fields.
    """
    rope = read_rope(fields, head_dim, partial_rotary=True)
    return replace(rope, rotary_dim=fields.integer("rotary_dim", rope.rotary_dim))


def _griffin_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `head_dim`, an equal part of the hidden size if the file has none, `intermediate_size`, half of the
    file's, and `sliding_window`: `attention_window_size` or, without it, the file's own, 2048 by default. Raises
    ModelConfigError for wrong fields, and for a hidden size that heads do not divide in a file without `head_dim`.
    """
    size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if size % heads and not fields.has("head_dim"):
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads, {heads}")
    window = fields.integer("attention_window_size", None) or fields.integer("sliding_window", 2048)
    inner = fields.integer("intermediate_size", minimum=2) // 2
    head_dim = fields.integer("head_dim", size // heads)
    return {"head_dim": head_dim, "intermediate_size": inner, "sliding_window": window}


def _griffin_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with `sliding_window` if `block_types`, which is repeated over the layers, has
    "attention" for it; for "recurrent" with a gated recurrence of width `lru_width`, by default the hidden size, a
    convolution of kernel `conv1d_width` (default: 4), and no rope. By default every third layer attends. Raises
    ModelConfigError for wrong fields.
    """
    kinds = fields.value("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(kinds, (list, tuple)) or not kinds or {*map(str, kinds)} - {"recurrent", "attention"}:
        raise fields.fail("block_types", "a list of recurrent and attention")
    if kinds[layer % len(kinds)] == "attention":
        return replace(attention, window=fields.integer("sliding_window"))
    width, kernel = fields.integer("lru_width", fields.integer("hidden_size")), fields.integer("conv1d_width", 4)
    state = GatedRecurrence(width, attention.num_heads, kernel, fields.text("hidden_act"))
    return replace(attention, rope=None, state=state)


# Tensors of linear attention that are computed from the configuration instead of read.
_DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
# MiniMax's names of the factors of sums -> transformers' names.
_MINIMAX_NAMES = {
    f"layernorm_{own}_{kind}": f"{usual}_{kind}_factor"
    for own, usual in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for kind in ("alpha", "beta")
}
_LINEAR = "linear_attention"
_CONV = "conv"
_LFM3_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}
_MIXERS = DeclaredForm(norm=RMS, norms=("norm",), mixer="mixer", up=())
_HYBRID = DeclaredForm(
    norm=RMS,
    norms=("input_layernorm", "pre_ff_layernorm"),
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_FINAL = (("model.final_layernorm.", "model.norm."),)
_STATE_ONLY: dict[str, Any] = {
    "names": _BACKBONE,
    "spelled": EPSILON,
    "defaults": {EPS: 1e-5, "max_position_embeddings": MAX_POSITIONS},
    "rope": no_rope,
    "bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "squeezed": SQUEEZED,
}
STATE_ROWS: dict[str, Row] = {
    "MambaForCausalLM": Row(
        "Mamba (Gu & Dao 2023, arXiv:2312.00752): selective state spaces alone, in one mixer a layer.",
        _MIXERS,
        **_STATE_ONLY,
        tied=True,
        adapt=_channels_as_heads,
        each_layer=_scan_layer,
        gguf=GGUFRow("mamba", read=gguf_mamba),
    ),
    "FalconMambaForCausalLM": Row(
        "Falcon Mamba (Zuo et al. 2024, arXiv:2410.05355): Mamba with norms of time steps, B and C.",
        _MIXERS,
        **_STATE_ONLY,
        tied=True,
        adapt=_channels_as_heads,
        each_layer=_normed_scan_layer,
    ),
    "Mamba2ForCausalLM": Row(
        "Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), as in Codestral Mamba: one Mamba-2 mixer a layer.",
        _MIXERS,
        **_STATE_ONLY,
        adapt=_mamba2_heads,
        each_layer=_mamba2_layer,
        gguf=GGUFRow("mamba2", read=gguf_mamba2),
    ),
    "BambaForCausalLM": Row(
        "Bamba (IBM, Princeton, CMU and UIUC 2024): Llama with Mamba-2 in most layers, rope on a part of each head.",
        _HYBRID,
        names=_FINAL,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False},
        eps="rms_norm_eps",
        rope=parts_of_heads,
        grouped=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        each_layer=_bamba_layer,
        squeezed=SQUEEZED,
    ),
    "MiniMaxForCausalLM": Row(
        "MiniMax-Text-01 and M1 (MiniMax 2025, arXiv:2501.08313): lightning attention in most layers, whose parts get "
        "and keep what is normed, and Mixtral's experts.",
        DeclaredForm(norm=RMS, placement=WITHIN, mixer="self_attn"),
        spelled=_MINIMAX_NAMES,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
        only={"postnorm": True, "shared_intermediate_size": 0},
        eps="rms_norm_eps",
        rope=_minimax_rope,
        grouped=True,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        adapt=_minimax_fields,
        choose=_minimax_form,
        each_layer=_minimax_layer,
        experts=lambda fields: replace(softmax_experts(fields), norm_weights=True),
        experts_in="block_sparse_moe",
        expert_names=ExpertNames(gate="w1", up="w3", down="w2"),
        parts=((".mlp.", ".block_sparse_moe."),),
        unused_ends=tuple(f".self_attn.{name}" for name in _DECAYS),
    ),
    "Lfm3ForCausalLM": Row(
        "LFM3 (Liquid AI 2026): LFM2 with windows in some of the layers that attend, norms after both parts of a layer "
        "and a gate after attention, one number a head.",
        DeclaredForm(
            norm=RMS,
            placement=AROUND,
            norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
            qk_norm=RMS,
            qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
            gate="self_attn.gate_proj",
            gates_heads=True,
            mixer=_CONV,
            up=("feed_forward.w1", "feed_forward.w3"),
            down="feed_forward.w2",
        ),
        names=(("model.embedding_norm.", "model.norm."),),
        parts=((".self_attn.g_proj.", ".self_attn.gate_proj."),),
        defaults={
            "norm_eps": 1e-5,
            "head_dim": 128,
            "rope_theta": 1000000.0,
            "conv_L_cache": 7,
            "sliding_window": 256,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
            "attention_bias": False,
        },
        only={"hidden_act": "silu", "rope_scaling": None},
        eps="norm_eps",
        rope=no_rope,
        grouped=True,
        tied=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        adapt=_lfm3_fields,
        choose=_lfm3_form,
        each_layer=_lfm3_layer,
        squeezed=(".conv.conv.weight",),
    ),
    "RecurrentGemmaForCausalLM": Row(
        "RecurrentGemma (Botev et al. 2024, arXiv:2404.07839): Gemma with gated linear recurrences in two of three "
        "layers, windows in the others.",
        DeclaredForm(
            norm=OFFSET,
            norms=("temporal_pre_norm", "channel_pre_norm"),
            qkv=tuple(f"temporal_block.{part}_proj" for part in "qkv"),
            out="temporal_block.o_proj",
            mixer="temporal_block",
            activation="gelu_pytorch_tanh",
            up=("mlp_block.gate_proj", "mlp_block.up_proj"),
            down="mlp_block.down_proj",
        ),
        names=(("model.final_norm.", "model.norm."),),
        spelled={"hidden_activation": "hidden_act"},
        defaults={
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_position_embeddings": MAX_POSITIONS,
            "partial_rotary_factor": 0.5,
            "logits_soft_cap": 30.0,
            "hidden_act": "gelu_pytorch_tanh",
        },
        only={"embeddings_scale_by_sqrt_dim": True, "rope_scaling": None},
        eps="rms_norm_eps",
        rope=parts_of_heads,
        grouped=True,
        tied=True,
        bias="attention_bias",
        adapt=_griffin_fields,
        each_layer=_griffin_layer,
        more=lambda fields: {
            "logit_soft_cap": fields.number("logits_soft_cap"),
            # transformers keeps it in bfloat16.
            "embedding_multiplier": float(bfloat16(fields.integer("hidden_size") ** 0.5)),
        },
        squeezed=(".conv_1d.weight",),
        flattened=(".rg_lru.input_gate_weight", ".rg_lru.recurrent_gate_weight"),
    ),
    "JambaForCausalLM": Row(
        "Jamba (AI21 2024, arXiv:2403.19887, arXiv:2408.12570): Mamba in most layers, attention without rope in the "
        "others, and in some checkpoints experts in every second layer.",
        _HYBRID,
        names=_FINAL,
        eps="rms_norm_eps",
        rope=no_rope,
        grouped=True,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        each_layer=_jamba_layer,
        experts=_jamba_experts,
        gguf=GGUFRow("jamba", read=gguf_jamba),
        experts_in="feed_forward",
        expert_names=ExpertNames(router="router"),
        squeezed=SQUEEZED,
    ),
}

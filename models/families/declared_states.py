"""Rows, as in declared_rows, of families whose layers keep states instead of keys and values, or most of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import RMS, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import MAX_HEADS, ConfigFields
from jaxengine.models.config.state import SelectiveScan, StateSpace, read_dt_limits, read_state_space
from jaxengine.models.families.declared_row import EPS, Row, no_rope, parts_of_heads
from jaxengine.models.layers.moe import ExpertNames

# A model without attention has no longest context. Page tables are sized by this where the configuration says nothing.
MAX_POSITIONS = 131_072
SQUEEZED = (".conv1d.weight",)
EPSILON = {"layer_norm_epsilon": EPS}
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
    """Return the number of inputs of Mamba: `intermediate_size`, else `expand` times the hidden size."""
    return fields.integer("intermediate_size", int(fields.number("expand", 2.0) * fields.integer("hidden_size")))


def _channels_as_heads(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the inner size, and sizes of attention, which no layer has: as many heads of one element as devices can
    split the channels into.
    """
    size = _inner_size(fields)
    return {"intermediate_size": size, "num_attention_heads": math.gcd(size, MAX_HEADS), "head_dim": 1}


def _scan_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Give a layer Mamba's state, from the fields of Mamba's own configurations."""
    state = SelectiveScan(
        channels=fields.integer("intermediate_size"),
        state_size=fields.integer("state_size", 16),
        time_rank=_time_rank(fields, "time_step_rank"),
        conv_kernel=fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        bias=fields.boolean("use_bias", False),
    )
    return replace(attention, state=state)


def _normed_scan_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Give a layer Falcon Mamba's state: Mamba's, with norms that have no weights."""
    own = _scan_layer(fields, layer, attention)
    assert isinstance(own.state, SelectiveScan)
    return replace(own, state=replace(own.state, norms="plain", eps=fields.number("mixer_rms_eps", 1e-6)))


def _time_rank(fields: ConfigFields, name: str) -> int:
    """Read SelectiveScan.time_rank; a sixteenth of the hidden size, rounded up, where it is "auto" or absent."""
    auto = fields.value(name, "auto") == "auto"
    return -(-fields.integer("hidden_size") // 16) if auto else fields.integer(name)


def _mamba2_heads(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the inner size and the heads of Mamba-2, as sizes of attention. Raises ModelConfigError."""
    heads, head_dim = fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    size = int(fields.number("expand", 2.0) * fields.integer("hidden_size"))
    if heads * head_dim != size:
        raise fields.fail("num_heads", f"such that num_heads * head_dim, {head_dim}, is expand * hidden_size, {size}")
    return {"intermediate_size": size, "num_attention_heads": heads, "head_dim": head_dim}


def _mamba2_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Give a layer Mamba-2's state, from the fields of Mamba-2's own configurations."""
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
        dt_limits=read_dt_limits(fields),
    )
    return replace(attention, state=state)


def _bamba_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Give a layer that `attn_layer_indices` does not list a Mamba-2 state in place of attention. Raises
    ModelConfigError.
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
    """Whether a layer is one of those that `KIND_layer_period` and `KIND_layer_offset` choose."""
    period = fields.integer(f"{kind}_layer_period", period)
    return layer % period == fields.integer(f"{kind}_layer_offset", offset, minimum=0)


def _jamba_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Give a layer that is not one of the attending ones Mamba's state, with norms, in place of attention."""
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
    )
    return replace(attention, state=state)


def _jamba_experts(fields: ConfigFields) -> ExpertsConfig | None:
    """Read the experts, in every second layer by default; None for a file with one expert, a dense MLP."""
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
        only={"hidden_act": "silu"},
        tied=True,
        adapt=_channels_as_heads,
        each_layer=_scan_layer,
    ),
    "FalconMambaForCausalLM": Row(
        "Falcon Mamba (Zuo et al. 2024, arXiv:2410.05355): Mamba with norms of time steps, B and C.",
        _MIXERS,
        **_STATE_ONLY,
        only={"hidden_act": "silu"},
        tied=True,
        adapt=_channels_as_heads,
        each_layer=_normed_scan_layer,
    ),
    "Mamba2ForCausalLM": Row(
        "Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), as in Codestral Mamba: one Mamba-2 mixer a layer.",
        _MIXERS,
        **_STATE_ONLY,
        only={"hidden_act": "silu"},
        adapt=_mamba2_heads,
        each_layer=_mamba2_layer,
    ),
    "BambaForCausalLM": Row(
        "Bamba (IBM, Princeton, CMU and UIUC 2024): Llama with Mamba-2 in most layers, rope on a part of each head.",
        _HYBRID,
        names=_FINAL,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False, "mlp_bias": False},
        only={"hidden_act": "silu"},
        eps="rms_norm_eps",
        rope=parts_of_heads,
        grouped=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        each_layer=_bamba_layer,
        squeezed=SQUEEZED,
    ),
    "JambaForCausalLM": Row(
        "Jamba (AI21 2024, arXiv:2403.19887, arXiv:2408.12570): Mamba in most layers, attention without rope in the "
        "others, and in some checkpoints experts in every second layer.",
        _HYBRID,
        names=_FINAL,
        only={"hidden_act": "silu"},
        eps="rms_norm_eps",
        rope=no_rope,
        grouped=True,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        each_layer=_jamba_layer,
        experts=_jamba_experts,
        experts_in="feed_forward",
        expert_names=ExpertNames(router="router"),
        squeezed=SQUEEZED,
    ),
}

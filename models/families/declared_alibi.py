"""Rows, like those of declared_rows, of families with ALiBi (Press et al. 2021, arXiv:2108.12409) in place of rope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention, alibi_slopes
from jaxengine.models.config.declared import BEFORE, GROUPS, RMS, ROWS, UNBIASED, WITHIN, DeclaredForm
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.declared_row import EPS, GGUFRow, Row, no_rope
from jaxengine.models.families.declared_rows import (
    EPSILON,
    GPT2_FORM,
    GPT2_SPELLED,
    MASKS,
    embedding_width,
    four_times,
    rope_unless_alibi,
    transformer_names,
)

Layers = tuple[LayerAttention, ...]
_BAICHUAN2 = 125696  # tokens
_COUNTS = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_MPT_SIZES = {"d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
# Fields of MPT's attn_config, and the only values that are supported.
_MPT_ATTENTION = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "qk_ln": False,
    "prefix_lm": False,
    "sliding_window_size": -1,
}


def _sloped(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the ALiBi slopes for its number of heads."""
    return replace(attention, slopes=alibi_slopes(attention.num_heads))


def _bloom_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with the parts' outputs added to the normed hidden state (WITHIN) if
    `apply_residual_connection_post_layernorm` is true, otherwise to the hidden state itself (BEFORE). Raises
    ModelConfigError for a value that is not a bool.
    """
    within = fields.boolean("apply_residual_connection_post_layernorm")
    return replace(form, placement=WITHIN if within else BEFORE)


def _sizes(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `hidden_size`, from `n_embed` if that is present, and `intermediate_size`, four times as large. Raises
    ModelConfigError for a missing or wrong size.
    """
    size = embedding_width(fields)
    return {"hidden_size": size, "intermediate_size": 4 * size}


def _mpt_attention(fields: ConfigFields) -> ConfigFields:
    """Return a reader of `attn_config`, empty if that is absent. Raises ModelConfigError if it is no mapping, and if a
    field of _MPT_ATTENTION has another value than there.
    """
    own = ConfigFields({"attn_config": fields.mapping("attn_config") or {}}).part("attn_config")
    own.require(**_MPT_ATTENTION)
    return own


def _mpt_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with ALiBi slopes down to 2 ** -alibi_bias_max (8 by default) and the scale
    `softmax_scale` (None if absent), and with queries, keys and values within `clip_qkv`, if it is set, all from
    attn_config. Raises ModelConfigError for wrong fields, and for a `norm_type` that is not a layer norm.
    """
    if fields.text("norm_type", "layernorm") not in ("layernorm", "low_precision_layernorm"):
        raise fields.fail("norm_type", "layernorm or low_precision_layernorm")
    own = _mpt_attention(fields)
    slopes = alibi_slopes(attention.num_heads, own.number("alibi_bias_max", 8.0))
    scale, clip = own.number("softmax_scale", None), own.number("clip_qkv", None)
    return replace(attention, scale=scale, slopes=slopes, clip=clip)


def _baichuan_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `alibi`, true for a file without `max_position_embeddings`, and `max_position_embeddings`: that field or,
    with alibi, `model_max_length`, 4096 by default. Raises ModelConfigError for wrong fields and for Baichuan 2.
    """
    if fields.has("z_loss_weight") or fields.integer("vocab_size") == _BAICHUAN2:
        raise fields.fail("vocab_size", "that of Baichuan 1: Baichuan 2's normalised LM head is not supported")
    alibi = not fields.has("max_position_embeddings")  # the model of 13 billion parameters, which has no rope
    longest = fields.integer("model_max_length" if alibi else "max_position_embeddings", 4096)
    return {"alibi": alibi, "max_position_embeddings": longest}


def _jais_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `hidden_act`, `intermediate_size` (four times the hidden size by default) and the longest context, which
    `train_seq_len` of alibi_scaling limits. Raises ModelConfigError for wrong fields, for another activation_function
    than swiglu, for another type of alibi_scaling than linear, and for a `factor` of slopes.
    """
    if fields.text("activation_function", "gelu_new") != "swiglu":
        raise fields.fail("activation_function", "swiglu")
    scaling = ConfigFields({"alibi_scaling": fields.mapping("alibi_scaling") or {}}).part("alibi_scaling")
    scaling.require(type="linear", factor=None)
    longest = fields.integer("max_position_embeddings")
    longest = min(longest, scaling.integer("train_seq_len", longest))
    return {"hidden_act": "silu", "max_position_embeddings": longest, **four_times(fields)}


def _jais_scales(fields: ConfigFields) -> dict[str, float]:
    """Return the factor of embeddings, `embeddings_scale` or `mup_embeddings_scale`, and that of logits, `width_scale`
    or `mup_output_alpha` times `mup_width_scale`; each is 1 by default. Raises ModelConfigError for wrong fields.
    """
    embeddings, alpha, width = (
        fields.number(name, 1.0) for name in ("mup_embeddings_scale", "mup_output_alpha", "mup_width_scale")
    )
    return {
        "embedding_multiplier": fields.number("embeddings_scale", embeddings),
        "logit_scale": fields.number("width_scale", alpha * width),
    }


def _jais_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with ALiBi slopes and, if `scale_qk_dot_by_d` or `mup_scale_qk_dot_by_d` is true,
    products divided by a head's size instead of its root. Raises ModelConfigError for values that are not bools.
    """
    divided = fields.boolean("scale_qk_dot_by_d", fields.boolean("mup_scale_qk_dot_by_d", False))
    return _sloped(fields, layer, replace(attention, scale=1 / attention.head_dim) if divided else attention)


def _gguf_sloped(fields: ConfigFields, layers: Layers) -> Layers:
    """Return layers without rope, with ALiBi slopes down to 2 ** -`attention.max_alibi_bias` (8 by default). Raises
    ModelConfigError for another value than a number above 0: models with a table of positions are not supported.
    """
    slopes = alibi_slopes(layers[0].num_heads, fields.number("attention.max_alibi_bias", 8.0))
    return tuple(replace(each, rope=None, slopes=slopes) for each in layers)


def _gguf_baichuan(gguf: GGUFConfig) -> dict[str, Any]:
    """Return `gguf_fields`, with rope in 32 layers, as of 7 billion parameters, or with ALiBi slopes in 40, as of 13
    billion: files do not say which. Raises ModelConfigError for another number, for wrong fields, and for Baichuan 2.
    """
    shared, fields = gguf_fields(gguf), gguf.fields
    if shared["vocab_size"] == _BAICHUAN2:
        raise ModelConfigError("Baichuan 2, with 125696 tokens, is not supported: its LM head is normalised")
    if len(layers := shared["attention"]) not in (32, 40):
        raise fields.fail("block_count", "32 (rope) or 40 (ALiBi)")
    return shared | {"attention": layers if len(layers) == 32 else _gguf_sloped(fields, layers)}


def _gguf_jais(fields: ConfigFields, layers: Layers) -> Layers:
    """Return layers as `_gguf_sloped` does, with the same errors, and with products of queries and keys divided by a
    head's size, as in all files.
    """
    return tuple(replace(each, scale=1 / each.head_dim) for each in _gguf_sloped(fields, layers))


def _gguf_jais_form(gguf: GGUFConfig, form: DeclaredForm) -> DeclaredForm:
    """Return the form with SiLU and other names, since matrices are not transposed in these files. Raises
    ModelConfigError for a file without a head: its embeddings have another scale.
    """
    if gguf.tie_word_embeddings:
        raise ModelConfigError("a GGUF file of Jais must have output.weight")
    names: dict[str, Any] = {"qkv": ("attn.qkv",), "out": "attn.out", "up": ("mlp.gate", "mlp.up"), "down": "mlp.down"}
    return replace(form, activation="silu", **names)


_GGUF = GGUFRow("bloom", eps="attention.layer_norm_epsilon", bias=True, layers=_gguf_sloped)
# Keys are the class names that config.json lists under "architectures".
ALIBI_ROWS: dict[str, Row] = {
    "BloomForCausalLM": Row(
        "BLOOM (BigScience Workshop 2022, arXiv:2211.05100): ALiBi, layer norms, after the embedding too, biases, an "
        "MLP without a gate.",
        DeclaredForm(
            qkv=("self_attention.query_key_value",),
            joined=GROUPS,
            out="self_attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            activation="gelu_new",
            embedding_norm="model.embed_norm",
        ),
        names=transformer_names(word_embeddings="embed_tokens", word_embeddings_layernorm="embed_norm"),
        spelled={**_COUNTS, **EPSILON, "seq_length": "max_position_embeddings"},
        defaults={EPS: 1e-5, "max_position_embeddings": 2048, "apply_residual_connection_post_layernorm": False},
        rope=no_rope,
        tied=True,
        adapt=_sizes,
        choose=_bloom_form,
        each_layer=_sloped,
        gguf=_GGUF._replace(choose=lambda gguf, form: replace(form, joined=ROWS)),
    ),
    "MptForCausalLM": Row(
        "MPT (MosaicML 2023): ALiBi, layer norms without biases, in some models bounded queries, keys and values.",
        DeclaredForm(
            norm=UNBIASED,
            norms=("norm_1", "norm_2"),
            qkv=("attn.Wqkv",),
            out="attn.out_proj",
            up=("ffn.up_proj",),
            down="ffn.down_proj",
            activation="gelu",
        ),
        names=transformer_names(wte="embed_tokens", blocks="layers", norm_f="norm"),
        spelled={**_MPT_SIZES, **EPSILON, "max_seq_len": "max_position_embeddings"},
        defaults={EPS: 1e-5, "max_position_embeddings": 2048},
        only={
            "no_bias": True,
            "expansion_ratio": 4,
            "logit_scale": None,
            "embedding_fraction": 1.0,
        },
        rope=no_rope,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        tied=True,
        adapt=_sizes,
        each_layer=_mpt_layer,
        gguf=_GGUF._replace(architecture="mpt", bias=False, clip="attention.clamp_kqv"),
    ),
    "JAISLMHeadModel": Row(
        "Jais (Sengupta et al. 2023, arXiv:2308.16149): GPT-2 with ALiBi, gated MLPs, and embeddings, products of "
        "queries and keys, and logits scaled by widths.",
        replace(GPT2_FORM, up=("mlp.c_fc2", "mlp.c_fc"), positions=None),
        names=transformer_names(wte="embed_tokens"),
        spelled={**GPT2_SPELLED, **EPSILON, "activation_function": "activation_function"},
        defaults={EPS: 1e-5},
        only={
            "position_embedding_type": "alibi",
            "add_cross_attention": False,
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
            "reorder_and_upcast_attn": False,
        },
        rope=no_rope,
        tied=True,
        adapt=_jais_fields,
        each_layer=_jais_layer,
        more=_jais_scales,
        gguf=_GGUF._replace(architecture="jais", choose=_gguf_jais_form, layers=_gguf_jais),
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight", ".c_fc2.weight"),
        unused=("transformer.relative_pe.", "relative_pe."),
        unused_ends=MASKS,
    ),
    "BaichuanForCausalLM": Row(
        "Baichuan (Baichuan Inc. 2023): Llama with a joined projection, that of 13 billion parameters with ALiBi.",
        DeclaredForm(norm=RMS, qkv=("self_attn.W_pack",)),
        eps="rms_norm_eps",
        defaults={"rms_norm_eps": 1e-6},
        rope=rope_unless_alibi,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        adapt=_baichuan_fields,
        each_layer=lambda fields, layer, attention: (
            _sloped(fields, layer, attention) if fields.boolean("alibi") else attention
        ),
        unused_ends=(".rotary_emb.inv_freq",),
        gguf=GGUFRow("baichuan", read=_gguf_baichuan),
    ),
}

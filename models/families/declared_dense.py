"""Rows, like those of declared_rows, of further families without experts. Most are variants of Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import (
    AFTER,
    AROUND,
    FIXED_RMS,
    GROUPS,
    LAYER,
    OFFSET,
    RMS,
    UNBIASED,
    DeclaredForm,
)
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import gguf_flags, gguf_sliding
from jaxengine.models.config.readers.hf import FULL, SLIDING, layer_kinds, read_head_dim, read_rope, ropes_by_kind
from jaxengine.models.families.declared_row import EPS, GGUFRow, Row, no_rope, parts_of_heads
from jaxengine.models.families.declared_rows import (
    EPSILON,
    GPT2_FORM,
    GPT2_SPELLED,
    MASKS,
    OPT_FORM,
    four_times,
    full_first_of_four,
    transformer_names,
    windowed,
)
from jaxengine.models.families.gemma2 import read_cap
from jaxengine.models.families.granite import granite_gguf_fields, granite_multipliers
from jaxengine.models.layers.base.activations import read_activation

_FORM = DeclaredForm(norm=RMS, qk_norm=RMS)
_LLAMA: dict[str, Any] = {
    "grouped": True,
    "eps": "rms_norm_eps",
    "bias": "attention_bias",
    "output_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
_UNBIASED: dict[str, Any] = {"attention_bias": False, "mlp_bias": False}


def ropes_of_layers(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with sinks, the window of its kind, the scale `attention_multiplier`, and a rope
    with the base that `layer_rope_theta` lists for the layer, or no rope if that is 0. Without the list it keeps its
    rope. Raises ModelConfigError for wrong fields or a list of another length.
    """
    attention = replace(windowed(fields, layer, attention), sinks=True, scale=fields.number("attention_multiplier"))
    thetas, count = fields.value("layer_rope_theta", None), fields.integer("num_hidden_layers")
    if thetas is None:
        return attention
    if not isinstance(thetas, list) or len(thetas) != count or any(type(theta) not in (int, float) for theta in thetas):
        raise fields.fail("layer_rope_theta", f"a list of {count} numbers")
    if thetas[layer] == 0:
        return replace(attention, rope=None)
    rope = {**(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}), "rope_theta": thetas[layer]}
    own = ConfigFields({**fields.raw, "rope_parameters": rope, "rope_scaling": None})
    return replace(attention, rope=read_rope(own, read_head_dim(fields)))


def gguf_swash(fields: ConfigFields, layers: tuple[LayerAttention, ...]) -> tuple[LayerAttention, ...]:
    """Return the layers of a GGUF file with sinks, those with a window as `attention.sliding_window_pattern` lists
    them, and those with rope as `attention.rope_pattern` does, by default all. Raises ModelConfigError for wrong lists.
    """
    rotate = gguf_flags(fields, "attention.rope_pattern", [True] * len(layers))
    each = zip(layers, gguf_sliding(fields, 1), rotate, strict=True)
    return tuple(
        replace(own, sinks=True, window=own.window if slides else None, rope=own.rope if rotates else None)
        for own, slides, rotates in each
    )


def _scaled_embedding(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `embedding_multiplier`: the root of the hidden size if `scale_embedding` is true, otherwise 1. Raises
    ModelConfigError for wrong fields.
    """
    scale = fields.integer("hidden_size") ** 0.5 if fields.boolean("scale_embedding") else 1.0
    return {"embedding_multiplier": scale}


def _xglm(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `_scaled_embedding`. Raises ModelConfigError for a `pad_token_id` above 1."""
    if fields.integer("pad_token_id", 1, minimum=0) > 1:
        raise fields.fail("pad_token_id", "at most 1")
    return _scaled_embedding(fields)


def _clova_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form; if `use_post_norm` is true with a norm after each part of a layer, too: `post_norm1` after
    attention and `post_norm2` after the MLP. Raises ModelConfigError for a value that is not a bool.
    """
    if not fields.boolean("use_post_norm"):
        return form
    names = ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    return replace(form, placement=AROUND, norms=names)


def _gemma_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window of its kind, the soft cap `attn_logit_softcapping` (50 if absent,
    none if null), and the scale query_pre_attn_scalar ** -0.5 of products of q and k. Raises ModelConfigError for wrong
    fields.
    """
    cap = read_cap(fields, "attn_logit_softcapping", 50.0)
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    return replace(windowed(fields, layer, attention), soft_cap=cap, scale=scale)


def _ministral_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `sliding_window`, 4096 if it is absent, and `layer_types`; if these are not listed, all layers are
    SLIDING, or FULL if the window is null. Raises ModelConfigError for a wrong number of layers.
    """
    window = fields.raw.get("sliding_window", 4096)
    kinds = [FULL if window is None else SLIDING] * fields.integer("num_hidden_layers")
    return {"sliding_window": window, "layer_types": fields.value("layer_types", kinds)}


def _modernbert_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types`; if they are not listed, every `global_attn_every_n_layers`-th layer (3 by default), the
    first included, is FULL. Also returns `sliding_window`, by default half of `local_attention`, and `rope_theta`,
    which is `global_rope_theta`, the base for FULL layers. Raises ModelConfigError for wrong fields.
    """
    every, count = fields.integer("global_attn_every_n_layers", 3), fields.integer("num_hidden_layers")
    kinds = [SLIDING if layer % every else FULL for layer in range(count)]
    return {
        "layer_types": fields.value("layer_types", kinds),
        "sliding_window": fields.integer("sliding_window", fields.integer("local_attention", minimum=2) // 2),
        "rope_theta": fields.number("global_rope_theta"),
    }


def _modernbert_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with the window and the rope of its kind. Raises ModelConfigError for wrong
    fields.
    """
    kinds, head_dim = layer_kinds(fields), read_head_dim(fields)
    rope = ropes_by_kind(fields, head_dim, kinds, sliding_theta="local_rope_theta")[layer]
    return replace(windowed(fields, layer, attention), rope=rope)


def _modernbert_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with biases of norms if `norm_bias` is true, a bias of logits if `decoder_bias` is true, and the
    activation `classifier_activation` before them, of a projection with a bias if `classifier_bias` is true. Raises
    ModelConfigError for wrong or unsupported fields.
    """
    activation = read_activation(fields, "classifier_activation")
    norm = LAYER if fields.boolean("norm_bias") else UNBIASED
    biases = {"head_bias": fields.boolean("decoder_bias"), "head_dense_bias": fields.boolean("classifier_bias")}
    return replace(form, norm=norm, head_activation=activation, **biases)


def _gpt_neo_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with a scale of 1, and with `window_size` as its window if `attention_layers` or,
    without that field, `attention_types` says that the layer is local; otherwise without a window. Raises
    ModelConfigError for wrong fields, and if they do not say "global" or "local" for each layer.
    """
    count, field = fields.integer("num_hidden_layers"), "attention_types"
    if fields.has("attention_layers"):
        kinds = fields.value(field := "attention_layers")
    else:
        try:  # a run that is longer than the model is found before it takes memory
            runs = fields.value(field)[: count + 1]
            fits = all(len(names) * times <= count for names, times in runs)
            kinds = [kind for names, times in runs for kind in names * times] if fits else []
        except (TypeError, ValueError, KeyError):
            kinds = []
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in ("global", "local") for kind in kinds):
        every = "global or local for each layer"
        runs_of = "lists of global and local, and how often each comes, for all layers"
        raise fields.fail(field, runs_of if field == "attention_types" else every)
    return replace(attention, scale=1.0, window=fields.integer("window_size") if kinds[layer] == "local" else None)


# Keys are the class names that config.json lists under "architectures".
DENSE_ROWS: dict[str, Row] = {
    "GPTNeoForCausalLM": Row(
        "GPT-Neo (EleutherAI 2021): GPT-2 with windows in every second layer, and scores that are not scaled.",
        replace(
            GPT2_FORM,
            qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
            out="attn.attention.out_proj",
        ),
        names=transformer_names(wte="embed_tokens", wpe="embed_positions"),
        spelled={**GPT2_SPELLED, **EPSILON, "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        defaults={EPS: 1e-5, "window_size": 256, "attention_types": [[["global", "local"], 12]]},
        rope=no_rope,
        bias=False,
        tied=True,
        adapt=four_times,
        each_layer=_gpt_neo_layer,
        unused_ends=(*MASKS, ".attn.attention.bias", ".attn.attention.masked_bias"),
    ),
    "ExaoneForCausalLM": Row(
        "EXAONE 3 and 3.5 (LG AI Research 2024, arXiv:2412.04862): Llama under GPT-2's names.",
        replace(
            _FORM,
            norms=("ln_1", "ln_2"),
            qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
            out="attn.attention.out_proj",
            up=("mlp.c_fc_0", "mlp.c_fc_1"),
            down="mlp.c_proj",
        ),
        names=(
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.ln_f.", "model.norm."),
            ("transformer.h.", "model.layers."),
        ),
        parts=(  # transformers has it as a Llama
            (".input_layernorm", ".ln_1"),
            (".post_attention_layernorm", ".ln_2"),
            (".self_attn.o_proj", ".attn.attention.out_proj"),
            (".self_attn.", ".attn.attention."),
            (".mlp.gate_proj", ".mlp.c_fc_0"),
            (".mlp.up_proj", ".mlp.c_fc_1"),
            (".mlp.down_proj", ".mlp.c_proj"),
        ),
        spelled={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, **_UNBIASED},
        gguf=GGUFRow("exaone"),
        **_LLAMA,
    ),
    "IQuestCoderForCausalLM": Row(
        "IQuest-Coder-V1 (IQuest Lab 2026): Llama with a head dimension of its own.",
        _FORM,
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, **_UNBIASED},
        only={"clip_qkv": None, "use_sliding_window": False},
        **_LLAMA,
    ),
    "HyperCLOVAXForCausalLM": Row(
        "HyperCLOVA X SEED Think (NAVER 2025, arXiv:2506.22403): Granite with norms after both parts of a layer, too.",
        _FORM,
        defaults={"rms_norm_eps": 1e-6, "use_post_norm": True, **_UNBIASED},
        choose=_clova_form,
        each_layer=lambda fields, layer, attention: replace(
            attention, scale=fields.number("attention_multiplier", None)
        ),
        # Logits are multiplied by this factor, whereas Granite's are divided by it.
        more=lambda fields: granite_multipliers(fields) | {"logit_scale": fields.number("logits_scaling", 1.0)},
        **_LLAMA,
    ),
    "GraniteSWAForCausalLM": Row(
        "Granite Swash (IBM 2026): Granite with sinks, windows in three of four layers, and a base of rope by layer.",
        _FORM,
        tied=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_multiplier": 1.0,
            **_UNBIASED,
        },
        adapt=full_first_of_four,
        each_layer=ropes_of_layers,
        more=granite_multipliers,
        gguf=GGUFRow("granite_swa", layers=gguf_swash, read=granite_gguf_fields),
        **_LLAMA,
    ),
    "NanoChatForCausalLM": Row(
        "nanochat (Karpathy 2025): RMS norms without weights, of embeddings too, norms of q and k after rope, which "
        "turns the other way, a squared ReLU without a gate, capped logits.",
        DeclaredForm(
            norm=FIXED_RMS,
            qk_norm=FIXED_RMS,
            qk_norms=("self_attn.q_norm", "self_attn.k_norm"),
            qk_norms_last=True,
            reversed_rope=True,
            up=("mlp.fc1",),
            down="mlp.fc2",
            activation="relu2",
            embedding_norm="model.embed_norm",
        ),
        grouped=True,
        eps="rms_norm_eps",
        defaults={"rms_norm_eps": 1e-6, "attention_bias": False},
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        more=lambda fields: {"logit_soft_cap": read_cap(fields, "final_logit_softcapping", 15.0)},
    ),
    "VaultGemmaForCausalLM": Row(
        "VaultGemma (Google 2025): Gemma 2 without the norms after a layer's parts.",
        replace(
            _FORM,
            norm=OFFSET,
            norms=("input_layernorm", "pre_feedforward_layernorm"),
            activation="gelu_pytorch_tanh",
            root_scaled=True,
        ),
        grouped=True,
        eps="rms_norm_eps",
        tied=True,
        spelled={"hidden_activation": "hidden_act"},
        defaults={
            "rms_norm_eps": 1e-6,
            "head_dim": 256,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attention_bias": False,
        },
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        adapt=lambda fields: {"layer_types": list(layer_kinds(fields, 2))},
        each_layer=_gemma_layer,
        more=lambda fields: {"logit_soft_cap": read_cap(fields, "final_logit_softcapping", 30.0)},
    ),
    "MinistralForCausalLM": Row(
        "Ministral 8B (Mistral AI 2024) as transformers' own class has it: Mistral with windows in some layers.",
        _FORM,
        defaults={"rms_norm_eps": 1e-6},
        adapt=_ministral_fields,
        each_layer=windowed,
        **{**_LLAMA, "bias": False, "output_bias": False, "mlp_bias": False},
    ),
    "OpenAIGPTLMHeadModel": Row(
        "GPT (Radford et al. 2018): GPT-2 with norms after a layer's parts and none behind the last layer.",
        DeclaredForm(
            placement=AFTER,
            norms=("ln_1", "ln_2"),
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            up=("mlp.c_fc",),
            down="mlp.c_proj",
            activation="gelu_new",
            positions="model.embed_positions",
            final_norm=False,
        ),
        names=transformer_names(tokens_embed="embed_tokens", positions_embed="embed_positions"),
        spelled={**GPT2_SPELLED, **EPSILON, "afn": "hidden_act"},
        defaults={EPS: 1e-5},
        rope=no_rope,
        tied=True,
        adapt=four_times,
        choose=lambda fields, form: replace(form, activation="gelu_new") if form.activation == "gelu" else form,
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        unused_ends=(".attn.bias", "position_ids"),
    ),
    "ModernBertDecoderForCausalLM": Row(
        "ModernBERT as a decoder, as in Ettin (Weller et al. 2025, arXiv:2507.11412): two of three layers have a "
        "window, and a projection and a norm come before the logits.",
        DeclaredForm(
            norms=("attn_norm", "mlp_norm"),
            first_norm=False,
            qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            out="attn.Wo",
            up=("mlp.Wi",),
            joined_up=True,
            down="mlp.Wo",
            activation="gelu",
            embedding_norm="model.embeddings.norm",
            head=("head.dense", "head.norm"),
        ),
        names=(
            ("model.embeddings.tok_embeddings.", "model.embed_tokens."),
            ("model.final_norm.", "model.norm."),
            ("lm_head.", "head."),
            ("decoder.", "lm_head."),
        ),
        spelled={"hidden_activation": "hidden_act"},
        defaults={
            "vocab_size": 50368,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "local_attention": 128,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "classifier_activation": "gelu",
            "decoder_bias": True,
            "norm_bias": False,
            "classifier_bias": False,
            **_UNBIASED,
        },
        only={"rope_scaling": None},
        eps="norm_eps",
        rope=no_rope,
        tied=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        adapt=_modernbert_fields,
        choose=_modernbert_form,
        each_layer=_modernbert_layer,
    ),
    "BitNetForCausalLM": Row(
        "BitNet b1.58 (Ma et al. 2025, arXiv:2504.12285): Llama with squared ReLUs, and norms before the projections "
        "that end attention and the MLP.",
        DeclaredForm(
            norm=RMS,
            heads_norm="self_attn.attn_sub_norm",
            inner_norm="mlp.ffn_sub_norm",
            activation="relu2",
        ),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False},
        eps="rms_norm_eps",
        grouped=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
    ),
    "BioGptForCausalLM": Row(
        "BioGPT (Luo et al. 2022, arXiv:2210.10341): OPT with scaled embeddings and a GELU.",
        replace(OPT_FORM, activation="gelu"),
        names=(
            ("biogpt.layer_norm.", "model.norm."),
            ("biogpt.", "model."),
            ("output_projection.", "lm_head."),
        ),
        defaults={"scale_embedding": True, EPS: 1e-12},
        rope=no_rope,
        tied=True,
        # transformers has this one, whatever config.json says
        adapt=lambda fields: {EPS: 1e-5},
        more=_scaled_embedding,
    ),
    "XGLMForCausalLM": Row(
        "XGLM (Lin et al. 2021, arXiv:2112.10668): BioGPT with sinusoidal positions.",
        replace(OPT_FORM, activation="gelu", positions=None, sinusoids=True),
        names=(("model.layer_norm.", "model.norm."),),
        spelled={
            "d_model": "hidden_size",
            "num_layers": "num_hidden_layers",
            "attention_heads": "num_attention_heads",
            "ffn_dim": "intermediate_size",
            "activation_function": "hidden_act",
        },
        defaults={"scale_embedding": True, EPS: 1e-5},
        only={EPS: 1e-5, "add_cross_attention": False},
        rope=no_rope,
        tied=True,
        more=_xglm,
        unused_ends=(".embed_positions.weights",),
    ),
    "GPTNeoXJapaneseForCausalLM": Row(
        "GPT-NeoX Japanese (ABEJA 2022): GPT-NeoX in sequence, with one bias, after the last layer's attention.",
        DeclaredForm(
            qkv=("attention.query_key_value",),
            joined=GROUPS,
            out="attention.dense",
            up=("mlp.dense_h_to_4h",),
            down="mlp.dense_4h_to_h",
            activation="gelu",
        ),
        names=(
            ("gpt_neox_japanese.embed_in.", "model.embed_tokens."),
            ("gpt_neox_japanese.final_layer_norm.", "model.norm."),
            ("gpt_neox_japanese.", "model."),
            ("embed_out.", "lm_head."),
        ),
        suffixes=((".attention.dense_bias", ".attention.dense.bias"),),
        spelled={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        defaults={EPS: 1e-5, "intermediate_multiple_size": 4},
        rope=parts_of_heads,
        bias=False,
        output_bias=False,
        mlp_bias=False,
        tied=True,
        adapt=lambda fields: {
            "intermediate_size": fields.integer("hidden_size") * fields.integer("intermediate_multiple_size")
        },
        each_layer=lambda fields, layer, attention: replace(
            attention, output_bias=layer == fields.integer("num_hidden_layers") - 1
        ),
        unused_ends=(*MASKS, ".attention.rotary_emb.inv_freq"),
    ),
}

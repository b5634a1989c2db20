"""Families that are rows of a table, each like a model card, instead of classes.

A row defines how the layers are put together (DeclaredForm), how config.json spells that, and the names of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention, alibi_slopes
from jaxengine.models.config.declared import (
    AFTER,
    BEFORE,
    EACH_HEAD,
    FIXED,
    GROUPS,
    LAYER,
    PARALLEL,
    QUARTERS,
    RMS,
    ROWS,
    DeclaredForm,
)
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.hf import FULL, SLIDING, layer_kinds, require_rope, windows_by_kind
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.declared_row import (
    EPS,
    GGUFRow,
    Row,
    clipped,
    neighbours,
    no_rope,
    parts_of_heads,
    whole_heads,
)

# GPT-2's names of fields -> usual names.
GPT2_SPELLED = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
GPT2_SPELLED |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
GPT2_SPELLED |= {"activation_function": "hidden_act"}
EPSILON = {"layer_norm_epsilon": EPS}
MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


def transformer_names(**ends: str) -> tuple[tuple[str, str], ...]:
    """Return Row.names for GPT-2's tensor names (`h`, `ln_f`, and `ends`, which are theirs=ours), each with and without
    the prefix "transformer.", which some checkpoints leave out.
    """
    pairs = {"h": "layers", "ln_f": "norm", **ends}
    return tuple((f"{before}{old}.", f"model.{new}.") for before in ("transformer.", "") for old, new in pairs.items())


def four_times(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `intermediate_size`, by default four times the hidden size. Raises ModelConfigError for wrong sizes."""
    size = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    return {"intermediate_size": size}


def _parallel(field: str, **changes: Any) -> Callable[[ConfigFields, DeclaredForm], DeclaredForm]:
    """Return a `choose` function: if the boolean `field` is true, it puts attention and MLP in parallel and applies
    `changes`. It raises ModelConfigError for an absent field, and for a value that is not a bool.
    """

    def choose(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
        return replace(form, placement=PARALLEL, **changes) if fields.boolean(field) else form

    return choose


def _qk_norms(*names: str) -> Callable[[ConfigFields, DeclaredForm], DeclaredForm]:
    """Return a `choose` function: it gives the form the norms `names` of q and k if `qk_layernorm` is true, and none if
    it is false. It raises ModelConfigError for a value that is not a bool.
    """
    return lambda fields, form: replace(form, qk_norms=names if fields.boolean("qk_layernorm") else ())


def _stablelm_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form, with norms of each head of q and k if `qk_layernorm` is true, and attention and MLP in parallel
    after one norm if `use_parallel_residual` is. Raises ModelConfigError for values that are not bools.
    """
    if fields.boolean("qk_layernorm"):
        form = replace(form, qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"), qk_norm=EACH_HEAD)
    return _parallel("use_parallel_residual", norms=("input_layernorm",))(fields, form)


def _gguf_stablelm_form(gguf: GGUFConfig, form: DeclaredForm) -> DeclaredForm:
    """Return the form of a GGUF file, whose tensors alone say what _stablelm_form reads."""
    if "attn_q_norm" in gguf.stored:
        form = replace(form, qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"), qk_norm=EACH_HEAD)
    beside = "ffn_norm" not in gguf.stored
    return replace(form, placement=PARALLEL, norms=("input_layernorm",)) if beside else form


def _gpt2_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the attention with a scale of 1 unless `scale_attn_weights` is true, divided by the layer's number + 1 if
    `scale_attn_by_inverse_layer_idx` is. Raises ModelConfigError for values that are not bools.
    """
    scale = attention.sm_scale if fields.boolean("scale_attn_weights") else 1.0
    return replace(attention, scale=scale / (layer + 1 if fields.boolean("scale_attn_by_inverse_layer_idx") else 1))


def windowed(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with `sliding_window` as its window if it is SLIDING, without a window if it is
    FULL. Raises ModelConfigError for wrong fields.
    """
    windows = windows_by_kind(layer_kinds(fields), fields.integer("sliding_window", None))
    return replace(attention, window=windows[layer])


def full_first_of_four(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types`. If they are not listed, every fourth layer, from the first on, is FULL and the others are
    SLIDING. Raises ModelConfigError for a wrong number of layers.
    """
    count = fields.integer("num_hidden_layers")
    kinds = [FULL if layer % 4 == 0 else SLIDING for layer in range(count)]
    return {"layer_types": fields.value("layer_types", kinds)}


def _cwm_fields(fields: ConfigFields) -> Mapping[str, Any]:
    """Return `layer_types` as full_first_of_four does. Raises ModelConfigError for wrong fields, and for a file without
    rope.
    """
    require_rope(fields)
    return full_first_of_four(fields)


def embedding_width(fields: ConfigFields) -> int:
    """Return the width of embeddings: `n_embed` if it is present, otherwise `hidden_size`. Raises ModelConfigError for
    wrong sizes.
    """
    return fields.integer("n_embed" if fields.has("n_embed") else "hidden_size")


def _falcon_sizes(fields: ConfigFields) -> Mapping[str, Any]:
    """Return the hidden size, the number of KV heads (`num_kv_heads` with `new_decoder_architecture`, else 1 with
    `multi_query`, else all heads), and the feed-forward size, by default 4 * hidden size. Raises ModelConfigError for
    wrong fields.
    """
    heads = fields.integer("num_attention_heads")
    new, multi_query = fields.boolean("new_decoder_architecture"), fields.boolean("multi_query")
    kv_heads = fields.integer("num_kv_heads", heads) if new else 1 if multi_query else heads
    width = {"hidden_size": embedding_width(fields)}
    return {**width, "num_key_value_heads": kv_heads, **four_times(ConfigFields({**fields.raw, **width}))}


def rope_unless_alibi(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Return rope of all elements of a head; None if `alibi` is true. Raises ModelConfigError for wrong fields."""
    return None if fields.boolean("alibi") else whole_heads(fields, head_dim)


def _falcon_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention, if `alibi` is true with ALiBi slopes multiplied by the scale of products of q and
    k. Raises ModelConfigError for a value that is not a bool.
    """
    if not fields.boolean("alibi"):
        return attention
    # Falcon adds the bias of ALiBi to products before they are scaled.
    slopes = (each * attention.sm_scale for each in alibi_slopes(attention.num_heads))
    return replace(attention, slopes=tuple(slopes))


def _falcon_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with the order of the joined projection's rows (`multi_query`), and attention and MLP in
    sequence, or in parallel (`parallel_attn`) after one norm or two (`num_ln_in_parallel_attn`; default: 2 with
    `new_decoder_architecture`, else 1). Raises ModelConfigError for the new architecture in sequence, and for two norms
    without it.
    """
    new, beside = fields.boolean("new_decoder_architecture"), fields.boolean("parallel_attn")
    norms = fields.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if new and not beside:
        raise fields.fail("parallel_attn", "true with new_decoder_architecture")
    if norms > (2 if new else 1):
        raise fields.fail("num_ln_in_parallel_attn", "1, or 2 with new_decoder_architecture")
    form = replace(form, joined=ROWS if fields.boolean("multi_query") and not new else GROUPS)
    if not beside:
        return form
    return replace(form, placement=PARALLEL, norms=("ln_attn", "ln_mlp") if norms == 2 else form.norms[:1])


def _gguf_falcon_form(gguf: GGUFConfig, form: DeclaredForm) -> DeclaredForm:
    """Return the form of a GGUF file: one joined projection of queries, keys and values (ROWS), and attention and MLP
    in parallel, after two norms if there are two.
    """
    two = "attn_norm_2" in gguf.stored
    return replace(form, joined=ROWS, placement=PARALLEL, norms=("ln_attn",) * two + form.norms[:1])


def _opt_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    """Return the form with norms with or without weights (`layer_norm_elementwise_affine`), placed before the parts
    (`do_layer_norm_before`; with a final norm, unless `_remove_final_layer_norm`) or after them, and with the
    embedding's size (`word_embed_proj_dim`). Raises ModelConfigError for wrong fields.
    """
    before, size = fields.boolean("do_layer_norm_before"), fields.integer("word_embed_proj_dim", None)
    return replace(
        form,
        norm=LAYER if fields.boolean("layer_norm_elementwise_affine") else FIXED,
        placement=BEFORE if before else AFTER,
        final_norm=before and not fields.boolean("_remove_final_layer_norm"),
        embedding_size=None if size == fields.integer("hidden_size") else size,
    )


GPT2_FORM = DeclaredForm(
    norms=("ln_1", "ln_2"),
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    activation="gelu_new",
    positions="model.embed_positions",
)
_GPTJ_FORM = DeclaredForm(
    placement=PARALLEL,
    norms=("ln_1",),
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    out="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    activation="gelu_new",
    head_bias=True,
)
_NEOX_FORM = DeclaredForm(
    qkv=("attention.query_key_value",),
    joined=GROUPS,
    out="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    activation="gelu",
)
OPT_FORM = DeclaredForm(
    norms=("self_attn_layer_norm", "final_layer_norm"),
    out="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    activation="relu",
    positions="model.embed_positions",
    first_position=2,
)
_WITHOUT_GATE = DeclaredForm(up=("mlp.up_proj",), activation="relu2")
# Keys are the class names that config.json lists under "architectures".
ROWS_BY_NAME: dict[str, Row] = {
    "GPT2LMHeadModel": Row(
        "GPT-2 (Radford et al. 2019): layer norms, learned positions, biases, an MLP without a gate.",
        GPT2_FORM,
        names=transformer_names(wte="embed_tokens", wpe="embed_positions"),
        spelled={**GPT2_SPELLED, **EPSILON},
        defaults={EPS: 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        only={"add_cross_attention": False},
        rope=no_rope,
        tied=True,
        adapt=four_times,
        each_layer=_gpt2_layer,
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        gguf=GGUFRow(
            "gpt2",
            eps="attention.layer_norm_epsilon",
            bias=True,
            rotates=False,
            # Other names, since matrices are not transposed in these files.
            choose=lambda gguf, form: replace(form, qkv=("attn.qkv",), out="attn.out", up=("mlp.up",), down="mlp.down"),
        ),
        unused_ends=MASKS,
    ),
    "GPTBigCodeForCausalLM": Row(
        "StarCoder and SantaCoder (Li et al. 2023, arXiv:2305.06161): GPT-2 with one head of keys and values.",
        GPT2_FORM,
        names=transformer_names(wte="embed_tokens", wpe="embed_positions"),
        spelled={**GPT2_SPELLED, **EPSILON},
        defaults={EPS: 1e-5, "scale_attn_weights": True, "multi_query": True, "hidden_act": "gelu_pytorch_tanh"},
        only={"add_cross_attention": False},
        rope=no_rope,
        tied=True,
        adapt=lambda fields: {
            "num_key_value_heads": 1 if fields.boolean("multi_query") else fields.integer("num_attention_heads"),
            "scale_attn_by_inverse_layer_idx": False,
            **four_times(fields),
        },
        choose=lambda fields, form: form if fields.boolean("multi_query") else replace(form, joined=GROUPS),
        each_layer=_gpt2_layer,
        gguf=GGUFRow("starcoder", eps="attention.layer_norm_epsilon", bias=True, rotates=False),
        unused_ends=MASKS,
    ),
    "GPTJForCausalLM": Row(
        "GPT-J (EleutherAI 2021): attention and MLP in parallel after one norm, rope over neighbouring elements.",
        _GPTJ_FORM,
        names=transformer_names(wte="embed_tokens"),
        spelled={**GPT2_SPELLED, **EPSILON},
        defaults={EPS: 1e-5, "rotary_dim": 64},
        rope=neighbours,
        bias=False,
        output_bias=False,
        adapt=four_times,
        unused_ends=MASKS,
    ),
    "CodeGenForCausalLM": Row(
        "CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): GPT-J with a joined projection of queries, values and keys.",
        replace(_GPTJ_FORM, qkv=("attn.qkv_proj",), joined=QUARTERS),
        names=transformer_names(wte="embed_tokens"),
        spelled={**GPT2_SPELLED, **EPSILON},
        defaults={EPS: 1e-5, "rotary_dim": 64},
        rope=neighbours,
        bias=False,
        output_bias=False,
        adapt=four_times,
        unused_ends=(*MASKS, ".attn.causal_mask"),
    ),
    "GPTNeoXForCausalLM": Row(
        "GPT-NeoX and Pythia (Black et al. 2022, arXiv:2204.06745; Biderman et al. 2023, arXiv:2304.01373): attention "
        "and MLP in parallel, each after a layer norm, rope on a part of each head.",
        _NEOX_FORM,
        names=(
            ("gpt_neox.embed_in.", "model.embed_tokens."),
            ("gpt_neox.final_layer_norm.", "model.norm."),
            ("gpt_neox.", "model."),
            ("embed_out.", "lm_head."),
        ),
        spelled={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        defaults={EPS: 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True, "use_parallel_residual": True},
        rope=parts_of_heads,
        bias="attention_bias",
        output_bias="attention_bias",
        choose=_parallel("use_parallel_residual"),
        unused_ends=(*MASKS, ".attention.rotary_emb.inv_freq"),
        gguf=GGUFRow(
            "gptneox",
            eps="attention.layer_norm_epsilon",
            bias=True,
            choose=lambda gguf, form: _parallel("use_parallel_residual")(gguf.fields, replace(form, joined=ROWS)),
        ),
    ),
    "PersimmonForCausalLM": Row(
        "Persimmon (Adept 2023): GPT-NeoX's projections, norms on each head of q and k, a squared ReLU.",
        replace(
            _NEOX_FORM,
            qkv=("self_attn.query_key_value",),
            out="self_attn.dense",
            activation="relu2",
        ),
        names=(("model.final_layernorm.", "model.norm."),),
        defaults={EPS: 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": True},
        rope=parts_of_heads,
        choose=_qk_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
    ),
    "PhiForCausalLM": Row(
        "Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023, arXiv:2306.11644; Li et al. 2023, arXiv:2309.05463): "
        "attention and MLP in parallel after one layer norm, biases everywhere, rope on a part of each head.",
        DeclaredForm(
            placement=PARALLEL,
            norms=("input_layernorm",),
            out="self_attn.dense",
            up=("mlp.fc1",),
            down="mlp.fc2",
            activation="gelu_new",
            head_bias=True,
        ),
        names=(("model.final_layernorm.", "model.norm."),),
        grouped=True,
        defaults={EPS: 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": False},
        rope=parts_of_heads,
        choose=_qk_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
        gguf=GGUFRow("phi2", eps="attention.layer_norm_epsilon", bias=True),
    ),
    "FalconForCausalLM": Row(
        "Falcon (Almazrouei et al. 2023, arXiv:2311.16867): attention and MLP in parallel, one head of keys and values "
        "or few.",
        replace(
            _NEOX_FORM,
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
        ),
        names=transformer_names(word_embeddings="embed_tokens"),
        spelled={**GPT2_SPELLED, **EPSILON, "ffn_hidden_size": "intermediate_size", "activation": "hidden_act"},
        defaults={
            EPS: 1e-5,
            "max_position_embeddings": 2048,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
        },
        rope=rope_unless_alibi,
        bias="bias",
        output_bias="bias",
        mlp_bias="bias",
        tied=True,
        adapt=_falcon_sizes,
        choose=_falcon_form,
        each_layer=_falcon_layer,
        gguf=GGUFRow("falcon", eps="attention.layer_norm_epsilon", choose=_gguf_falcon_form),
    ),
    "OPTForCausalLM": Row(
        "OPT (Zhang et al. 2022, arXiv:2205.01068) and Galactica: layer norms, learned positions, biases, a ReLU.",
        OPT_FORM,
        names=(
            ("model.decoder.final_layer_norm.", "model.norm."),
            ("decoder.final_layer_norm.", "model.norm."),
            ("model.decoder.", "model."),
            ("decoder.", "model."),
        ),
        spelled={"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
        defaults={
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "_remove_final_layer_norm": False,
            EPS: 1e-5,
        },
        only={EPS: 1e-5},
        rope=no_rope,
        bias="enable_bias",
        output_bias="enable_bias",
        mlp_bias="enable_bias",
        tied=True,
        choose=_opt_form,
    ),
    "StableLmForCausalLM": Row(
        "StableLM (Bellagente et al. 2024, arXiv:2402.17834): Llama with layer norms, in some models also on each head "
        "of q and k, rope on a part of each head.",
        DeclaredForm(),
        grouped=True,
        defaults={
            EPS: 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "qk_layernorm": False,
        },
        rope=parts_of_heads,
        bias="use_qkv_bias",
        output_bias=False,
        mlp_bias=False,
        choose=_stablelm_form,
        gguf=GGUFRow("stablelm", eps="attention.layer_norm_epsilon", choose=_gguf_stablelm_form),
    ),
    "OlmoForCausalLM": Row(
        "OLMo (Groeneveld et al. 2024, arXiv:2402.00838): Llama with layer norms without weights, and in some models "
        "bounded queries, keys and values.",
        DeclaredForm(norm=FIXED),
        defaults={"attention_bias": False, EPS: 1e-5},
        only={EPS: 1e-5},
        grouped=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        each_layer=clipped,
        gguf=GGUFRow("olmo", eps="attention.layer_norm_epsilon", clip="attention.clamp_kqv"),
    ),
    "ArceeForCausalLM": Row(
        "AFM-4.5B (Arcee AI 2025): Llama with a squared ReLU without a gate.",
        replace(_WITHOUT_GATE, norm=RMS),
        grouped=True,
        defaults={"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        eps="rms_norm_eps",
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        gguf=GGUFRow("arcee"),
    ),
    "Jais2ForCausalLM": Row(
        "Jais 2 (MBZUAI, Inception and Cerebras 2025): layer norms, biases, a squared ReLU without a gate.",
        _WITHOUT_GATE,
        grouped=True,
        defaults={EPS: 1e-5, "attention_bias": True, "mlp_bias": True},
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        gguf=GGUFRow("jais2", eps="attention.layer_norm_epsilon", bias=True),
    ),
    "HeliumForCausalLM": Row(
        "Helium (Kyutai 2025): Llama with rope over neighbouring elements.",
        DeclaredForm(norm=RMS),
        grouped=True,
        defaults={"rms_norm_eps": 1e-8, "attention_bias": False, "mlp_bias": False, "head_dim": 128, "rope_theta": 1e5},
        eps="rms_norm_eps",
        rope=neighbours,
        bias="attention_bias",
        output_bias=False,
        mlp_bias="mlp_bias",
    ),
    "CwmForCausalLM": Row(
        "Code World Model (Meta FAIR 2025, arXiv:2510.02387): Llama with windows in three of four layers.",
        DeclaredForm(norm=RMS),
        grouped=True,
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192, "rope_theta": 1e6, "mlp_bias": False},
        eps="rms_norm_eps",
        bias=False,
        output_bias=False,
        mlp_bias="mlp_bias",
        adapt=_cwm_fields,
        each_layer=windowed,
    ),
}

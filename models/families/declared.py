"""Families that only mix parts that there are: a row of ROWS each, which reads like a model card, and no class.

A row says how the layers are put together (DeclaredForm), how config.json spells that, and the names of the weights. A
family with a part of its own is a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import (
    AFTER,
    BEFORE,
    FIXED,
    GROUPS,
    LAYER,
    PARALLEL,
    QUARTERS,
    RMS,
    ROWS,
    UNBIASED,
    DeclaredForm,
)
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.hf import (
    FULL,
    SLIDING,
    Activation,
    hf_fields,
    layer_kinds,
    read_head_dim,
    read_rope,
    windows_by_kind,
)
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.llama import LAYER as LAYER_NAME
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.embedding import Embedding, vocab_source
from jaxengine.models.layers.linear import Linear
from jaxengine.models.layers.mlp import MLP, GatedMLP, gelu, gelu_tanh, relu_squared
from jaxengine.models.layers.norm import FixedLayerNorm, LayerNorm, NormClass, RMSNorm, UnbiasedLayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

NORMS: dict[str, NormClass] = {RMS: RMSNorm, LAYER: LayerNorm, UNBIASED: UnbiasedLayerNorm, FIXED: FixedLayerNorm}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": relu_squared,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}
_NONE: Mapping[str, Any] = MappingProxyType({})
_EPS = "layer_norm_eps"


def whole_heads(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Read rope of all of a head."""
    return read_rope(fields, head_dim)


def parts_of_heads(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Read rope of a part of each head."""
    return read_rope(fields, head_dim, partial_rotary=True)


def neighbours(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Read rope that pairs neighbours, of all of a head or of its first `rotary_dim` elements."""
    return replace(read_rope(fields, head_dim, interleaved=True), rotary_dim=fields.integer("rotary_dim", head_dim))


def no_rope(fields: ConfigFields, head_dim: int) -> Rope | None:
    return None


class Row(NamedTuple):
    """One family.

    Attributes:
      about: first sentence of its documentation.
      form: its layers and ends, where the configuration says nothing else.
      names: beginnings of the names of weights outside of layers, and the model's.
      spelled: names of fields that it spells otherwise, and what others call them.
      defaults: values of fields that a configuration may leave out.
      only: values of fields that nothing else is read for.
      eps: field with the epsilon of norms.
      rope: function from the fields and the head dimension to the rope of all layers.
      bias, output_bias, mlp_bias: whether projections before attention, after it, and those of the MLP have biases; or
        the field that says so.
      grouped: whether several heads of queries may share one of keys and values, as `num_key_value_heads` says.
      tied: default of tie_word_embeddings.
      adapt: function that makes fields of others' meaning of its own; None for none.
      choose: function from the fields and the form to the form of a checkpoint; None where all have the same.
      each_layer: function from the fields, a layer's number and its attention to its own; None where all are alike.
      transposed: ends of the names of matrices that are stored as [in, out].
      unused_ends: ends of the names of tensors that are not read.
    """

    about: str
    form: DeclaredForm
    names: Sequence[tuple[str, str]] = ()
    spelled: Mapping[str, str] = _NONE
    defaults: Mapping[str, Any] = _NONE
    only: Mapping[str, Any] = _NONE
    eps: str = _EPS
    rope: Callable[[ConfigFields, int], Rope | None] = whole_heads
    bias: bool | str = True
    output_bias: bool | str = True
    mlp_bias: bool | str = True
    grouped: bool = False
    tied: bool = False
    adapt: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    choose: Callable[[ConfigFields, DeclaredForm], DeclaredForm] | None = None
    each_layer: Callable[[ConfigFields, int, LayerAttention], LayerAttention] | None = None
    transposed: tuple[str, ...] = ()
    unused_ends: tuple[str, ...] = ()

    def read(self, fields: ConfigFields) -> dict[str, Any]:
        """Read a config.json: keyword arguments of ModelConfig, without the architecture. Raises ModelConfigError."""
        fields = self._canonical(fields)
        fields.require(**self.only)
        activation = fields.text("hidden_act", self.form.activation)
        if activation not in ACTIVATIONS:
            raise fields.fail("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
        form = replace(self.form, activation=activation)
        form = form if self.choose is None else self.choose(fields, form)
        bias, output_bias, mlp_bias = (
            fields.boolean(each) if isinstance(each, str) else each
            for each in (self.bias, self.output_bias, self.mlp_bias)
        )
        rope = self.rope(fields, read_head_dim(fields))
        shared = hf_fields(
            fields,
            ropes=[rope] * fields.integer("num_hidden_layers"),
            activation=Activation("hidden_act", (activation,)),
            tied=self.tied,
            eps=self.eps,
            bias=bias,
            output_bias=output_bias,
            qk_norm=bool(form.qk_norms),
        )
        if self.each_layer is not None:
            numbered = enumerate(shared["attention"])
            shared["attention"] = tuple(self.each_layer(fields, number, layer) for number, layer in numbered)
        return shared | {"mlp_bias": mlp_bias, "declared": form}

    def _canonical(self, fields: ConfigFields) -> ConfigFields:
        """Return the fields under the names that most families use, with defaults."""
        raw = dict(fields.raw)
        raw |= {usual: raw[own] for own, usual in self.spelled.items() if own in raw}
        if not self.grouped:
            raw["num_key_value_heads"] = None
        fields = ConfigFields({**raw, **{key: value for key, value in self.defaults.items() if raw.get(key) is None}})
        return fields if self.adapt is None else ConfigFields({**fields.raw, **self.adapt(fields)})


class DeclaredLayer(nnx.Module):
    """Layer of a DeclaredForm, made of the given attention and MLP."""

    def __init__(self, config: ModelConfig, form: DeclaredForm, attention: nnx.Module, mlp: nnx.Module, build: Build):
        norm = partial(NORMS[form.norm], config.hidden_size, config.rms_norm_eps, build=build)
        first, *second = (norm(source=f"{LAYER_NAME}.{name}") for name in form.norms)
        self.input_norm, self.mlp_norm = first, second[0] if second else None
        self.attention, self.mlp, self.placement = attention, mlp, form.placement

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        after = self.placement == AFTER
        normed = x if after else self.input_norm(x)
        with jax.named_scope("attention"):
            attended, kv = self.attention(normed, kv, pages, step)
        with jax.named_scope("mlp"):
            if self.placement == PARALLEL:
                normed = normed if self.mlp_norm is None else self.mlp_norm(x)
                return x + attended + self.mlp(normed, step.rows), kv
            assert self.mlp_norm is not None
            x = self.input_norm(x + attended) if after else x + attended
            added = self.mlp(x if after else self.mlp_norm(x), step.rows)
            return self.mlp_norm(x + added) if after else x + added, kv


class ClippedAttention(Attention):
    """Attention whose projected queries, keys and values are bounded by -clip and clip; None for no bound."""

    def __init__(self, clip: float | None, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.clip = clip

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        return super().rotate(self.values(q), self.values(k), step)

    def values(self, v: jax.Array) -> jax.Array:
        return v if self.clip is None else jnp.clip(v, -self.clip, self.clip)


class DeclaredForCausalLM(Decoder):
    """Decoder of DeclaredLayers. Its subclasses are made of ROWS."""

    row: ClassVar[Row]

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.row.read(fields)

    def __init__(self, config: ModelConfig, build: Build):
        assert config.declared is not None
        self.form = form = config.declared
        super().__init__(config, build)
        stage, size, inner = self.stage, config.hidden_size, form.embedding_size
        scores = stage.is_last and config.pooler is None
        if stage.is_first and form.positions is not None:
            rows = config.max_position_embeddings + form.first_position
            decl = ParamDecl((None, None), (Source(form.positions, rows).tensor("weight"),), init_std=0.02)
            self.positions = declare((rows, size), build.dtype, decl)
        if stage.is_first and inner is not None:
            source = (Source("model.project_in", size),)
            self.project_in = Linear(inner, source, axes=("embed", "latent"), build=self.build)
        if scores and inner is not None:
            source = (Source("model.project_out", inner),)
            self.project_out = Linear(size, source, axes=("embed", "latent"), build=self.build)
        if scores and form.head_bias:
            bias = vocab_source("lm_head", config.vocab_size, self.mesh).tensor("bias")
            decl = ParamDecl(("vocab",), (bias,), init_std=0.02)
            self.head_bias = declare((bias.num_contributed,), build.dtype, decl)

    def make_embedding(self, build: Build) -> Any:
        size = self.form.embedding_size or self.config.hidden_size
        return Embedding(self.config.vocab_size, size, source="model.embed_tokens", build=build)

    def make_norm(self, build: Build) -> Any:
        if not self.form.final_norm:
            return _unchanged
        norm = NORMS[self.form.norm]
        return norm(self.config.hidden_size, self.config.rms_norm_eps, source="model.norm", build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, form, own = self.config, self.form, self.config.attention[layer]
        size, eps, norm = config.hidden_size, config.rms_norm_eps, NORMS[form.qk_norm]
        norms = [norm(own.head_dim, eps, source=f"{LAYER_NAME}.{name}", build=build) for name in form.qk_norms]
        modules = {"qkv": _qkv(form, own), "out": Source(f"{LAYER_NAME}.{form.out}", size), "qk_norms": norms}
        attention = ClippedAttention(form.clip, own, size, eps=eps, source=LAYER_NAME, build=build, **modules)
        return DeclaredLayer(config, form, attention, self.make_mlp(layer, build), build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        """Make the feed-forward part of a layer: ([T, D], Rows) -> [T, D]."""
        config, form = self.config, self.form
        size, ffn = config.hidden_size, config.intermediate_size
        options: dict[str, Any] = {"activation": ACTIVATIONS[form.activation], "bias": config.mlp_bias, "build": build}
        if len(form.up) == 1:
            return MLP(size, ffn, source=LAYER_NAME, up=form.up[0], down=form.down, **options)
        gate_up = tuple(Source(f"{LAYER_NAME}.{name}", ffn) for name in form.up)
        down = Source(f"{LAYER_NAME}.{form.down}", size)
        return GatedMLP(size, ffn, source=LAYER_NAME, gate_up=gate_up, down=down, **options)

    def embed_batch(self, batch: ForwardBatch) -> jax.Array:
        x = super().embed_batch(batch)
        if self.form.positions is None:
            return x
        added = self.positions[...][batch.positions + self.form.first_position]
        return (x.astype(jnp.float32) + added.astype(jnp.float32)).astype(x.dtype)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        x = super().embed_tokens(token_ids)
        return x if self.form.embedding_size is None else self.project_in(x)

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        logits = super().token_logits(hidden if self.form.embedding_size is None else self.project_out(hidden))
        return logits + self.head_bias[...].astype(jnp.float32) if self.form.head_bias else logits


def _unchanged(x: jax.Array) -> jax.Array:
    return x


def _qkv(form: DeclaredForm, attention: LayerAttention) -> list[Source]:
    """Return the modules of queries, keys and values, in this order, or their rows of a joined one."""
    heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    sizes = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    names = [f"{LAYER_NAME}.{name}" for name in form.qkv]
    if len(names) == len(sizes):
        return [Source(name, size) for name, size in zip(names, sizes, strict=True)]
    if form.joined == ROWS:
        return list(parts_of(names[0], *sizes))
    count = 4 if form.joined == QUARTERS else kv_heads
    runs = [size // count for size in sizes]
    stored = (0, 2, 1) if form.joined == QUARTERS else (0, 1, 2)  # CodeGen has values before keys
    firsts = {part: sum(runs[each] for each in stored[:place]) for place, part in enumerate(stored)}
    joined = {"tensor_rows": sum(sizes), "stride": sum(runs)}
    return [Source(names[0], sizes[each], first=firsts[each], run=runs[each], **joined) for each in range(3)]


# Spellings of GPT-2's time.
_N = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_N |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act"}
_EPSILON = {"layer_norm_epsilon": _EPS}
_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


def _transformer(**ends: str) -> tuple[tuple[str, str], ...]:
    """Return the names below "transformer.", which some checkpoints leave out."""
    pairs = {"h": "layers", "ln_f": "norm", **ends}
    return tuple((f"{before}{old}.", f"model.{new}.") for before in ("transformer.", "") for old, new in pairs.items())


def four_times(fields: ConfigFields) -> Mapping[str, Any]:
    """Default of a feed-forward size: four times the hidden size."""
    size = fields.integer("intermediate_size", 4 * fields.integer("hidden_size"))
    return {"intermediate_size": size}


def _parallel(field: str, **changes: Any) -> Callable[[ConfigFields, DeclaredForm], DeclaredForm]:
    """Return a `choose` that puts attention and MLP beside each other if a field says so, and then changes more."""

    def choose(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
        return replace(form, placement=PARALLEL, **changes) if fields.boolean(field) else form

    return choose


def _qk_norms(*names: str) -> Callable[[ConfigFields, DeclaredForm], DeclaredForm]:
    """Return a `choose` that norms each head's q and k if `qk_layernorm` says so."""
    return lambda fields, form: replace(form, qk_norms=names if fields.boolean("qk_layernorm") else ())


def _gpt2_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    scale = attention.sm_scale if fields.boolean("scale_attn_weights") else 1.0
    return replace(attention, scale=scale / (layer + 1 if fields.boolean("scale_attn_by_inverse_layer_idx") else 1))


def _gpt_neo_layer(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    try:
        kinds = [kind for kinds, count in fields.value("attention_types") for _ in range(count) for kind in kinds]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != fields.integer("num_hidden_layers") or any(kind not in ("global", "local") for kind in kinds):
        raise fields.fail("attention_types", "lists of global and local, and how often each comes, for all layers")
    return replace(attention, scale=1.0, window=fields.integer("window_size") if kinds[layer] == "local" else None)


def _windowed(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    windows = windows_by_kind(layer_kinds(fields), fields.integer("sliding_window", None))
    return replace(attention, window=windows[layer])


def _full_first_of_four(fields: ConfigFields) -> Mapping[str, Any]:
    """Default of the kinds of layers: every fourth one sees all keys, from the first on."""
    count = fields.integer("num_hidden_layers")
    kinds = [FULL if layer % 4 == 0 else SLIDING for layer in range(count)]
    return {"layer_types": fields.value("layer_types", kinds)}


def _falcon_heads(fields: ConfigFields) -> Mapping[str, Any]:
    heads = fields.integer("num_attention_heads")
    new, multi_query = fields.boolean("new_decoder_architecture"), fields.boolean("multi_query")
    kv_heads = fields.integer("num_kv_heads", heads) if new else 1 if multi_query else heads
    return {"num_key_value_heads": kv_heads, **four_times(fields)}


def _falcon_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
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


def _opt_form(fields: ConfigFields, form: DeclaredForm) -> DeclaredForm:
    before, size = fields.boolean("do_layer_norm_before"), fields.integer("word_embed_proj_dim", None)
    return replace(
        form,
        norm=LAYER if fields.boolean("layer_norm_elementwise_affine") else FIXED,
        placement=BEFORE if before else AFTER,
        final_norm=before and not fields.boolean("_remove_final_layer_norm"),
        embedding_size=None if size == fields.integer("hidden_size") else size,
    )


_GPT2_FORM = DeclaredForm(
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
_WITHOUT_GATE = DeclaredForm(up=("mlp.up_proj",), activation="relu2")
# Keys are the class names that config.json lists under "architectures".
ROWS_BY_NAME: dict[str, Row] = {
    "GPT2LMHeadModel": Row(
        "GPT-2 (Radford et al. 2019): layer norms, learned positions, biases, an MLP without a gate.",
        _GPT2_FORM,
        names=_transformer(wte="embed_tokens", wpe="embed_positions"),
        spelled={**_N, **_EPSILON},
        defaults={_EPS: 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        only={"add_cross_attention": False},
        rope=no_rope,
        tied=True,
        adapt=four_times,
        each_layer=_gpt2_layer,
        transposed=(".c_attn.weight", ".c_proj.weight", ".c_fc.weight"),
        unused_ends=_MASKS,
    ),
    "GPTBigCodeForCausalLM": Row(
        "StarCoder and SantaCoder (Li et al. 2023, arXiv:2305.06161): GPT-2 with one head of keys and values.",
        _GPT2_FORM,
        names=_transformer(wte="embed_tokens", wpe="embed_positions"),
        spelled={**_N, **_EPSILON},
        defaults={_EPS: 1e-5, "scale_attn_weights": True, "multi_query": True, "hidden_act": "gelu_pytorch_tanh"},
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
        unused_ends=_MASKS,
    ),
    "GPTNeoForCausalLM": Row(
        "GPT-Neo (EleutherAI 2021): GPT-2 with windows in every second layer, and scores that are not scaled.",
        replace(
            _GPT2_FORM,
            qkv=tuple(f"attn.attention.{part}_proj" for part in "qkv"),
            out="attn.attention.out_proj",
        ),
        names=_transformer(wte="embed_tokens", wpe="embed_positions"),
        spelled={**_N, **_EPSILON, "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
        defaults={_EPS: 1e-5, "window_size": 256, "attention_types": [[["global", "local"], 12]]},
        rope=no_rope,
        bias=False,
        tied=True,
        adapt=four_times,
        each_layer=_gpt_neo_layer,
        unused_ends=(*_MASKS, ".attn.attention.bias", ".attn.attention.masked_bias"),
    ),
    "GPTJForCausalLM": Row(
        "GPT-J (EleutherAI 2021): attention and MLP in parallel after one norm, rope over neighbouring elements.",
        _GPTJ_FORM,
        names=_transformer(wte="embed_tokens"),
        spelled={**_N, **_EPSILON},
        defaults={_EPS: 1e-5, "rotary_dim": 64},
        rope=neighbours,
        bias=False,
        output_bias=False,
        adapt=four_times,
        unused_ends=_MASKS,
    ),
    "CodeGenForCausalLM": Row(
        "CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): GPT-J with a joined projection of queries, values and keys.",
        replace(_GPTJ_FORM, qkv=("attn.qkv_proj",), joined=QUARTERS),
        names=_transformer(wte="embed_tokens"),
        spelled={**_N, **_EPSILON},
        defaults={_EPS: 1e-5, "rotary_dim": 64},
        rope=neighbours,
        bias=False,
        output_bias=False,
        adapt=four_times,
        unused_ends=(*_MASKS, ".attn.causal_mask"),
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
        defaults={
            _EPS: 1e-5,
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        rope=parts_of_heads,
        bias="attention_bias",
        output_bias="attention_bias",
        choose=_parallel("use_parallel_residual"),
        unused_ends=(*_MASKS, ".attention.rotary_emb.inv_freq"),
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
        defaults={_EPS: 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": True},
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
        defaults={_EPS: 1e-5, "partial_rotary_factor": 0.5, "qk_layernorm": False},
        rope=parts_of_heads,
        choose=_qk_norms("self_attn.q_layernorm", "self_attn.k_layernorm"),
    ),
    "FalconForCausalLM": Row(
        "Falcon (Almazrouei et al. 2023, arXiv:2311.16867): attention and MLP in parallel, one head of keys and values "
        "or few.",
        replace(
            _NEOX_FORM,
            qkv=("self_attention.query_key_value",),
            out="self_attention.dense",
        ),
        names=_transformer(word_embeddings="embed_tokens"),
        spelled={
            **_N,
            **_EPSILON,
            "n_embed": "hidden_size",
            "ffn_hidden_size": "intermediate_size",
            "activation": "hidden_act",
        },
        defaults={
            _EPS: 1e-5,
            "max_position_embeddings": 2048,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
        },
        only={"alibi": False},
        bias="bias",
        output_bias="bias",
        mlp_bias="bias",
        tied=True,
        adapt=_falcon_heads,
        choose=_falcon_form,
    ),
    "OPTForCausalLM": Row(
        "OPT (Zhang et al. 2022, arXiv:2205.01068) and Galactica: layer norms, learned positions, biases, a ReLU.",
        DeclaredForm(
            norms=("self_attn_layer_norm", "final_layer_norm"),
            out="self_attn.out_proj",
            up=("fc1",),
            down="fc2",
            activation="relu",
            positions="model.embed_positions",
            first_position=2,
        ),
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
            _EPS: 1e-5,
        },
        only={_EPS: 1e-5},
        rope=no_rope,
        bias="enable_bias",
        output_bias="enable_bias",
        mlp_bias="enable_bias",
        tied=True,
        choose=_opt_form,
    ),
    "StableLmForCausalLM": Row(
        "StableLM (Bellagente et al. 2024, arXiv:2402.17834): Llama with layer norms, rope on a part of each head.",
        DeclaredForm(),
        grouped=True,
        defaults={
            _EPS: 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
        },
        only={"qk_layernorm": False},
        rope=parts_of_heads,
        bias="use_qkv_bias",
        output_bias=False,
        mlp_bias=False,
        choose=_parallel("use_parallel_residual", norms=("input_layernorm",)),
    ),
    "OlmoForCausalLM": Row(
        "OLMo (Groeneveld et al. 2024, arXiv:2402.00838): Llama with layer norms without weights, and in some models "
        "bounded queries, keys and values.",
        DeclaredForm(norm=FIXED),
        defaults={"attention_bias": False, _EPS: 1e-5},
        only={_EPS: 1e-5},
        grouped=True,
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias=False,
        choose=lambda fields, form: replace(form, clip=fields.number("clip_qkv", None)),
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
    ),
    "Jais2ForCausalLM": Row(
        "Jais 2 (MBZUAI, Inception and Cerebras 2025): layer norms, biases, a squared ReLU without a gate.",
        _WITHOUT_GATE,
        grouped=True,
        defaults={_EPS: 1e-5, "attention_bias": True, "mlp_bias": True},
        bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "HeliumForCausalLM": Row(
        "Helium (Kyutai 2025): Llama with rope over neighbouring elements.",
        DeclaredForm(norm=RMS),
        grouped=True,
        defaults={"rms_norm_eps": 1e-8, "attention_bias": False, "mlp_bias": False, "head_dim": 128},
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
        defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192, "mlp_bias": False},
        eps="rms_norm_eps",
        bias=False,
        output_bias=False,
        mlp_bias="mlp_bias",
        adapt=_full_first_of_four,
        each_layer=_windowed,
    ),
}


def _declared(name: str, row: Row) -> type[DeclaredForCausalLM]:
    """Make the class of one row."""
    names = CheckpointNames(prefixes=tuple(row.names), transposed=row.transposed, unused_ends=row.unused_ends)
    members = {"row": row, "checkpoint_names": names, "__doc__": row.about, "__module__": __name__}
    return type(name, (DeclaredForCausalLM,), members)


DECLARED: dict[str, type[DeclaredForCausalLM]] = {name: _declared(name, row) for name, row in ROWS_BY_NAME.items()}

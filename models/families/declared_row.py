"""Row that describes a family which only combines existing parts, and how its checkpoints are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.declared import ROWS, DeclaredForm
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import (
    SLIDING,
    Activation,
    hf_fields,
    layer_kinds,
    listed_dense,
    predicting,
    read_head_dim,
    read_rope,
    ropes_by_kind,
    text_fields,
    windows_by_kind,
)
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.config.rope import Rope
from jaxengine.models.layers.base.activations import ACTIVATIONS, SILU, read_activation
from jaxengine.models.layers.experts.moe import MLP_NAMES, ExpertNames
from jaxengine.models.params.source import ExpertRows, NextLayer

_NONE: Mapping[str, Any] = MappingProxyType({})
EPS = "layer_norm_eps"


def whole_heads(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Return rope of all `head_dim` elements of a head. Raises ModelConfigError for wrong fields and for a
    partial_rotary_factor below 1.
    """
    return read_rope(fields, head_dim)


def parts_of_heads(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Return rope of the share `partial_rotary_factor` of each head, by default all of it. Raises ModelConfigError for
    wrong fields.
    """
    return read_rope(fields, head_dim, partial_rotary=True)


def neighbours(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Return rope that pairs neighbouring elements, in the first `rotary_dim` elements of a head, by default in all.
    Raises ModelConfigError for wrong fields.
    """
    return replace(read_rope(fields, head_dim, interleaved=True), rotary_dim=fields.integer("rotary_dim", head_dim))


def no_rope(fields: ConfigFields, head_dim: int) -> Rope | None:
    """Return None, which means that layers have no rope."""
    return None


def rope_in_windows(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention. If `sliding_window` is set, SLIDING layers have that window, and FULL layers have
    no rope; otherwise it is unchanged. Raises ModelConfigError for wrong fields.
    """
    window, kind = fields.integer("sliding_window", None), layer_kinds(fields)[layer]
    if window is None:
        return attention
    return replace(attention, window=window) if kind == SLIDING else replace(attention, rope=None)


def clipped(fields: ConfigFields, layer: int, attention: LayerAttention) -> LayerAttention:
    """Return the layer's attention with queries, keys and values within `clip_qkv`, if it is set. Raises
    ModelConfigError for another value than a number above 0.
    """
    return replace(attention, clip=fields.number("clip_qkv", None))


def kinds_of_ropes(fields: ConfigFields, layer: int, attention: LayerAttention, **options: Any) -> LayerAttention:
    """Return the layer's attention with the window and the rope of its kind; a part of each head may be rotated.
    options: options of ropes_by_kind. Raises ModelConfigError for wrong fields.
    """
    kinds, options = layer_kinds(fields), {"partial_rotary": True, **options}
    window = windows_by_kind(kinds, fields.integer("sliding_window"))[layer]
    rope = ropes_by_kind(fields, read_head_dim(fields), kinds[layer : layer + 1], **options)[0]
    return replace(attention, window=window, rope=rope)


def softmax_experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the ExpertsConfig of `num_experts`, or else `num_local_experts`, of which softmax scores choose
    `num_experts_per_tok`, of size `moe_intermediate_size` or else `intermediate_size`, in all layers that
    `mlp_layer_types` does not list as dense. The weights of a token's experts add up to 1 only if `norm_topk_prob` is
    true. Raises ModelConfigError for wrong fields.
    """
    return ExpertsConfig(
        num_experts=fields.integer("num_experts", None) or fields.integer("num_local_experts"),
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size", None) or fields.integer("intermediate_size"),
        norm_weights=fields.boolean("norm_topk_prob", False),
        dense_layers=listed_dense(fields) or (),
    )


class GGUFRow(NamedTuple):
    """Description of a family's GGUF files, in addition to its Row.

    Attributes:
      architecture: llama.cpp's name of the architecture.
      eps: name of the field with the epsilon of norms.
      bias: whether projections usually have biases; those of a file follow from its tensors.
      rotates: whether layers have rope.
      clip: name of the field with the bound of queries, keys and values; None for none.
      choose: function from the file and the row's form to the form of the file; None for the row's form.
      experts: function from the metadata's fields to the ExpertsConfig; None for a family without experts.
      layers: function from the metadata's fields and the attention of equal layers to that of each; None if they are.
      read: function from the file to what `gguf_fields` returns, with states; None for that function itself.
      more: function from the metadata's fields to further arguments of ModelConfig; None for none.
      interleaved: whether rope pairs neighbouring elements.
    """

    architecture: str
    eps: str = "attention.layer_norm_rms_epsilon"
    bias: bool = False
    rotates: bool = True
    clip: str | None = None
    choose: Callable[[GGUFConfig, DeclaredForm], DeclaredForm] | None = None
    experts: Callable[[ConfigFields], ExpertsConfig | None] | None = None
    layers: Callable[[ConfigFields, tuple[LayerAttention, ...]], tuple[LayerAttention, ...]] | None = None
    read: Callable[[GGUFConfig], dict[str, Any]] | None = None
    more: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    interleaved: bool = False


class Row(NamedTuple):
    """Description of one family: its layers, its weights' names, and how its config.json is read.

    Attributes:
      about: first sentence of the family's documentation.
      form: layers, embedding and output, unless `choose` changes them.
      names: (prefix of tensor names in checkpoints, prefix in the model). suffixes: the same for ends of names.
      spelled: this family's names of fields -> names that most families use.
      defaults: values of fields that a configuration may leave out.
      only: fields and their only supported values; the fields may be absent.
      eps: name of the field with the epsilon of norms.
      rope: function from the fields and the head dimension to the rope of all layers.
      bias, output_bias, mlp_bias: whether projections before attention, after it, and those of the MLP have biases; or
        the name of a boolean field that says so.
      grouped: whether `num_key_value_heads` may be less than the number of heads.
      tied: default of tie_word_embeddings.
      adapt: function from the fields to fields that are added, or replace existing ones, first of all; None for none.
      choose: function from the fields and the form to the form of a checkpoint; None if all have the same.
      each_layer: function from the fields, a layer's number and the common attention to the layer's attention; None if
        all layers are alike.
      more: function from the fields to further arguments of ModelConfig; None for none.
      experts: function from the fields to the ExpertsConfig; None for a family without experts. experts_in: module of a
        layer that contains experts, router and shared MLP. expert_names: names within it. expert_rows: see
        CheckpointNames.
      wrapped: whether the fields are in `text_config`, in files of models with towers, whose tensors `unused` names.
      latent: whether attention is multi-head latent attention.
      gguf: description of GGUF files; None if these are not read.
      squeezed: ends of the names of tensors whose second axis, of size 1, is removed.
      flattened: ends of the names of tensors whose axes after the first are joined.
      transposed: ends of the names of matrices that are stored as [in, out].
      unused_ends: ends of the names of tensors that are not read. unused: the same for prefixes.
      parts, divided: see CheckpointNames.
      next_layer: the layer that predicts further tokens, if configurations have one; None if it is not read.
    """

    about: str
    form: DeclaredForm
    names: Sequence[tuple[str, str]] = ()
    spelled: Mapping[str, str] = _NONE
    defaults: Mapping[str, Any] = _NONE
    only: Mapping[str, Any] = _NONE
    eps: str = EPS
    rope: Callable[[ConfigFields, int], Rope | None] = whole_heads
    bias: bool | str = True
    output_bias: bool | str = True
    mlp_bias: bool | str = True
    grouped: bool = False
    tied: bool = False
    adapt: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    choose: Callable[[ConfigFields, DeclaredForm], DeclaredForm] | None = None
    each_layer: Callable[[ConfigFields, int, LayerAttention], LayerAttention] | None = None
    more: Callable[[ConfigFields], Mapping[str, Any]] | None = None
    experts: Callable[[ConfigFields], ExpertsConfig | None] | None = None
    experts_in: str = "mlp"
    expert_names: ExpertNames = MLP_NAMES
    wrapped: bool = False
    latent: bool = False
    gguf: GGUFRow | None = None
    squeezed: tuple[str, ...] = ()
    flattened: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    unused_ends: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    suffixes: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, str], ...] = ()
    divided: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    expert_rows: ExpertRows | None = None
    next_layer: NextLayer | None = None

    def read(self, fields: ConfigFields) -> dict[str, Any]:
        """Return keyword arguments of ModelConfig, without the architecture, from the fields of a config.json.

        Raises ModelConfigError for wrong or missing fields, for an unknown activation, and for an unsupported value of
        a field in `only`.
        """
        fields = self._canonical(text_fields(fields) if self.wrapped else fields)
        fields.require(**self.only)
        activation = read_activation(fields, default=self.form.activation)
        activation = SILU if activation == "swish" else activation
        form = replace(self.form, activation=activation)
        form = form if self.choose is None else self.choose(fields, form)
        bias, output_bias, mlp_bias = (
            fields.boolean(each) if isinstance(each, str) else each
            for each in (self.bias, self.output_bias, self.mlp_bias)
        )
        shared = self._shared(fields, activation, bias=bias, output_bias=output_bias)
        if self.each_layer is not None:
            numbered = enumerate(shared["attention"])
            shared["attention"] = tuple(self.each_layer(fields, number, layer) for number, layer in numbered)
        if not form.up:
            shared["attention"] = tuple(replace(layer, mixer_only=True) for layer in shared["attention"])
        experts = None if self.experts is None else self.experts(fields)
        named = {} if experts is None else {"activation": activation}
        more = {} if self.more is None else self.more(fields)
        shared = _run_in_loops(shared if self.next_layer is None else predicting(shared), more)
        return shared | {"mlp_bias": mlp_bias, "declared": form, "experts": experts, **named, **more}

    def read_gguf(self, gguf: GGUFConfig) -> dict[str, Any]:
        """Return keyword arguments of ModelConfig, without the architecture, from GGUF metadata. Norms of q and k that
        the file lacks are left out, and q, k and v that it has apart are read so. Must only be called for rows with
        `gguf`. Raises ModelConfigError for wrong or missing fields.
        """
        assert self.gguf is not None
        own, form = self.gguf, self.form
        form = form if own.choose is None else own.choose(gguf, form)
        form = form if "attn_q_norm" in gguf.stored else replace(form, qk_norms=())
        if len(form.qkv) == 1 and "attn_q" in gguf.stored:  # which the checkpoint joins
            form = replace(form, qkv=DeclaredForm().qkv, joined=ROWS)
        experts = None if own.experts is None else own.experts(gguf.fields)
        clip = None if own.clip is None else gguf.fields.number(own.clip, None)
        options: dict[str, Any] = {"bias": own.bias, "output_bias": own.bias, "clip": clip, "experts": experts}
        options |= {"partial_rotary": True, "interleaved": own.interleaved}
        shared = gguf_fields(gguf, eps=own.eps, **options) if own.read is None else own.read(gguf)
        if own.layers is not None:
            shared["attention"] = own.layers(gguf.fields, shared["attention"])
        if not form.up:
            shared["attention"] = tuple(replace(each, mixer_only=True) for each in shared["attention"])
        if not own.rotates:
            shared["attention"] = tuple(replace(each, rope=None) for each in shared["attention"])
        named = {} if experts is None else {"activation": form.activation}
        more = {} if own.more is None else own.more(gguf.fields)
        return _run_in_loops(shared, more) | {"mlp_bias": own.bias, "declared": form, **named, **more}

    def _shared(self, fields: ConfigFields, activation: str, **attention: Any) -> dict[str, Any]:
        """Return the fields that families share, as arguments of ModelConfig, including latent attention if the row has
        it. activation: value of `hidden_act`. attention: further fields of each layer's LayerAttention. Raises
        ModelConfigError for wrong or missing fields.
        """
        named = Activation("hidden_act", (activation, *ACTIVATIONS))  # `read` has checked the file's
        options: dict[str, Any] = {"activation": named, "tied": self.tied, "eps": self.eps, **attention}
        if self.latent:
            interleaved = fields.boolean("rope_interleave", True, null_is_false=True)
            return hf_latent_fields(fields, interleaved=interleaved, **options)
        ropes = [self.rope(fields, read_head_dim(fields))] * fields.integer("num_hidden_layers")
        return hf_fields(fields, ropes=ropes, **options)

    def _canonical(self, fields: ConfigFields) -> ConfigFields:
        """Return the fields under the names that most families use, whose own values give way to those of the names in
        `spelled`, with `defaults` for those that are absent or null, and with the fields that `adapt` returns, which
        replace all others. A token id that is null stays null, as do q_lora_rank, for queries without a latent, and
        head_dim, for hidden_size / num_attention_heads. Unless `grouped`, num_key_value_heads is null. Raises
        ModelConfigError if `adapt` does.
        """
        raw = dict(fields.raw)
        raw |= {usual: raw[own] for own, usual in self.spelled.items() if own in raw}
        if not self.grouped:
            raw["num_key_value_heads"] = None
        null = ("q_lora_rank", "head_dim")
        given = {key for key in raw if raw[key] is not None or key in null or key.endswith("_token_id")}
        fields = ConfigFields({**raw, **{key: value for key, value in self.defaults.items() if key not in given}})
        return fields if self.adapt is None else ConfigFields({**fields.raw, **self.adapt(fields)})


def _run_in_loops(shared: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ModelConfig, `shared`, with a layer for each run of those in the `loops` of `more`."""
    if (loops := more.get("loops")) is None:
        return shared
    return {**shared, "attention": tuple(shared["attention"][stored] for stored in loops.stored)}

"""Configuration of an EAGLE-3 head: one layer of Llama or Qwen3 that reads hidden states of another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.models.config.drafts.draft_heads import (
    SPECULATORS,
    DraftHeadConfig,
    check_numbers,
    joined_fields,
    vocabulary_of,
)
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import hf_architecture

# Class that has the head's layer, by the name of the head without the "Eagle3" that authors, SpecForge and vLLM add to
# it in front or behind, or leave out; and by the type of the layer in files of the library speculators.
_LLAMA, _QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
_LIKE_LLAMA = (_LLAMA, "MiniMaxM2ForCausalLM", "Qwen2_5vlForCausalLM", "Qwen3vlForCausalLM")
_LAYER_CLASSES = {**dict.fromkeys(_LIKE_LLAMA, _LLAMA), _QWEN3: _QWEN3}
_LAYER_TYPES = {"llama": _LLAMA, "qwen3": _QWEN3}
_NAME = "Eagle3"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_JOINED_NORM = "norm_before_fc"


@dataclass(frozen=True)
class Eagle3Config(DraftHeadConfig):
    """DraftHeadConfig of the head's one layer, with the fields of EAGLE-3.

    Attributes:
      norm_before_residual: whether the residual of its attention is the normed input.
      joined_norm: whether a norm over all of its streams side by side precedes their projection.
      stream_norms: whether a norm of each stream does, after `joined_norm` if it has both.
      norm_output: whether further tokens are drafted from the layer's output after the head's norm.
    """

    norm_before_residual: bool = False
    joined_norm: bool = False
    stream_norms: bool = False
    norm_output: bool = False


def head_fields(raw: Mapping[str, Any]) -> ConfigFields:
    """Return a reader of the fields of a head's config.json, whose `architectures` is the class that has the head's
    layer: Llama's or Qwen3's. In files of the library speculators, the nested fields of the layer are moved up; fields
    outside of them take precedence, and norm_before_residual is true if neither has it. Raises ModelConfigError unless
    it is an EAGLE-3 head of one such layer, and for quantization, a logit_scale other than 1, and a sliding window of
    Llama's.
    """
    fields = ConfigFields(raw)
    if fields.text(SPECULATORS, None) is not None:
        fields, named = joined_fields(fields, "eagle3", {"norm_before_residual": True}, "an EAGLE-3 head")
        if (own := _LAYER_TYPES.get(named.text("model_type", "llama"))) is None:
            raise named.fail("model_type", f"one of {', '.join(_LAYER_TYPES)} for an EAGLE-3 head")
    else:
        name = hf_architecture(fields)
        if (own := _LAYER_CLASSES.get(name.removeprefix(_NAME).removesuffix(_NAME))) is None:
            known = ", ".join(f"{_NAME}{each}" for each in _LAYER_CLASSES)
            raise ModelConfigError(f"architectures must be one of {known} for an EAGLE-3 head, got {name[:100]}")
    fields.require(quantization_config=None, logit_scale=1.0)
    if own == _LLAMA:
        fields.require(sliding_window=None)
    if fields.integer("num_hidden_layers") != 1:
        raise fields.fail("num_hidden_layers", "1 for an EAGLE-3 head")
    return ConfigFields({**fields.raw, "architectures": [own]})


def read_head(fields: ConfigFields, layer: Mapping[str, Any], model: ModelConfig) -> Eagle3Config:
    """Return the Eagle3Config of these fields (target_hidden_size, draft_vocab_size, norm_before_residual,
    norm_before_fc, fc_norm, norm_output and those of `_streams`), named "Eagle3" and its layer's class, and without
    tied embeddings.

    Args:
      fields: result of `head_fields`.
      layer: fields of the head's layer, as keyword arguments of ModelConfig without the architecture.
      model: the target model, whose hidden states the head reads.

    Raises ModelConfigError for a field that is missing, of a wrong type or out of its limits, for a draft vocabulary
    larger than the vocabulary, for a layer with a sliding window, and if use_aux_hidden_state is false.
    """
    if layer["attention"][0].window is not None:
        raise fields.fail("sliding_window", "absent, or not used, for an EAGLE-3 head")
    target_size = fields.integer("target_hidden_size", layer["hidden_size"])
    return Eagle3Config(
        architecture=f"{_NAME}{hf_architecture(fields)}",
        draft_vocab_size=vocabulary_of(fields, layer["vocab_size"]),
        target_size=target_size,
        streams=_streams(fields, model.num_layers),
        norm_before_residual=fields.boolean("norm_before_residual", False),
        own_embedding=target_size != layer["hidden_size"],
        joined_norm=_nested(fields).boolean(_JOINED_NORM, fields.boolean(_JOINED_NORM, False)),
        stream_norms=fields.boolean("fc_norm", False),
        norm_output=fields.boolean("norm_output", False),
        **{**layer, "tie_word_embeddings": False},
    )


def _nested(fields: ConfigFields) -> ConfigFields:
    """Return a reader of the fields in `eagle_config`, of none if it is absent. Raises ModelConfigError unless it is a
    mapping.
    """
    return ConfigFields(fields.mapping("eagle_config") or {})


def _streams(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return Eagle3Config.streams: the listed ones, or, without a list or with an empty one, (2, L // 2, L - 3) for L
    layers, on which heads are trained by default.

    Some files count the layers before a hidden state; others give the number, from 0, of the layer that produced it.
    Lists of the latter kind begin with 1 and are increased by one. num_layers: layers of the target model. Raises
    ModelConfigError for a value that is not a list of at most MAX_LAYERS whole numbers >= 0, and if
    use_aux_hidden_state is false.
    """
    inner = _nested(fields)
    inner.require(use_aux_hidden_state=True)
    listed = fields.value(_LAYERS, None) or inner.value(_LAYERS, None)
    if not listed:
        return (2, num_layers // 2, num_layers - 3)
    check_numbers(_LAYERS, listed)
    return tuple(each + (listed[0] == 1) for each in listed)

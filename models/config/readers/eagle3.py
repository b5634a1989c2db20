"""Configuration of an EAGLE-3 head: one Llama layer that reads the hidden states of another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.models.config.fields import MAX_LAYERS, ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import hf_architecture

# Architectures of heads as named by their authors, SpecForge and vLLM; the first is that of the target.
ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS = "speculators_model_type"
_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """ModelConfig of the head's one layer, with the fields of EAGLE-3.

    Attributes:
      draft_vocab_size: number of tokens that it may draft, a part of the vocabulary.
      target_size: size of a hidden state of the target model.
      streams: hidden states of the target that it reads, each given by the number of layers before it; ascending.
      norm_before_residual: the residual of its attention is the normed input.
      own_embedding: it has embeddings of its own; else it uses the target's.
    """

    draft_vocab_size: int = 0
    target_size: int = 0
    streams: tuple[int, ...] = ()
    norm_before_residual: bool = False
    own_embedding: bool = False


def head_fields(raw: Mapping[str, Any]) -> ConfigFields:
    """Return the fields of a head's config.json in one mapping; those of the library speculators nest the layer's.

    Raises ModelConfigError for what is no EAGLE-3 head of one layer, or has features that are not supported.
    """
    fields = ConfigFields(raw)
    kind = fields.text(SPECULATORS, None)
    if kind is not None:
        layer = fields.mapping("transformer_layer_config")
        if kind != "eagle3" or layer is None:
            raise fields.fail(SPECULATORS, '"eagle3", with a transformer_layer_config')
        given = {name: value for name, value in raw.items() if value is not None}
        fields = ConfigFields({"norm_before_residual": True, **layer, **given})
    elif (name := hf_architecture(fields)) not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelConfigError(f"architectures must be one of {known} for an EAGLE-3 head, got {name[:100]}")
    fields.require(quantization_config=None, norm_before_fc=False, logit_scale=1.0, sliding_window=None)
    if fields.integer("num_hidden_layers") != 1:
        raise fields.fail("num_hidden_layers", "1 for an EAGLE-3 head")
    return fields


def read_head(fields: ConfigFields, layer: Mapping[str, Any], model: ModelConfig) -> Eagle3Config:
    """Build the Eagle3Config of these fields.

    Args:
      fields: result of `head_fields`.
      layer: fields of its layer, as keyword arguments of ModelConfig.
      model: the target, whose hidden states it reads.

    Raises ModelConfigError for a field that is missing, of a wrong type or out of its limits, and for a draft
    vocabulary larger than the vocabulary.
    """
    draft_vocab_size = fields.integer("draft_vocab_size", layer["vocab_size"])
    if draft_vocab_size > layer["vocab_size"]:
        raise fields.fail("draft_vocab_size", f"at most vocab_size, {layer['vocab_size']}")
    target_size = fields.integer("target_hidden_size", layer["hidden_size"])
    return Eagle3Config(
        architecture=ARCHITECTURES[1],
        draft_vocab_size=draft_vocab_size,
        target_size=target_size,
        streams=_streams(fields, model.num_layers),
        norm_before_residual=fields.boolean("norm_before_residual", False),
        own_embedding=target_size != layer["hidden_size"],
        **{**layer, "tie_word_embeddings": False},
    )


def _streams(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Read Eagle3Config.streams: the listed ones, else those that heads are trained on by default, (2, L // 2, L - 3)
    of L layers.

    num_layers: layers of the target model. Raises ModelConfigError for anything but a list of whole numbers >= 0, and
    where use_aux_hidden_state is false.

    Lists are of two kinds. Some count the layers before a hidden state, others name the layer that produced it,
    from 0 on; the latter begin with 1, where the former begin with 2.
    """
    inner = ConfigFields(fields.mapping("eagle_config") or {})
    inner.require(use_aux_hidden_state=True)
    listed = fields.value(_LAYERS, None) or inner.value(_LAYERS, None)
    if not listed:
        return (2, num_layers // 2, num_layers - 3)
    wrong = not isinstance(listed, list) or len(listed) > MAX_LAYERS
    if wrong or any(type(each) is not int or each < 0 for each in listed):
        raise ModelConfigError(f"{_LAYERS} must be a list of whole numbers >= 0, got {str(listed)[:80]}")
    return tuple(each + (listed[0] == 1) for each in listed)

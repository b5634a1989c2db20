"""Configuration of a head of EAGLE 1 or 2: layers of Llama that read the last hidden states of another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxengine.models.config.drafts.draft_heads import DraftHeadConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import hf_architecture

# Classes of such heads, whose layers are Llama's. The authors' have the name of the model's class.
_NAMES = ("LlamaForCausalLM", "MistralForCausalLM", "EagleLlamaForCausalLM", "EagleMistralForCausalLM")


@dataclass(frozen=True)
class EagleConfig(DraftHeadConfig):
    """DraftHeadConfig of the head's layers. Its stored tensors determine the following.

    Attributes:
      joined_bias: whether the projection of embedding and hidden state has a bias.
      first_norm: whether a norm precedes the first layer's attention.
      last_norm: whether a norm follows the last layer.
    """

    joined_bias: bool = False
    first_norm: bool = False
    last_norm: bool = False


def head_fields(raw: Mapping[str, Any]) -> ConfigFields:
    """Return a reader of the fields of a head's config.json, whose `architectures` is the class that has its layers:
    Qwen2's if queries, keys and values have biases (`qkv_bias`), otherwise Llama's. Raises ModelConfigError for another
    head, and for quantization, a logit_scale other than 1, and a sliding window.
    """
    fields = ConfigFields(raw)
    name = hf_architecture(fields)
    if name not in _NAMES:
        raise ModelConfigError(f"architectures must be one of {', '.join(_NAMES)} for an EAGLE head, got {name[:100]}")
    fields.require(quantization_config=None, logit_scale=1.0, sliding_window=None)
    own = "Qwen2ForCausalLM" if fields.boolean("qkv_bias", False) else "LlamaForCausalLM"
    return ConfigFields({**fields.raw, "architectures": [own]})


def read_head(fields: ConfigFields, layers: Mapping[str, Any]) -> EagleConfig:
    """Return the EagleConfig of these fields, which drafts any token of the vocabulary, uses the model's embeddings and
    LM head, and has no tied embeddings and no layers that predict further tokens.

    fields: result of `head_fields`. layers: fields of the head's layers, as keyword arguments of ModelConfig without
    the architecture. Raises ModelConfigError unless `architectures` is a list of one class name, and for wrong sizes.
    """
    own = {**layers, "tie_word_embeddings": False, "num_nextn_predict_layers": 0}
    sizes = {"draft_vocab_size": layers["vocab_size"], "target_size": layers["hidden_size"]}
    return EagleConfig(architecture=f"Eagle{hf_architecture(fields)}", own_head=False, **sizes, **own)

"""Configuration of a DFlash or DSpark head: layers of Qwen3 that draft a block of tokens from hidden states of another
model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.drafts.draft_heads import (
    SPECULATORS,
    DraftHeadConfig,
    check_numbers,
    joined_fields,
    vocabulary_of,
)
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import hf_architecture

DFLASH, DSPARK, _LAYER_CLASS = "dflash", "dspark", "Qwen3ForCausalLM"
# Names under which heads are published, by method: that of Muse Glimmer is its model's assistant.
_ARCHITECTURES = {DFLASH: ("DFlashDraftModel", "MuseGlimmerAssistantModel"), DSPARK: ("Qwen3DSparkModel",)}
# Fields under the names that DSpark's first heads have.
_EARLIER = {"mask_token_id": "dspark_noise_token_id", "target_layer_ids": "dspark_target_layer_ids"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_INNER, _TARGET_LAYERS, _STREAMS = "dflash_config", "target_layer_ids", "aux_hidden_state_layer_ids"
_CAP, _ANCHOR = "final_logit_softcapping", "sample_from_anchor"
# Fields of windows, which a head's layers have by other rules than the layers of Qwen3.
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


@dataclass(frozen=True)
class DFlashConfig(DraftHeadConfig):
    """DraftHeadConfig of the head's layers, with the fields of DFlash and DSpark.

    Attributes:
      mask_token: token whose embedding stands for each token to draft.
      from_anchor: whether the block's first place, that of the last known token, predicts the first draft; otherwise
        each draft is predicted in its own place.
      markov_rank: for DSpark: numbers by which a token changes the logits of the next one; 0 for DFlash.
    """

    mask_token: int = 0
    from_anchor: bool = False
    markov_rank: int = 0


def head_fields(raw: Mapping[str, Any], method: str) -> ConfigFields:
    """Return a reader of the fields of a head's config.json, whose `architectures` is the class of its layers. The
    fields of its "dflash_config" are moved up and take precedence; files of the library speculators, and earlier names
    of fields, are brought into this form. `sample_from_anchor` is by default true for DSPARK outside of that library.
    Raises ModelConfigError unless it is a head of `method`, DFLASH or DSPARK, and for quantization, multipliers, sinks,
    Markov heads and ropes that are not supported.
    """
    fields, allowed = ConfigFields(raw), _ARCHITECTURES[method]
    from_anchor = method == DSPARK
    if fields.text(SPECULATORS, None) is not None:
        fields, layer = joined_fields(fields, method, {}, f"a head of the method {method}")
        layer.require(model_type="qwen3")
        streams = fields.value(_STREAMS)
        check_numbers(_STREAMS, streams)
        if min(streams, default=1) < 1:
            raise fields.fail(_STREAMS, "numbers of layers before a hidden state, at least 1")
        own: dict[str, Any] = {_TARGET_LAYERS: [each - 1 for each in streams]}
        own["causal"] = not fields.boolean("sliding_window_non_causal", True)
        fields, from_anchor = ConfigFields({**fields.raw, **own}), False
    elif (name := hf_architecture(fields)) not in allowed:
        raise ModelConfigError(f"architectures must be {allowed[0]} for the method {method}, got {name[:100]}")
    inner = {name: value for name, value in (fields.mapping(_INNER) or {}).items() if value is not None}
    earlier = {name: fields.raw.get(old) for name, old in _EARLIER.items() if not fields.has(name)}
    anchor = not fields.boolean("dspark_bonus_anchor", not from_anchor)
    anchored = {_ANCHOR: fields.boolean(_ANCHOR, anchor)}
    fields = ConfigFields({**fields.raw, **anchored, **earlier, **inner, "architectures": [_LAYER_CLASS]})
    fields.require(quantization_config=None, logit_scale=1.0, is_neox_style=True, use_aux_hidden_state=True)
    fields.require(add_swa_attention_sink_bias=False, attention_sink_bias=False, attention_value_scale=None)
    fields.require(markov_head_type="vanilla")
    return fields


def without_windows(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the head's layers without those of windows, which `read_head` reads."""
    return ConfigFields({name: value for name, value in fields.raw.items() if name not in _WINDOWS})


def read_head(fields: ConfigFields, layers: Mapping[str, Any], method: str) -> DFlashConfig:
    """Return the DFlashConfig of these fields (mask_token_id, target_layer_ids, target_hidden_size, draft_vocab_size,
    input_embedding_scale, output_multiplier, final_logit_softcapping, sample_from_anchor, windows and, for DSPARK,
    markov_rank), without tied embeddings. Its streams are target_layer_ids plus one.

    It has its own tables if target_hidden_size differs from its own, and its own LM head if its vocabulary is smaller.
    fields: result of `head_fields` for this method. layers: fields of the head's layers, as keyword arguments of
    ModelConfig without the architecture. Raises ModelConfigError for a field that is missing, of a wrong type or out of
    its limits.
    """
    mask = fields.integer("mask_token_id", None, minimum=0)
    if mask is None or mask >= layers["vocab_size"]:
        raise fields.fail("mask_token_id", f"a token of the vocabulary, 0 to {layers['vocab_size'] - 1}")
    listed = fields.value(_TARGET_LAYERS, None)
    if not listed:
        raise fields.fail(_TARGET_LAYERS, "numbers of layers of the target model")
    check_numbers(_TARGET_LAYERS, listed)
    attention = [_of_head(each, layer, fields) for layer, each in enumerate(layers["attention"])]
    own = {
        **layers,
        "attention": tuple(attention),
        "tie_word_embeddings": False,
        "embedding_multiplier": fields.number("input_embedding_scale", 1.0),
        "logit_scale": fields.number("output_multiplier", 1.0),
        "logit_soft_cap": fields.number(_CAP) if fields.value(_CAP, 0) else None,
    }
    target_size = fields.integer("target_hidden_size", layers["hidden_size"])
    differs = target_size != layers["hidden_size"]  # the model's tables do not fit then
    draft_vocab_size = vocabulary_of(fields, layers["vocab_size"])
    return DFlashConfig(
        architecture=_ARCHITECTURES[method][0],
        draft_vocab_size=draft_vocab_size,
        target_size=target_size,
        streams=tuple(each + 1 for each in listed),
        own_embedding=differs,
        own_head=differs or draft_vocab_size < layers["vocab_size"],
        mask_token=mask,
        from_anchor=fields.boolean(_ANCHOR),
        markov_rank=fields.integer("markov_rank") if method == DSPARK else 0,
        **own,
    )


def _of_head(attention: LayerAttention, layer: int, fields: ConfigFields) -> LayerAttention:
    """Return the attention of the head's layer `layer`: `attention`, read from pages, with the head's window and range.

    Layers of `layer_types` "sliding_attention" have a window, `swa_window_size` or else `sliding_window`, and are
    causal; others see the whole block, and with use_swa they have a window, too, if no layer is of that type.
    `is_causal`, or else `causal`, holds for all layers. Raises ModelConfigError for wrong fields, and for a window that
    is missing.
    """
    types = fields.value("layer_types", None)
    if types is not None and (
        not isinstance(types, list) or len(types) <= layer or types[layer] not in (_SLIDING, _FULL)
    ):
        raise fields.fail("layer_types", f"{_SLIDING} or {_FULL} for each layer")
    all_slide = fields.boolean("use_swa", False) and (types is None or _SLIDING not in types)
    slides = all_slide or (types is not None and types[layer] == _SLIDING)
    window = fields.integer("swa_window_size", fields.integer("sliding_window", None)) if slides else None
    if slides and window is None:
        raise fields.fail("sliding_window", "the window of a layer of sliding_attention")
    causal = types is not None and types[layer] == _SLIDING
    causal = fields.boolean("is_causal", fields.boolean("causal", causal))
    return replace(attention, window=window, causal=causal, paged=True)

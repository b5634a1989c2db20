"""Typed reading of single values from an untrusted configuration.

Defines the wording of configuration errors. Callers define the meaning and the origin of values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_REQUIRED = object()
MAX_INTEGER = 2**31 - 1
MAX_FLOAT = float(np.finfo(np.float32).max)
# Limits of sizes, a few times those of the largest models. A file of some hundred bytes can name any number, and arrays
# and lists of that size are created before any weight is read.
MAX_LAYERS = 1024
MAX_HEADS = MAX_HEAD_DIM = MAX_EXPERTS = 4096
MAX_HIDDEN, MAX_INTERMEDIATE, MAX_VOCAB = 1 << 17, 1 << 20, 1 << 22
MAX_POSITIONS = 1 << 26
MAX_TOKEN_IDS = 1024
# Pixels or frames of a patch along one side, and patches that are merged along one side.
MAX_PATCH, MAX_MERGE = 256, 16
# Bins of a spectrum, and positions in a window of audio.
MAX_BINS, MAX_WINDOW = 1024, 1 << 14
# Largest number of experts of all layers together, since each has its own named tensors.
MAX_ALL_EXPERTS = 1 << 17
# Limits by field name: names of config.json first, then those of GGUF files.
_MAXIMA = {
    "vocab_size": MAX_VOCAB,
    "hidden_size": MAX_HIDDEN,
    "intermediate_size": MAX_INTERMEDIATE,
    "moe_intermediate_size": MAX_INTERMEDIATE,
    "num_hidden_layers": MAX_LAYERS,
    "encoder_num_hidden_layers": MAX_LAYERS,
    "decoder_num_hidden_layers": MAX_LAYERS,
    "max_window_layers": MAX_LAYERS,
    "sliding_window_pattern": MAX_LAYERS,
    "_sliding_window_pattern": MAX_LAYERS,
    "no_rope_layer_interval": MAX_LAYERS,
    "shared_expert_intermediate_size": MAX_INTERMEDIATE,
    "intermediate_size_mlp": MAX_INTERMEDIATE,
    "interleave_moe_layer_step": MAX_LAYERS,
    "moe_k": MAX_EXPERTS,
    "moe_num_experts": MAX_EXPERTS,
    "moe_num_shared_experts": MAX_EXPERTS,
    "moe_topk": MAX_EXPERTS,
    "moe_layer_interval": MAX_LAYERS,
    "rotary_dim": MAX_HEAD_DIM,
    "n_shared_experts": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
    "n_group": MAX_EXPERTS,
    "topk_group": MAX_EXPERTS,
    "first_k_dense_replace": MAX_LAYERS,
    "num_nextn_predict_layers": MAX_LAYERS,
    "decoder_sparse_step": MAX_LAYERS,
    "num_attention_heads": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "kv_lora_rank": MAX_HEAD_DIM,
    "q_lora_rank": MAX_HIDDEN,
    "qk_nope_head_dim": MAX_HEAD_DIM,
    "qk_rope_head_dim": MAX_HEAD_DIM,
    "v_head_dim": MAX_HEAD_DIM,
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "num_experts_per_tok": MAX_EXPERTS,
    "max_position_embeddings": MAX_POSITIONS,
    "original_max_position_embeddings": MAX_POSITIONS,
    "sliding_window": MAX_INTEGER,  # longer than the context means no window
    "embedding_length": MAX_HIDDEN,
    "feed_forward_length": MAX_INTERMEDIATE,
    "block_count": MAX_LAYERS,
    "attention.head_count": MAX_HEADS,
    "attention.head_count_kv": MAX_HEADS,
    "attention.key_length": MAX_HEAD_DIM,
    "attention.value_length": MAX_HEAD_DIM,
    "rope.dimension_count": MAX_HEAD_DIM,
    "expert_count": MAX_EXPERTS,
    "expert_used_count": MAX_EXPERTS,
    "expert_feed_forward_length": MAX_INTERMEDIATE,
    "context_length": MAX_POSITIONS,
    "rope.scaling.original_context_length": MAX_POSITIONS,
    "depth": MAX_LAYERS,
    "embed_dim": MAX_HIDDEN,
    "num_heads": MAX_HEADS,
    "out_hidden_size": MAX_HIDDEN,
    "patch_size": MAX_PATCH,
    "temporal_patch_size": MAX_PATCH,
    "spatial_merge_size": MAX_MERGE,
    "num_position_embeddings": MAX_VOCAB,
    "d_model": MAX_HIDDEN,
    "encoder_layers": MAX_LAYERS,
    "encoder_attention_heads": MAX_HEADS,
    "encoder_ffn_dim": MAX_INTERMEDIATE,
    "decoder_layers": MAX_LAYERS,
    "decoder_attention_heads": MAX_HEADS,
    "decoder_ffn_dim": MAX_INTERMEDIATE,
    "num_mel_bins": MAX_BINS,
    "max_source_positions": MAX_WINDOW,
    "n_window": MAX_WINDOW,
    "n_window_infer": MAX_WINDOW,
    "downsample_hidden_size": MAX_HEAD_DIM,
    "projector_hidden_size": MAX_INTERMEDIATE,
    "output_proj_dims": MAX_HIDDEN,
    "attention.sliding_window": MAX_INTEGER,
    "markov_rank": MAX_HIDDEN,
}


def check_size(name: str, value: Any, maximum: int, minimum: int = 1) -> None:
    """Raise ModelConfigError unless `value` is an integer from `minimum` to `maximum`, both included; a bool is none.
    name: name of the field in the error.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ModelConfigError(f"{name} must be an integer >= {minimum} and <= {maximum}, got {value!r}")


class ModelConfigError(ValueError):
    """Error of an unusable model configuration. The message names the field, its value and what is allowed."""


class ConfigFields:
    """Reader of single fields of a configuration. `prefix` is prepended to every name ("llama." for GGUF metadata).

    A field that is absent or null takes the default, which only `boolean` checks. Methods raise ModelConfigError for
    such a field without a default, and for a value of another type or outside of its limits; the constructor does for a
    `raw` that is not a mapping.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        if not isinstance(raw, Mapping):
            raise ModelConfigError(f"a model configuration must be a mapping, got {type(raw).__name__}")
        self.raw = raw
        self.prefix = prefix

    def with_defaults(self, **defaults: Any) -> ConfigFields:
        """Return a copy in which absent fields have these values. A field that is null stays null."""
        named = {self.prefix + name: value for name, value in defaults.items()}
        return ConfigFields({**named, **self.raw}, self.prefix)

    def require(self, **allowed: Any) -> None:
        """Raise ModelConfigError for a field that is present, not null, and different from the given value, as it
        requests an unsupported feature. The value None allows only absent and null.
        """
        for name, value in allowed.items():
            found = self._get(name, None)
            if found is not None and (isinstance(found, np.ndarray) or found != value):
                raise self.fail(name, "absent" if value is None else f"{json.dumps(value)} or absent")

    def has(self, name: str) -> bool:
        """Return whether the field `name` is present and not null."""
        return self.raw.get(self.prefix + name) is not None

    def fail(self, name: str, allowed: str) -> ModelConfigError:
        """Return (not raise) the ModelConfigError that the field `name` must be `allowed`. It shows at most 80
        characters of the field's value.
        """
        value = self.raw.get(self.prefix + name)
        text = repr(value[:1000] if isinstance(value, (str, list)) else value)
        shown = text if len(text) <= 80 else text[:77] + "..."
        return ModelConfigError(f"{self.prefix + name} must be {allowed}, got {shown}")

    def _get(self, name: str, default: Any) -> Any:
        """Return the field `name`, with a numpy scalar converted to a Python value; `default` if it is absent or null.
        Raises ModelConfigError for such a field if `default` is _REQUIRED.
        """
        value = self.raw.get(self.prefix + name)
        if value is not None:
            # GGUF readers return numpy scalars; configuration objects hold Python values only.
            return value.item() if isinstance(value, np.generic) else value
        if default is _REQUIRED:
            raise ModelConfigError(f"{self.prefix + name} is missing from the model configuration")
        return default

    def value(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the field `name` of any type; the default if it is absent or null. Raises ModelConfigError for such a
        field without a default.
        """
        return self._get(name, default)

    def integer(self, name: str, default: Any = _REQUIRED, *, minimum: int = 1) -> Any:
        """Return an integer from `minimum` to the field's limit in _MAXIMA, or to MAX_INTEGER for a field without a
        limit, both included. An absent or null field returns the default, unchecked. Raises ModelConfigError without a
        default, and for any other value.
        """
        value = self._get(name, default)
        if value is default:
            return value
        maximum = _MAXIMA.get(name, MAX_INTEGER)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.fail(name, f"an integer >= {minimum} and <= {maximum}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a number above zero that is finite in float32, as a float. An absent or null field returns the
        default, unchecked. Raises ModelConfigError without a default, and for any other value.
        """
        value = self._get(name, default)
        if value is default:
            return value
        # Compared rather than tested with isfinite, which raises OverflowError for an integer beyond floats.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
            raise self.fail(name, "a finite number > 0")
        if value > MAX_FLOAT:
            raise self.fail(name, "a finite number of float32")
        return float(value)

    def zero_or_more(self, name: str) -> float:
        """Return a number as `number` does; 0.0 if the field is 0, absent or null. Raises ModelConfigError for any
        other value, such as false.
        """
        value = self._get(name, 0)
        return self.number(name) if isinstance(value, bool | np.ndarray) or value != 0 else 0.0

    def boolean(self, name: str, default: Any = _REQUIRED, *, null_is_false: bool = False) -> bool:
        """Return true or false. An absent field returns the default, and so does a null one unless `null_is_false`.
        Raises ModelConfigError for any other value, and also for a default that is not a bool.
        """
        is_null = self.prefix + name in self.raw and not self.has(name)
        value = False if null_is_false and is_null else self._get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a string. An absent or null field returns the default, unchecked. Raises ModelConfigError without a
        default, and for any other value.
        """
        value = self._get(name, default)
        if value is default:
            return value
        if not isinstance(value, str):
            raise self.fail(name, "a string")
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """Return a mapping; None if the field is absent or null. Raises ModelConfigError for any other value."""
        value = self._get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise self.fail(name, "a mapping")
        return value

    def part(self, name: str, **defaults: Any) -> ConfigFields:
        """Return a reader of a nested configuration, such as `vision_config`, whose errors show the full name.

        defaults: values for absent fields in it. Raises ModelConfigError if the field is absent, null or not a mapping.
        """
        if self.mapping(name) is None:
            raise self.fail(name, "a mapping")
        return self.part_or_empty(name, **defaults)

    def part_or_empty(self, name: str, **defaults: Any) -> ConfigFields:
        """Return a reader of a nested configuration, whose errors show the full name; an empty one if it is absent or
        null.
        defaults: values for absent fields in it. Raises ModelConfigError if the field is anything else but a mapping.
        """
        own, prefix = self.mapping(name) or {}, f"{self.prefix}{name}."
        return ConfigFields({prefix + field: value for field, value in own.items()}, prefix).with_defaults(**defaults)

    def token_ids(self, name: str, *, least: int = 0, most: int = MAX_TOKEN_IDS) -> tuple[int, ...]:
        """Return a token id of at least `least`, or a list of at most `most` of them, as a tuple; () if the field is
        absent or null. Raises ModelConfigError for any other value.
        """
        value = self._get(name, ())
        ids: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        wrong = any(isinstance(i, bool) or not isinstance(i, int) or not least <= i <= MAX_INTEGER for i in ids)
        if wrong or len(ids) > most:
            raise self.fail(name, f"a token id >= {least} or a list of at most {most} token ids")
        return ids

"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import SLIDING, layer_kinds, windows_by_kind
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields


def read_layer_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, None for a layer that sees all keys.

    Without `use_sliding_window` no layer has a window. With it, the layers with a window are those that `layer_types`
    lists as sliding, or, if that is absent, those with an index of at least `max_window_layers`. Raises
    ModelConfigError if a field is invalid, or if `layer_types` lists sliding layers while `use_sliding_window` is
    false.
    """
    num_layers = fields.integer("num_hidden_layers")
    if not fields.boolean("use_sliding_window", False):
        if SLIDING in layer_kinds(fields):
            raise fields.fail("layer_types", f"without {SLIDING} where use_sliding_window is false")
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    if fields.has("layer_types"):
        return windows_by_kind(layer_kinds(fields), window)
    first = fields.integer("max_window_layers", minimum=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with biases on q, k and v, and a sliding window for each layer or none."""

    gguf_architecture: ClassVar[str | None] = "qwen2"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return gated_fields(fields, windows=read_layer_windows(fields), bias=True)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, bias=True)

"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import SLIDING, layer_kinds, windows_by_kind
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields


def read_layer_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens, None for a layer that sees all keys.

    Without `use_sliding_window`, or where `sliding_window` is null, no layer has a window. Otherwise the layers with a
    window are those that `layer_types` lists as sliding, or, if that is absent, those with an index of at least
    `max_window_layers`. Raises ModelConfigError if a field is invalid, or if `layer_types` lists sliding layers while
    there is no window.
    """
    num_layers, windowed = fields.integer("num_hidden_layers"), fields.boolean("use_sliding_window", False)
    if windowed and "sliding_window" not in fields.raw:
        raise ModelConfigError("sliding_window is missing: null (no window) or an integer >= 1 is allowed")
    window = fields.integer("sliding_window", None) if windowed else None
    if window is None:
        if SLIDING in layer_kinds(fields):
            where = "sliding_window is null" if windowed else "use_sliding_window is false"
            raise fields.fail("layer_types", f"without {SLIDING} where {where}")
        return (None,) * num_layers
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

"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any, ClassVar

from models.config.fields import ConfigFields
from models.families.llama import LlamaForCausalLM


def read_layer_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Window of each layer: `layer_types` if listed, else the layers from `max_window_layers` on, if any is used."""
    num_layers = fields.integer("num_hidden_layers")
    if not fields.boolean("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.integer("sliding_window")
    kinds = fields.value("layer_types", None)
    if kinds is None:
        first = fields.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    by_kind = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in by_kind for kind in kinds):
        raise fields.fail("layer_types", f"a list of {num_layers} of {', '.join(by_kind)}")
    return tuple(by_kind[kind] for kind in kinds)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama with q, k, v biases; windows per layer."""

    gguf_architecture: ClassVar[str | None] = "qwen2"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return {"attention_bias": True, "sliding_window": read_layer_windows(fields)}

    @classmethod
    def read_gguf(cls, fields: ConfigFields) -> dict[str, Any]:
        return {"attention_bias": True}

"""SmolLM3 (Hugging Face 2025): Llama without rope in every fourth layer (Yang et al. 2025, arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import (
    SLIDING,
    layer_kinds,
    read_head_dim,
    read_rope,
    windows_by_kind,
)
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama in which some layers do not rotate q and k, and may have a sliding window."""

    gguf_architecture: ClassVar[str | None] = "smollm3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(rope_theta=2_000_000.0)
        rotated = rotated_layers(fields)
        rope, window = read_rope(fields, read_head_dim(fields)), None
        windows = [None] * len(rotated)
        if fields.boolean("use_sliding_window", False):
            window = fields.integer("sliding_window", None)
            if fields.has("layer_types"):
                windows = windows_by_kind(layer_kinds(fields), window)
            else:
                windows = [None if has_rope else window for has_rope in rotated]
        elif fields.has("layer_types") and SLIDING in layer_kinds(fields):
            raise fields.fail("layer_types", f"without {SLIDING} where use_sliding_window is false")
        bias = fields.boolean("attention_bias", False)
        ropes = [rope if has_rope else None for has_rope in rotated]
        shared = gated_fields(fields, windows=windows, ropes=ropes, tied=True, bias=bias, output_bias=bias)
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        """Return keyword arguments of ModelConfig, always without rope in every fourth layer, as in llama.cpp, whatever
        the file contains. Raises ModelConfigError for wrong fields.
        """
        shared = gguf_fields(gguf)
        layer, count = shared["attention"][0], len(shared["attention"])
        layers = [layer if (index + 1) % 4 else replace(layer, rope=None) for index in range(count)]
        return shared | {"attention": tuple(layers)}


def rotated_layers(fields: ConfigFields) -> list[bool]:
    """Return, for each layer, whether it has rope: where `no_rope_layers` has a 1. That list may be longer than the
    model.

    If it is absent, every `no_rope_layer_interval`-th layer (default: 4th) has no rope. Raises ModelConfigError if the
    list is too short or has an entry other than 0 and 1.
    """
    num_layers = fields.integer("num_hidden_layers")
    listed = fields.value("no_rope_layers", None)
    if listed is None:
        every = fields.integer("no_rope_layer_interval", 4)
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if not isinstance(listed, list) or len(listed) < num_layers or any(each not in (0, 1) for each in listed):
        raise fields.fail("no_rope_layers", f"a list of at least {num_layers} zeros and ones")
    return [bool(each) for each in listed[:num_layers]]

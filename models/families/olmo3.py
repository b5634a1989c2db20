"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows in three of four layers, whose rope is not scaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import OLMO3, GGUFConfig, gguf_layers
from jaxengine.models.config.readers.hf import layer_kinds, read_head_dim, ropes_by_kind, windows_by_kind
from jaxengine.models.families.llama import gated_fields
from jaxengine.models.families.olmo2 import DEFAULTS, Olmo2ForCausalLM


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with windowed layers, whose rope is not scaled, and full layers."""

    gguf_architecture: ClassVar[str | None] = OLMO3

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        shared = super().read_gguf(gguf)
        layer = shared["attention"][0]
        windowed, full = replace(layer, rope=replace(layer.rope, scaling=None)), replace(layer, window=None)
        return shared | {"attention": gguf_layers(gguf.fields, windowed, full, full_every=4)}

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS, sliding_window=4096, rope_theta=500_000.0)
        fields.require(clip_qkv=None)
        bias, kinds = fields.boolean("attention_bias", False), layer_kinds(fields, full_every=4)
        return gated_fields(
            fields,
            windows=windows_by_kind(kinds, fields.integer("sliding_window")),
            ropes=ropes_by_kind(fields, read_head_dim(fields), kinds),
            bias=bias,
            output_bias=bias,
        )

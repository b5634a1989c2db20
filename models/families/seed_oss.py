"""Seed-OSS (ByteDance Seed Team 2025): Llama with a head dimension of its own, and biases on q, k and v but not after
attention."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields


class SeedOssForCausalLM(LlamaForCausalLM):
    """Llama with separate configuration fields for the biases of q, k and v, and for the bias after attention."""

    gguf_architecture: ClassVar[str | None] = "seed_oss"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias = fields.boolean("attention_bias", True)
        output_bias = fields.boolean("attention_out_bias", False)
        shared = gated_fields(fields, head_dim=128, bias=bias, output_bias=output_bias)
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, bias=True)

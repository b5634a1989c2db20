"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): Llama with an RMS norm on each head of q and k before rope."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields
from jaxengine.models.families.qwen2 import read_layer_windows


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with RMS norms of q and k, a head dimension that is given by itself (128 by default), and a sliding window
    for each layer or none.
    """

    gguf_architecture: ClassVar[str | None] = "qwen3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias = fields.boolean("attention_bias", False)
        windows = read_layer_windows(fields)
        return gated_fields(fields, windows=windows, head_dim=128, qk_norm=True, bias=bias, output_bias=bias)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, qk_norm=True)

"""Qwen3 dense (Yang et al. 2025, arXiv:2505.09388): Llama with an RMS norm on each head of q and k before rope."""

from __future__ import annotations

from typing import Any, ClassVar

from models.config.fields import ConfigFields
from models.families.llama import LlamaForCausalLM
from models.families.qwen2 import read_layer_windows


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with q/k norm, a head dimension of its own and windows per layer."""

    gguf_architecture: ClassVar[str | None] = "qwen3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias = fields.boolean("attention_bias", False)
        return {
            "qk_norm": True,
            "attention_bias": bias,
            "output_bias": bias,
            "head_dim": fields.integer("head_dim", 128),
            "sliding_window": read_layer_windows(fields),
        }

    @classmethod
    def read_gguf(cls, fields: ConfigFields) -> dict[str, Any]:
        return {"qk_norm": True}

"""dots.llm1 (rednote-hilab 2025, arXiv:2506.05767): Qwen3's attention with experts as DeepSeek-V3 has them."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_shared_experts
from jaxengine.models.config.readers.hf import layer_kinds, windows_by_kind
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.llama import gated_fields
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM


class Dots1ForCausalLM(Qwen3MoeForCausalLM):
    """Llama with q/k norm, windows per layer, and DeepSeek-V3's experts."""

    gguf_architecture: ClassVar[str | None] = "dots1"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(sliding_window=4096)
        bias, num_layers = fields.boolean("attention_bias", False), fields.integer("num_hidden_layers")
        window = fields.integer("sliding_window", None)
        if fields.has("layer_types"):
            windows = windows_by_kind(layer_kinds(fields), window)
        else:
            first = fields.integer("max_window_layers", 62, minimum=0)
            windows = tuple(window if layer >= first else None for layer in range(num_layers))
        experts = sigmoid_experts(fields.with_defaults(norm_topk_prob=False))
        return gated_fields(fields, windows=windows, qk_norm=True, bias=bias, output_bias=bias) | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, experts=gguf_shared_experts(gguf.fields, scoring_func="sigmoid"), qk_norm=True)

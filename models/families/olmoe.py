"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): experts in every layer, one norm over all heads of q and one over
all of k."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.families.llama import gated_fields
from jaxengine.models.families.olmo2 import normed_attention
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM


class OlmoeForCausalLM(Qwen3MoeForCausalLM):
    """Llama with norms of all heads at once, and experts."""

    gguf_architecture: ClassVar[str | None] = "olmoe"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        experts = ExpertsConfig(
            # transformers 5 writes the second name
            num_experts=fields.integer("num_experts", None) or fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            norm_weights=fields.boolean("norm_topk_prob", False),
        )
        bias = fields.boolean("attention_bias", False)
        own = {"bias": bias, "output_bias": bias, "clip": fields.number("clip_qkv", None)}
        shared = gated_fields(fields.with_defaults(rms_norm_eps=1e-5), **own)
        return shared | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, experts=gguf_experts(gguf.fields, norm_weights=False))

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        return normed_attention(self.config, layer, build)

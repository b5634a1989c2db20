"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024, arXiv:2405.04434): multi-head latent attention; after some dense layers,
experts and a shared MLP.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_shared_experts
from jaxengine.models.config.readers.latent import gguf_latent_fields, hf_latent_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.mla import LatentAttention
from jaxengine.models.layers.experts.moe import MixtureOfExperts


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Llama with latent attention, and experts that are chosen by softmax scores, in some checkpoints within groups."""

    gguf_architecture: ClassVar[str | None] = "deepseek2"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(q_lora_rank=1536, n_shared_experts=2)
        bias = fields.boolean("attention_bias", False)
        fields.require(moe_layer_freq=1)
        first = fields.integer("first_k_dense_replace", 0, minimum=0)
        experts = read_experts(fields, tuple(range(min(first, fields.integer("num_hidden_layers")))))
        shared = gated_fields(fields, read=hf_latent_fields, bias=bias, output_bias=bias)
        return shared | {"experts": experts, "mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_latent_fields(gguf, experts=gguf_shared_experts(gguf.fields, scoring_func="softmax"))

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.self_attn"
        return LatentAttention(config.attention[layer], config.hidden_size, source=source, build=build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        experts = self.config.experts
        if experts is None or layer in experts.dense_layers:
            return super().make_mlp(layer, build)
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", router_dtype=jnp.float32, build=build)


def read_experts(fields: ConfigFields, dense_layers: tuple[int, ...]) -> ExpertsConfig:
    """Return the ExpertsConfig of experts that are chosen by softmax scores, within groups (`n_group`, `topk_group`) if
    `topk_method` (default: greedy) is group_limited_greedy, whose weights are not normed but multiplied by
    `routed_scaling_factor` (1), with a shared MLP unless `n_shared_experts` (default: 0) is 0. A token has at most as
    many as its groups contain. dense_layers: indices of the layers without experts. Raises ModelConfigError for wrong
    or unsupported fields.
    """
    fields.require(norm_topk_prob=False, scoring_func="softmax")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.fail("topk_method", "'greedy' or 'group_limited_greedy'")
    size, grouped = fields.integer("moe_intermediate_size"), method != "greedy"
    count, per_token = fields.integer("n_routed_experts"), fields.integer("num_experts_per_tok")
    groups, best = (fields.integer("n_group"), fields.integer("topk_group")) if grouped else (1, 1)
    if per_token <= count and (inside := best * (count // groups)):
        per_token = min(per_token, inside)  # experts of other groups would have weights of 0
    return ExpertsConfig(
        num_experts=count,
        num_per_token=per_token,
        intermediate_size=size,
        norm_weights=False,
        dense_layers=dense_layers,
        num_expert_group=groups,
        topk_group=best,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_intermediate_size=size * fields.integer("n_shared_experts", 0, minimum=0),
    )

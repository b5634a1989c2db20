"""Hunyuan with experts (Tencent 2025, Hunyuan-A13B): a shared MLP in addition to the experts, norms of q and k after
rope.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import MAX_POSITIONS, ConfigFields
from jaxengine.models.config.readers.gguf import EXPERT_SIZE, GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.config.rope import Rope, stretched_base
from jaxengine.models.families.hunyuan_dense import HunYuanDenseV1ForCausalLM
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts


class HunYuanMoEV1ForCausalLM(Qwen3MoeForCausalLM):
    """Llama with norms of q and k after rope, and experts with a shared MLP in every layer."""

    gguf_architecture: ClassVar[str | None] = "hunyuan-moe"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(use_qk_norm=True, use_cla=False, use_mla=False, use_mixed_mlp_moe=True, mlp_bias=False)
        fields.require(moe_layer_num_skipped=0, norm_topk_prob=True, group_limited_greedy=False)
        fields.require(routed_scaling_factor=1.0)
        size = _of_all_layers(fields, "intermediate_size")
        for name, value in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
            if fields.has(name) and _of_all_layers(fields, name) != value:
                raise fields.fail(name, f"{value} in every layer")
        experts = ExpertsConfig(
            num_experts=_of_all_layers(fields, "num_experts"),
            num_per_token=_of_all_layers(fields, "moe_topk"),
            intermediate_size=size,
            shared_intermediate_size=size,
        )
        bias, fields = fields.boolean("attention_bias", False), fields.with_defaults(rms_norm_eps=1e-5)
        ropes = [_read_rope(fields, read_head_dim(fields))] * fields.integer("num_hidden_layers")
        return gated_fields(fields, ropes=ropes, bias=bias, output_bias=bias) | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        size = gguf.fields.integer("expert_shared_feed_forward_length")
        if gguf.fields.integer("expert_shared_count", 1) != 1:
            raise gguf.fields.fail("expert_shared_count", "1 or absent")
        experts = gguf_experts(gguf.fields, norm_weights=True, size=EXPERT_SIZE, shared_intermediate_size=size)
        return gguf_fields(gguf, experts=experts)

    make_attention = HunYuanDenseV1ForCausalLM.make_attention

    def make_experts(self, build: Build) -> nnx.Module:
        names = ExpertNames(router="gate.wg", shared="shared_mlp")
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", names=names, router_dtype=jnp.float32, build=build)


def _of_all_layers(fields: ConfigFields, name: str) -> int:
    """Return the field `name`, an integer, or a list of equal integers with one for each layer. Raises ModelConfigError
    for any other value.
    """
    listed = fields.value(name)
    if not isinstance(listed, list):
        return fields.integer(name)
    if len(listed) != fields.integer("num_hidden_layers") or any(type(n) is not int or n != listed[0] for n in listed):
        raise fields.fail(name, "an integer, or a list of the same one for each layer")
    return ConfigFields({name: listed[0]}).integer(name)


def _read_rope(fields: ConfigFields, head_dim: int) -> Rope:
    """Return the rope. A rope of type dynamic must have an `alpha` and is plain rope with the base theta * alpha ** (H
    / (H - 2)). head_dim: H. Raises ModelConfigError for wrong fields, for an `alpha` above MAX_POSITIONS and, with
    dynamic, for H below 4.
    """
    rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
    if "dynamic" not in (rope.text("rope_type", None), rope.text("type", None)):
        return read_rope(fields, head_dim)
    alpha = rope.number("alpha")
    if alpha > MAX_POSITIONS or head_dim < 4:
        raise rope.fail("alpha", f"a number > 0 and <= {MAX_POSITIONS}, of heads of at least 4")
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    return Rope(head_dim, stretched_base(theta, alpha, head_dim))

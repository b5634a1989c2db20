"""Ling 2.5 and Ring 2.5 (Ant Group 2026): lightning attention with rope in most layers, latent attention in the others,
and DeepSeek-V3's experts after some dense layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import alibi_slopes
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import predicting, read_rope
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.config.state import LinearState
from jaxengine.models.families.bailing_hybrid import BailingHybridForCausalLM, grouped_kinds, whole_ropes
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.kimi_linear import LINEAR, KimiLinearForCausalLM
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.attention.mla import LatentAttention
from jaxengine.models.layers.states.lightning import RotatedLightningAttention
from jaxengine.models.params.source import CheckpointNames

# Ling's names of fields -> DeepSeek-V3's names.
_SPELLED = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "score_function": "scoring_func",
}
_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 600_000.0,
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "use_qk_norm": False,
    "group_norm_size": 1,
}


class BailingMoeV2_5ForCausalLM(KimiLinearForCausalLM):
    """DeepSeek-V3 with lightning attention in place of latent attention in most layers."""

    # Ling 3's, but for the names of its delta nets.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=BailingHybridForCausalLM.checkpoint_names.prefixes,
        parts=BailingHybridForCausalLM.checkpoint_names.parts,
        next_layer=BailingHybridForCausalLM.checkpoint_names.next_layer,
    )
    experts_module = BailingHybridForCausalLM.experts_module

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        raw = {**fields.raw, **{usual: fields.raw[own] for own, usual in _SPELLED.items() if own in fields.raw}}
        fields = ConfigFields(raw).with_defaults(**_DEFAULTS)
        heads = fields.integer("num_attention_heads")
        if fields.value("num_kv_heads_for_linear_attn", heads) not in (0, heads):
            raise fields.fail("num_kv_heads_for_linear_attn", f"0 or num_attention_heads = {heads}")
        fields.require(rope_interleave=True, moe_router_enable_expert_bias=True, use_bias=False, use_qkv_bias=False)
        fields.require(moe_shared_expert_intermediate_size=fields.integer("moe_intermediate_size"))
        # Each head has a key in both kinds of layers, whatever num_key_value_heads.
        shared = hf_latent_fields(ConfigFields({**whole_ropes(fields).raw, "num_key_value_heads": heads}))
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // heads)
        rope = read_rope(fields, head_dim, partial_rotary=True)
        groups = fields.integer("group_norm_size")
        if heads % groups:
            raise fields.fail("group_norm_size", f"a divisor of num_attention_heads {heads}")
        silu = fields.boolean("use_linear_silu", fields.boolean("linear_silu", False))
        fields.require(linear_rope=True)
        state = LinearState(heads, head_dim, groups, fields.boolean("use_qk_norm"), "silu" if silu else "linear")
        layers = zip(shared["attention"], grouped_kinds(fields, 8), strict=True)
        attention = (replace(each, rope=rope, state=state) if kind == LINEAR else each for each, kind in layers)
        return predicting(shared) | {"attention": tuple(attention), "experts": sigmoid_experts(fields)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, own, source = self.config, self.config.attention[layer], f"{LAYER}.attention"
        if not isinstance(own.state, LinearState):
            return LatentAttention(own, config.hidden_size, source=source, build=build)
        slopes = _slopes(own.state.num_heads, layer, config.num_layers)
        options: dict[str, Any] = {"slopes": slopes, "eps": config.rms_norm_eps, "source": source, "build": build}
        return RotatedLightningAttention(own.state, config.hidden_size, **options)


def _slopes(num_heads: int, layer: int, num_layers: int) -> tuple[float, ...]:
    """Return the slopes of a layer's heads: those of ALiBi, multiplied by a share that falls linearly from above 1 in
    layer 0, where published code counts layers from -1, to above 0 in the last layer.
    """
    share = 1 - (layer - 1) / max(num_layers - 1, 1) + 1e-5
    return tuple(slope * share for slope in alibi_slopes(num_heads))

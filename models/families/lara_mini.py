"""Lara 4 Mini (Translated 2026): gated delta nets, windows with rope, and attention to all tokens without rope, in
alternation; experts and a shared MLP in every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import (
    FULL,
    SLIDING,
    read_each_layer,
    read_head_dim,
    read_rope,
    windows_by_kind,
)
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.declared_row import softmax_experts
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.families.qwen3_5 import separate_inputs
from jaxengine.models.families.qwen3_next import LINEAR
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.states.delta_net import GatedDeltaNet
from jaxengine.models.params.source import CheckpointNames

_INPUTS = ("qkv", "z", "b", "a")
_PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "sliding_window": 512,
    "attention_bias": False,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "eos_token_id": 151643,
}


class LaraMiniForCausalLM(LlamaForCausalLM):
    """Llama with delta nets in some layers, norms of each head of q and k in the others, and experts in all."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        suffixes=((".linear_attn.out_norm.weight", ".linear_attn.norm.weight"),),
        squeezed=(".conv1d.weight",),
        # Published files join what transformers 5 has apart in memory, and so in adapters.
        joined={".linear_attn.in_proj.weight": tuple(f".linear_attn.in_proj_{part}.weight" for part in _INPUTS)},
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        kinds, bias = _layer_kinds(fields), fields.boolean("attention_bias")
        rope = read_rope(fields, read_head_dim(fields))
        experts = replace(
            softmax_experts(fields),
            dense_layers=(),
            shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        )
        shared = gated_fields(
            ConfigFields({**fields.raw, "intermediate_size": experts.intermediate_size}),
            windows=windows_by_kind(kinds, fields.integer("sliding_window")),
            ropes=[rope if kind == SLIDING else None for kind in kinds],
            tied=True,
            qk_norm=True,
            bias=bias,
            output_bias=bias,
        )
        state = GatedDelta(
            num_k_heads=fields.integer("linear_num_key_heads"),
            num_v_heads=fields.integer("linear_num_value_heads"),
            k_head_dim=fields.integer("linear_key_head_dim"),
            v_head_dim=fields.integer("linear_value_head_dim"),
            conv_kernel=fields.integer("linear_conv_kernel_dim"),
            activation=shared["activation"],
        )
        layers = zip(shared["attention"], kinds, strict=True)
        attention = tuple(
            replace(each, qk_norm=False, state=state) if kind == LINEAR else each for each, kind in layers
        )
        return shared | {"attention": attention, "experts": experts}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        state, config = self.config.attention[layer].state, self.config
        if not isinstance(state, GatedDelta):
            return super().make_attention(layer, build)
        source = f"{LAYER}.linear_attn"
        options: dict[str, Any] = {"eps": config.rms_norm_eps, "source": source, "build": build}
        return GatedDeltaNet(state, config.hidden_size, inputs=separate_inputs(state, source), **options)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        names = ExpertNames(shared="shared_expert")
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", names=names, router_dtype=jnp.float32, build=build)


def _layer_kinds(fields: ConfigFields) -> list[str]:
    """Return LINEAR, SLIDING or FULL for each layer, as `layer_types` lists them, or else in repetitions of _PATTERN.
    Raises ModelConfigError for other kinds or a list of another length.
    """
    usual = [_PATTERN[layer % len(_PATTERN)] for layer in range(fields.integer("num_hidden_layers"))]
    return read_each_layer(fields, "layer_types", (FULL, SLIDING, LINEAR)) or usual

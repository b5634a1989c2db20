"""Granite 4 (IBM 2025): Granite's multipliers, Mamba-2 in most layers and attention without rope in the others, and in
some checkpoints experts in addition to the MLP of every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_experts
from jaxengine.models.config.readers.gguf_states import gguf_hybrid, gguf_state_space
from jaxengine.models.config.readers.hf import FULL, read_head_dim, read_rope
from jaxengine.models.config.readers.state_space import read_state_space
from jaxengine.models.config.state import StateSpace
from jaxengine.models.families.granite import GraniteForCausalLM, granite_multipliers, with_gguf_multipliers
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.states.mamba2 import Mamba2
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.params.source import CheckpointNames

# Kinds of layers, as transformers 4 and 5 name them -> whether they are Mamba-2.
MAMBA = {"mamba": True, "linear_attention": True, "attention": False, FULL: False}
SHARED, EXPERTS = f"{LAYER}.shared_mlp", f"{LAYER}.block_sparse_moe"


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite with Mamba-2 in place of attention in most layers, and experts in some checkpoints."""

    gguf_architecture: ClassVar[str | None] = "granitehybrid"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        suffixes=(
            (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
            (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
            (".block_sparse_moe.input_linear.weight_scale_inv", ".block_sparse_moe.experts.gate_up_proj_scale_inv"),
            (".block_sparse_moe.output_linear.weight_scale_inv", ".block_sparse_moe.experts.down_proj_scale_inv"),
        ),
        squeezed=(".conv1d.weight",),
        parts=((".block_sparse_moe.router", ".block_sparse_moe.router.layer"),),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias, num_experts = fields.boolean("attention_bias", False), fields.integer("num_local_experts", 8, minimum=0)
        scale, shared_size = fields.number("attention_multiplier", 1.0), fields.integer("shared_intermediate_size")
        position = fields.text("position_embedding_type", "nope")
        if position not in ("nope", "rope"):
            raise fields.fail("position_embedding_type", "rope, nope or absent")
        rope = read_rope(fields, read_head_dim(fields)) if position == "rope" else None
        kinds = _layer_kinds(fields)
        shared = gated_fields(fields, ropes=[rope] * len(kinds), bias=bias, output_bias=bias, scale=scale)
        state = None
        if any(kinds):
            state = read_state_space(fields, fields.integer("mamba_expand", 2) * shared["hidden_size"], norm="after")
            state = replace(state, output_bias=state.bias)
        layers = zip(shared["attention"], kinds, strict=True)
        attention = (replace(each, rope=None, state=state) if is_mamba else each for each, is_mamba in layers)
        experts = {} if num_experts == 0 else {"experts": _experts(fields, num_experts, shared_size)}
        sizes = {"attention": tuple(attention), "intermediate_size": shared_size}
        return shared | sizes | granite_multipliers(fields) | experts

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, scale = gguf.fields, gguf.fields.number("attention.scale", None)
        experts = None
        if fields.integer("expert_count", 0, minimum=0):
            size = fields.integer("expert_shared_feed_forward_length")
            experts = gguf_experts(fields, norm_weights=True, shared_intermediate_size=size)
        shared = gguf_hybrid(gguf, gguf_state_space(fields), scale=scale, experts=experts, partial_rotary=True)
        shared = with_gguf_multipliers(fields, shared)
        return shared if experts is None else shared | {"intermediate_size": experts.shared_intermediate_size}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, state = self.config, self.config.attention[layer].state
        if not isinstance(state, StateSpace):
            return super().make_attention(layer, build)
        return Mamba2(state, config.hidden_size, eps=config.rms_norm_eps, source=f"{LAYER}.mamba", build=build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        size, ffn, experts = self.config.hidden_size, self.config.intermediate_size, self.config.experts
        gate_up, down = parts_of(f"{SHARED}.input_linear", ffn, ffn), Source(f"{SHARED}.output_linear", size)
        if experts is None:
            activation = ACTIVATIONS[self.config.activation]
            return GatedMLP(size, ffn, source=SHARED, gate_up=gate_up, down=down, activation=activation, build=build)
        names = ExpertNames(router="router.layer")
        beside = {"gate_up": gate_up, "down": down}
        return MixtureOfExperts(self.config, source=EXPERTS, names=names, shared=beside, build=build)


def _experts(fields: ConfigFields, num_experts: int, shared_size: int) -> ExpertsConfig:
    """Return the ExpertsConfig for all layers, with `num_experts` experts of size `intermediate_size` and a shared MLP
    of size `shared_size`. Raises ModelConfigError for wrong fields.
    """
    return ExpertsConfig(
        num_experts=num_experts,
        num_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        shared_intermediate_size=shared_size,
    )


def _layer_kinds(fields: ConfigFields) -> list[bool]:
    """Return whether each layer is Mamba-2, as listed in `layer_types` or else in `layers_block_type`; without both,
    all are. Raises ModelConfigError for other kinds or a list of another length.
    """
    num_layers, name = fields.integer("num_hidden_layers"), "layer_types"
    name = name if fields.has(name) else "layers_block_type"
    kinds = fields.value(name, None)
    if kinds is None:
        return [True] * num_layers
    known = isinstance(kinds, list) and all(isinstance(kind, str) and kind in MAMBA for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise fields.fail(name, f"a list of {num_layers} of {', '.join(MAMBA)}")
    return [MAMBA[kind] for kind in kinds]

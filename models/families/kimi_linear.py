"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): Kimi delta attention in three of four layers, latent attention
without rope in the others, and DeepSeek-V3's experts after a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_LAYERS, ConfigFields
from jaxengine.models.config.readers.hf import FULL, read_each_layer
from jaxengine.models.config.readers.hf_latent import hf_latent_fields
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.base.mlp import SiluThenClamped
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.states.delta_net import APART, CONVS, JOINED, GatedDeltaNet
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames, StackedExperts

LINEAR = "linear_attention"
# Kimi's names of fields -> DeepSeek-V3's names.
SPELLED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_router_activation_func": "scoring_func",
}


class KimiLinearForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 with delta nets in place of attention in most layers."""

    gguf_architecture: ClassVar[str | None] = None  # not read from GGUF
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        squeezed=(*CONVS, *JOINED),
        raveled=(".A_log",),
        stacked_experts=StackedExperts(modules=("w1", "w3", "w2")),
        joined=JOINED,
        parts=(
            # transformers writes the dense layers' MLP under the name of the experts.
            *((f".block_sparse_moe.{name}.", f".mlp.{name}.") for name in ("gate_proj", "up_proj", "down_proj")),
            *((f".self_attn.forget_gate.{name}", f".self_attn.{name}") for name in ("f_", "dt_bias", "A_log")),
            *((f".mlp.{name}.", f".block_sparse_moe.{name}.") for name in ("experts", "gate", "shared_experts")),
        ),
    )
    experts_module: ClassVar[tuple[str, ExpertNames]] = (
        f"{LAYER}.block_sparse_moe",
        ExpertNames(gate="w1", up="w3", down="w2"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = usual_names(fields)
        fields.require(mla_use_nope=True, moe_layer_freq=1, attention_bias=False)
        # Of Kimi K3, whose text_config names this class.
        fields.require(attn_res_block_size=None, mla_use_output_gate=False, routed_expert_hidden_size=None)
        if fields.has("linear_attn_config"):
            fields.part("linear_attn_config").require(gate_lower_bound=None, use_full_rank_gate=False)
        # No layer has rope, so that its scaling has no effect.
        shared = hf_latent_fields(ConfigFields({**fields.raw, "rope_parameters": None, "rope_scaling": None}))
        state = GatedDelta(
            num_k_heads=(heads := fields.integer("linear_num_heads")),
            num_v_heads=heads,
            k_head_dim=(head_dim := fields.integer("linear_head_dim")),
            v_head_dim=head_dim,
            conv_kernel=fields.integer("linear_conv_kernel_dim", 4),
            by_element=True,
            rank=head_dim,
        )
        layers = zip(shared["attention"], mixer_kinds(fields), strict=True)
        attention = (replace(each, rope=None, state=state if kind == LINEAR else None) for each, kind in layers)
        return shared | {"attention": tuple(attention), "experts": sigmoid_experts(fields)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, state = self.config, self.config.attention[layer].state
        if not isinstance(state, GatedDelta):
            return super().make_attention(layer, build)
        size, source = config.hidden_size, f"{LAYER}.self_attn"
        inputs = self.delta_inputs(state, source)
        return GatedDeltaNet(
            state, size, eps=config.rms_norm_eps, source=source, build=build, inputs=inputs, names=APART
        )

    def delta_inputs(self, state: GatedDelta, source: str) -> list[Source]:
        """Return the sources of q, k, v and beta, in this order. source: name of the delta net's module in the
        checkpoint.
        """
        sizes = {"q_proj": state.key_size, "k_proj": state.key_size, "v_proj": state.value_size}
        return [Source(f"{source}.{name}", size) for name, size in {**sizes, "b_proj": state.num_v_heads}.items()]

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        assert self.config.experts is not None
        if layer in self.config.experts.dense_layers:
            return super().make_mlp(layer, build)
        source, names = self.experts_module
        options: dict[str, Any] = {"router_dtype": "float32", "build": build}
        limits = self.config.experts.limits
        of_experts, of_mlp = limits[layer] if layer < len(limits) else (None, None)
        if of_experts is not None:
            options["activation"] = SiluThenClamped(of_experts)
        if of_mlp is not None:
            options["shared"] = {"clamped": SiluThenClamped(of_mlp)}
        return MixtureOfExperts(self.config, source=source, names=names, **options)


def usual_names(fields: ConfigFields) -> ConfigFields:
    """Return the fields under DeepSeek-V3's names, and those of `linear_attn_config` under transformers' names, with
    defaults for fields that a file may lack. `mlp_layer_types` replaces `first_k_dense_replace`. Raises
    ModelConfigError for wrong fields.
    """
    raw = dict(fields.raw)
    raw |= {usual: raw[own] for own, usual in SPELLED.items() if own in raw}
    linear = fields.mapping("linear_attn_config") or {}
    inner = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    raw |= {usual: linear[own] for own, usual in inner.items() if own in linear}
    if raw.get("mlp_layer_types") is not None:
        raw["first_k_dense_replace"] = _num_dense(raw)
    defaults = {"first_k_dense_replace": 1, "max_position_embeddings": 1 << 20, "rms_norm_eps": 1e-5}
    defaults |= {"routed_scaling_factor": 2.446, "n_shared_experts": 1}
    return ConfigFields(raw).with_defaults(**defaults)


def _num_dense(raw: Mapping[str, Any]) -> int:
    """Return the number of dense layers, which come first, in the list `mlp_layer_types`. raw: content of a
    config.json. Raises ModelConfigError unless the list has dense layers and then sparse ones, and for one that is
    empty or too long.
    """
    kinds = raw["mlp_layer_types"]
    count = len(kinds) if isinstance(kinds, list) and len(kinds) <= MAX_LAYERS else 0
    dense = next((first for first in range(count) if kinds[first] != "dense"), count)
    if not count or kinds != ["dense"] * dense + ["sparse"] * (count - dense):
        raise ConfigFields(raw).fail("mlp_layer_types", "a list of dense layers, then sparse ones")
    return dense


def mixer_kinds(fields: ConfigFields) -> list[str]:
    """Return LINEAR or FULL for each layer, as listed in `layer_types`, or else in `linear_attn_config`, which counts
    layers from 1; without both, layers 4, 8, 12 and so on, counted from 0, are FULL. Raises ModelConfigError for wrong
    lists, and if the `linear_attn_config` that is used does not contain each layer once.
    """
    count, linear = fields.integer("num_hidden_layers"), fields.mapping("linear_attn_config") or {}
    if (kinds := read_each_layer(fields, "layer_types", (FULL, LINEAR))) is not None:
        return kinds
    full, others = linear.get("full_attn_layers"), linear.get("kda_layers")
    if full is not None or others is not None:
        both = [*full, *others] if isinstance(full, list) and isinstance(others, list) else []
        if len(both) != count or any(type(each) is not int for each in both) or set(both) != set(range(1, count + 1)):
            text = f"full_attn_layers and kda_layers that have each number from 1 to {count} once"
            raise fields.fail("linear_attn_config", text)
        assert isinstance(full, list)
        return [FULL if layer + 1 in full else LINEAR for layer in range(count)]
    return [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(count)]

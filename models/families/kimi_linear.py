"""Kimi Linear (Kimi Team 2025, arXiv:2510.26692): Kimi delta attention in three of four layers, latent attention
without rope in the others, and DeepSeek-V3's experts after a dense layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import KimiK3Parts
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import MAX_FLOAT, MAX_LAYERS, ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_of_layers, gguf_shared_experts
from jaxengine.models.config.readers.gguf_states import with_states
from jaxengine.models.config.readers.hf import FULL, read_each_layer
from jaxengine.models.config.readers.latent import gguf_latent_fields, hf_latent_fields
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.mla import LatentAttention, times_gate
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP, Situ, ThenClamped
from jaxengine.models.layers.experts.latent_experts import LatentExperts
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.states.delta_net import APART, CONVS, JOINED, GatedDeltaNet
from jaxengine.models.layers.streams.block_residuals import BlockResidualLayer, StreamMix, first_stream
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

    first_input = first_stream
    gguf_architecture: ClassVar[str | None] = "kimi-linear"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        squeezed=(*CONVS, *JOINED),
        raveled=(".A_log", "_res_proj.weight"),
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
        fields.require(mla_use_nope=True, moe_layer_freq=1)
        parts, linear = read_parts(fields), ConfigFields(fields.mapping("linear_attn_config") or {})
        # No layer has rope, so that its scaling has no effect. Situ is one of `parts`; convolutions then have a SiLU.
        plain = {"rope_parameters": None, "rope_scaling": None} | ({} if parts.situ is None else {"hidden_act": "silu"})
        bias = fields.boolean("attention_bias", False)
        options: dict[str, Any] = {"read": hf_latent_fields, "bias": bias, "output_bias": bias}
        shared = gated_fields(ConfigFields({**fields.raw, **plain}), **options)
        state = read_kda(
            fields,
            activation=shared["activation"],
            whole_gates=linear.boolean("use_full_rank_gate", False),
            lower_bound=read_lower_bound(linear, "gate_lower_bound", None),
        )
        layers = zip(shared["attention"], mixer_kinds(fields), strict=True)
        attention = (replace(each, rope=None, state=state if kind == LINEAR else None) for each, kind in layers)
        experts = replace(sigmoid_experts(fields), latent_size=fields.integer("routed_expert_hidden_size", None))
        return shared | {"attention": tuple(attention), "experts": experts, "kimi_k3": parts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, stored = gguf.fields, gguf.stored
        bound = read_lower_bound(fields, "kda.gate_lower_bound", None)
        rank, blocks = fields.integer("kda.head_dim"), fields.integer("attn_res.block_size", None)
        shared = gguf_delta_nets(gguf, rank=rank, whole_gates="ssm_g" in stored, lower_bound=bound)
        beta, linear = (fields.zero_or_more(f"activation.situ_{name}") or None for name in ("beta", "linear_beta"))
        parts = KimiK3Parts(
            num_layers=len(shared["attention"]),
            layers_per_block=blocks,
            output_gate="attn_gate" in stored,
            situ=None if beta is None else (beta, linear),
            latent_norm="ffn_routed_norm" in stored,
            joined_scores=blocks is not None,
        )
        return shared | {
            "attention": tuple(replace(each, rope=None) for each in shared["attention"]),
            "experts": replace(shared["experts"], latent_size=fields.integer("expert_latent_length", None)),
            "kimi_k3": parts,
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = self.config.kimi_k3
        if parts is None or parts.layers_per_block is None:
            return super().make_layer(layer, build)
        modules = self.make_attention(layer, build), self.make_mlp(layer, build), build
        return BlockResidualLayer(self.config, *modules, layer=layer)

    def make_norm(self, build: Build) -> nnx.Module:
        parts = self.config.kimi_k3
        if parts is None or parts.layers_per_block is None:
            return super().make_norm(build)
        count = 1 + parts.num_finished(self.config.num_layers)
        return StreamMix(self.config, count, name="model.output_attn_res", norm="model.norm", build=build)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, state, parts = self.config, self.config.attention[layer].state, self.config.kimi_k3
        size, source = config.hidden_size, f"{LAYER}.self_attn"
        if not isinstance(state, GatedDelta):
            if parts is not None and parts.output_gate:
                sizes, eps = (config.attention[layer], size), config.rms_norm_eps
                return ElementwiseGatedAttention(*sizes, source=source, build=build, eps=eps)
            return super().make_attention(layer, build)
        inputs = self.delta_inputs(state, source)
        return GatedDeltaNet(
            state, size, eps=config.rms_norm_eps, source=source, build=build, inputs=inputs, names=APART
        )

    def delta_inputs(self, state: GatedDelta, source: str) -> list[Source]:
        """Return the sources of q, k and v, of the gates if they are whole, and of beta, in this order. source: name of
        the delta net's module in the checkpoint.
        """
        sizes = {"q_proj": state.key_size, "k_proj": state.key_size, "v_proj": state.value_size}
        if state.whole_gates:
            sizes["g_proj"] = state.value_size
        return [Source(f"{source}.{name}", size) for name, size in {**sizes, "b_proj": state.num_v_heads}.items()]

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        assert self.config.experts is not None
        parts = self.config.kimi_k3
        situ = None if parts is None or parts.situ is None else Situ(*parts.situ)
        if layer in self.config.experts.dense_layers:
            if situ is None:
                return super().make_mlp(layer, build)
            sizes = self.config.hidden_size, self.config.intermediate_size
            return GatedMLP(*sizes, source=f"{LAYER}.mlp", clamped=situ, build=build)
        source, names = self.experts_module
        options: dict[str, Any] = {"router_dtype": "float32", "build": build}
        if situ is not None:
            options["activation"] = situ
        if self.config.experts.latent_size is not None:
            return self._latent_experts(source, names, situ, options)
        limits = self.config.experts.limits
        of_experts, of_mlp = limits[layer] if layer < len(limits) else (None, None)
        if of_experts is not None:
            options["activation"] = ThenClamped(of_experts, ACTIVATIONS[self.config.activation])
        if of_mlp is not None:
            options["shared"] = {"clamped": ThenClamped(of_mlp, ACTIVATIONS[self.config.activation])}
        if situ is not None:
            options["shared"] = {"clamped": situ}
        return MixtureOfExperts(self.config, source=source, names=names, **options)

    def _latent_experts(
        self, source: str, names: ExpertNames, situ: Situ | None, options: dict[str, Any]
    ) -> LatentExperts:
        """Return the experts of a layer that are smaller than the hidden state, with a shared MLP that is not.

        source, names: as in `experts_module`. situ: their activation; None for the model's. options: of
        MixtureOfExperts.
        """
        config, experts, build = self.config, self.config.experts, options["build"]
        assert experts is not None and config.kimi_k3 is not None
        ffn, beside = experts.shared_intermediate_size, f"{source}.{names.shared}"
        own: dict[str, Any] = {"activation": ACTIVATIONS[config.activation], "clamped": situ, "build": build}
        shared = GatedMLP(config.hidden_size, ffn, source=beside, **own) if ffn else None
        latent = f"{source}.routed_expert_down_proj", f"{source}.routed_expert_up_proj"
        norm = f"{source}.routed_expert_norm" if config.kimi_k3.latent_norm else None
        return LatentExperts(config, shared, source=source, names=names, latent=latent, norm=norm, **options)


class ElementwiseGatedAttention(LatentAttention):
    """Latent attention in which each element of the heads' outputs is multiplied by a sigmoid gate."""

    def __init__(self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build, **options: Any):
        super().__init__(attention, hidden_size, source=source, build=build, **options)
        value = self.latent.v_head_dim
        gate = Source(f"{source}.g_proj", attention.num_heads * value, group=value)
        self.gate = Linear(hidden_size, (gate,), axes=("embed", "heads"), build=build)

    def gated(self, o: jax.Array, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N * Hv] multiplied by sigmoid gates, which are projected from x [T, D].
        Computed in float32; returned in the dtype of o.
        """
        return times_gate(o, self.gate(x, step.rows, out_dtype=jnp.float32))


def read_kda(fields: ConfigFields, **own: Any) -> GatedDelta:
    """Return a delta net from `linear_num_heads`, `linear_head_dim` and `linear_conv_kernel_dim` (default: 4). own: its
    further fields. Raises ModelConfigError for wrong fields.
    """
    heads, size = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
    kernel = fields.integer("linear_conv_kernel_dim", 4)
    return GatedDelta(heads, heads, size, size, kernel, by_element=True, **{"rank": size, **own})


def gguf_delta_nets(gguf: GGUFConfig, **own: Any) -> dict[str, Any]:
    """Return `gguf_latent_fields` with DeepSeek-V3's experts, and with delta nets, of heads of `kda.head_dim` elements
    and the kernel `ssm.conv_kernel`, in the layers without KV heads. own: further fields of GatedDelta. Raises
    ModelConfigError for a field that is missing, wrong or not supported.
    """
    fields = gguf.fields
    heads, size = fields.integer("attention.head_count"), fields.integer("kda.head_dim")
    fields.integer("expert_count")  # there is no model without
    experts = gguf_shared_experts(fields, scoring_func="sigmoid", norm_weights=True)
    state = GatedDelta(heads, heads, size, size, fields.integer("ssm.conv_kernel"), by_element=True, **own)
    recurrent = [not each for each in gguf_of_layers(fields, "attention.head_count_kv", minimum=0)]
    return with_states(gguf_latent_fields(gguf, experts=experts), state, recurrent)


def read_parts(fields: ConfigFields) -> KimiK3Parts:
    """Return what the layers have of Kimi K3, whose text_config names this class: blocks of `attn_res_block_size`
    layers, a gate of latent attention's output (`mla_use_output_gate`), SiTU in place of SiLU (`hidden_act` situ, with
    `activation_situ_beta`, 1 by default, and `activation_situ_linear_beta`), and a norm of experts' latents
    (`latent_moe_use_norm`). An absent field means without. Raises ModelConfigError for wrong fields.
    """
    situ = None
    if fields.text("hidden_act", "silu") == "situ":
        situ = fields.number("activation_situ_beta", 1.0), fields.number("activation_situ_linear_beta", None)
    return KimiK3Parts(
        num_layers=fields.integer("num_hidden_layers"),
        layers_per_block=fields.integer("attn_res_block_size", None),
        output_gate=fields.boolean("mla_use_output_gate", False),
        situ=situ,
        latent_norm=fields.boolean("latent_moe_use_norm", False),
    )


def read_lower_bound(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """Return GatedDelta.lower_bound from the field `name`; the default, which may be None for no bound, if it is absent
    or null. Raises ModelConfigError unless it is a number < 0 that is finite in float32.
    """
    bound = fields.value(name, default)
    if bound is None:
        return None
    if type(bound) not in (int, float) or not -MAX_FLOAT <= bound < 0:
        raise fields.fail(name, "a number < 0")
    return float(bound)


def usual_names(fields: ConfigFields) -> ConfigFields:
    """Return a copy of the fields in which those of SPELLED are under DeepSeek-V3's names too, and head_dim, num_heads
    and short_conv_kernel_size of `linear_attn_config` as linear_head_dim, linear_num_heads and linear_conv_kernel_dim.
    Each replaces a field of the new name, also if it is null.

    `mlp_layer_types`, unless absent or null, replaces `first_k_dense_replace` by its number of dense layers. If
    `use_grouped_topk` is false (not absent or null), n_group and topk_group are 1. Absent fields, but not null ones,
    get defaults: first_k_dense_replace 1, max_position_embeddings 2**20, rms_norm_eps 1e-5, routed_scaling_factor
    2.446, n_shared_experts 1. Raises ModelConfigError for a `linear_attn_config` that is no mapping, a
    `use_grouped_topk` that is no boolean, and `mlp_layer_types` that are not dense layers and then sparse ones.
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
    if not ConfigFields(raw).boolean("use_grouped_topk", True):
        raw |= {"n_group": 1, "topk_group": 1}
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

"""Ling 3 (Ant Group 2026), as transformers stores it and as it was published first (BailingMoeV3ForCausalLM): Kimi
Linear's layers, where attention has rope and a gate for each head, and the decays and gates of delta nets are projected
directly from the hidden state.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import MAX_FLOAT, ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_limits
from jaxengine.models.config.readers.hf import FULL, predicting
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.kimi_linear import (
    LINEAR,
    SPELLED,
    KimiLinearForCausalLM,
    gguf_delta_nets,
    mixer_kinds,
    read_lower_bound,
)
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.mla import LatentAttention
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.experts.moe import ExpertNames
from jaxengine.models.layers.states.delta_net import APART, CONVS, JOINED, GatedDeltaNet
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames, NextLayer

_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 6_000_000.0,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
}
_PARTIAL = "partial_rotary_factor"
# Lists of bounds of SwiGLU by layer, of experts and of the shared MLP.
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
# Fields of BailingMoeV3ForCausalLM's files and their only supported values.
_ONLY: dict[str, Any] = {
    "no_kda_lora": True,
    "use_kda_lora": False,
    "use_mla_nope": False,
    "rope_interleave": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "moe_router_enable_expert_bias": True,
    "scale_router_input": False,
    "score_function": "sigmoid",
    "up_proj_norm": False,
    "value_norm": False,
    "use_nGPT": False,
    "use_bias": False,
    "use_qkv_bias": False,
}


def _lower_bound(fields: ConfigFields) -> float | None:
    """Return GatedDelta.lower_bound: `kda_lower_bound`, -5 by default; None if `kda_safe_gate`, true by default, is
    false. Raises ModelConfigError for a bound that is not a finite number below 0, and for a `kda_safe_gate` that is
    not a bool.
    """
    if not fields.boolean("kda_safe_gate", True):
        return None
    return read_lower_bound(fields, "kda_lower_bound", -5.0)


def _limits(fields: ConfigFields) -> tuple[tuple[float | None, float | None], ...]:
    """Return ExpertsConfig.limits, the fields _LIMITS side by side for each layer. An absent list, 0, null and the end
    of a shorter list mean no limit, which is None. Raises ModelConfigError for other values than numbers >= 0 and null.
    """
    limits = []
    for name in _LIMITS:
        listed = fields.value(name, None) or []
        if not isinstance(listed, list) or not all(
            each is None or (type(each) in (int, float) and 0 <= each < MAX_FLOAT) for each in listed
        ):
            raise fields.fail(name, "a list of numbers >= 0, or null")
        limits.append([float(each) if each else None for each in listed])
    return tuple(zip_longest(*limits))


def grouped_kinds(fields: ConfigFields, every: int) -> list[str]:
    """Return the kind of each layer in the published code of Ling 2.5 and 3: of each group of `layer_group_size` layers
    (`every` without the field) the last is FULL and the others LINEAR; layers after the last whole group are FULL.
    Raises ModelConfigError for wrong sizes.
    """
    every, count = fields.integer("layer_group_size", every), fields.integer("num_hidden_layers")
    whole = count - count % every
    return [LINEAR if layer < whole and (layer + 1) % every else FULL for layer in range(count)]


def whole_ropes(fields: ConfigFields) -> ConfigFields:
    """Return the fields without `partial_rotary_factor`, also in ropes: latent attention has a rotated part of its own,
    all of which is rotated. Raises ModelConfigError for a rope that is no mapping.
    """
    raw = {name: value for name, value in fields.raw.items() if name != _PARTIAL}
    for name in ("rope_parameters", "rope_scaling"):
        if (rope := fields.mapping(name)) is not None:
            raw[name] = {key: value for key, value in rope.items() if key != _PARTIAL}
    return ConfigFields(raw)


class GatedLatentAttention(LatentAttention):
    """Latent attention in which each head's output is multiplied by a sigmoid gate, one number per head."""

    def __init__(self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build, **options: Any):
        super().__init__(attention, hidden_size, source=source, build=build, **options)
        gate = (Source(f"{source}.g_proj", attention.num_heads, group=1),)
        self.gate = Linear(hidden_size, gate, axes=("embed", "heads"), build=build)

    def gated(self, o: jax.Array, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N * Hv] multiplied by one sigmoid gate per head, projected from x [T, D].
        Computed in float32; returned in the dtype of o.
        """
        factors = jax.nn.sigmoid(self.gate(x, step.rows).astype(jnp.float32))
        heads = o.astype(jnp.float32).reshape(*factors.shape, -1) * factors[..., None]
        return heads.reshape(o.shape).astype(o.dtype)


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Kimi Linear with gated latent attention that has rope, and delta nets without low ranks."""

    gguf_architecture: ClassVar[str | None] = "bailingmoe3"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.word_embeddings.", "model.embed_tokens."),),
        squeezed=(*CONVS, *JOINED),
        raveled=(".A_log",),
        joined=JOINED,
        parts=(
            (".attention.dense.", ".attention.o_proj."),
            (".self_attn.forget_gate.", ".attention."),
            (".self_attn.", ".attention."),
            (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
        ),
        next_layer=NextLayer(norm="final_layernorm", normed=True),
    )
    experts_module: ClassVar[tuple[str, ExpertNames]] = (
        f"{LAYER}.mlp",
        ExpertNames(correction_bias="gate.expert_bias"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        raw = {**fields.raw, **{usual: fields.raw[own] for own, usual in SPELLED.items() if own in fields.raw}}
        every, count = fields.integer("layer_group_size", 6), fields.integer("num_hidden_layers")
        kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(count)]
        # In transformers' files `head_dim` is the rotated part of a key, and delta nets' sizes have separate names.
        head_dim = fields.integer("linear_head_dim", None) or fields.integer("head_dim", 128)
        kernel = fields.integer("linear_conv_kernel_dim", None) or fields.integer("short_conv_kernel_size", 4)
        fields = ConfigFields(raw).with_defaults(**_DEFAULTS, layer_types=kinds)
        bias = fields.boolean("attention_bias", False)
        shared = gated_fields(fields, read=hf_latent_fields, bias=bias, output_bias=bias)
        heads = fields.integer("linear_num_heads", fields.integer("num_attention_heads"))
        own = {"activation": shared["activation"], "lower_bound": _lower_bound(fields)}
        state = GatedDelta(heads, heads, head_dim, head_dim, kernel, by_element=True, **own)
        layers = zip(shared["attention"], mixer_kinds(fields), strict=True)
        attention = (replace(each, rope=None, state=state) if kind == LINEAR else each for each, kind in layers)
        experts = replace(sigmoid_experts(fields), limits=_limits(fields))
        return predicting(shared) | {"attention": tuple(attention), "experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        fields.require(**{"kda.safe_gate": True})
        shared = gguf_delta_nets(gguf, lower_bound=read_lower_bound(fields, "kda.gate_lower_bound", -5.0))
        return shared | {"experts": replace(shared["experts"], limits=gguf_limits(fields))}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, own, source = self.config, self.config.attention[layer], f"{LAYER}.attention"
        if not isinstance(own.state, GatedDelta):
            return GatedLatentAttention(own, config.hidden_size, source=source, build=build)
        sizes = {"q_proj": own.state.key_size, "k_proj": own.state.key_size, "v_proj": own.state.value_size}
        sizes |= {"g_proj": own.state.value_size, "b_proj": own.state.num_v_heads, "f_proj": own.state.key_size}
        inputs = [Source(f"{source}.{name}", size) for name, size in sizes.items()]
        options: dict[str, Any] = {"eps": config.rms_norm_eps, "source": source, "inputs": inputs, "build": build}
        return GatedDeltaNet(own.state, config.hidden_size, names=APART, **options)


class BailingMoeV3ForCausalLM(BailingHybridForCausalLM):
    """BailingHybridForCausalLM as it was published first: config.json may have the fields of _ONLY, with the values
    there, layers after the last whole group attend, and partial_rotary_factor has no effect.
    """

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(**_ONLY, moe_shared_expert_intermediate_size=fields.integer("moe_intermediate_size"))
        return super().read_hf(ConfigFields({**whole_ropes(fields).raw, "layer_types": grouped_kinds(fields, 6)}))

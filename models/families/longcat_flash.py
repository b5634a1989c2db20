"""LongCat-Flash (Meituan 2025, arXiv:2509.01322): pairs of layers, each with latent attention and a dense MLP. Experts,
some of which return their input, read the first layer's hidden state and are added to the second one's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.families.llama import LAYER, LlamaLayer, gated_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.attention.mla import LatentAttention
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import NormOfFirst, RMSNorm
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, NextLayer
from jaxengine.pallas_kernels.kv.pages import KVPages

# Checkpoints count pairs of layers.
PAIR = "model.layers.{pair}"
NAMES = ExpertNames(router="router.classifier", correction_bias="router.e_score_correction_bias")
DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000_000.0,
}
# Values in published files of fields about attention and experts; the only ones that are supported.
ONLY: dict[str, Any] = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "router_bias": False,
    "zero_expert_type": "identity",
}


class ScaledNorm(nnx.Module):
    """Norm whose result is multiplied by a constant."""

    def __init__(self, norm: RMSNorm, factor: float):
        self.norm, self.factor = norm, factor

    def __call__(self, x: jax.Array) -> jax.Array:
        return scaled(self.norm(x), self.factor)


def _attention(config: ModelConfig, layer: int, source: str, build: Build) -> LatentAttention:
    """Return the attention of layer number `layer`, whose latents are scaled."""
    own, size = config.attention[layer], config.hidden_size
    assert own.latent is not None
    attention: Any = LatentAttention(own, size, source=source, build=build)
    attention.kv_norm = ScaledNorm(attention.kv_norm, (size / own.latent.kv_lora_rank) ** 0.5)
    return attention


def _mlp(config: ModelConfig, source: str, build: Build) -> GatedMLP:
    """Return a dense MLP."""
    sizes, activation = (config.hidden_size, config.intermediate_size), ACTIVATIONS[config.activation]
    return GatedMLP(*sizes, source=source, activation=activation, build=build)


class LongcatFlashLayer(nnx.Module):
    """Layer of a pair. The first layer's experts get the input of its MLP; the second layer adds their output."""

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        """Create the modules of layer number `layer`. Only the first layer of a pair has experts."""
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_first = config.experts is not None and layer not in config.experts.dense_layers
        self.attention = _attention(config, layer, f"{PAIR}.self_attn.{{half}}", build)
        self.input_norm, self.mlp_norm = (
            RMSNorm(size, eps, source=f"{PAIR}.{name}_layernorm.{{half}}", build=build)
            for name in ("input", "post_attention")
        )
        self.mlp = _mlp(config, f"{PAIR}.mlps.{{half}}", build)
        if self.is_first:
            options: dict[str, Any] = {"names": NAMES, "router_dtype": jnp.float32, "build": build}
            self.experts = MixtureOfExperts(config, source=f"{PAIR}.mlp", **options)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Return (x after the layer, pool with this step's keys and values) for x [T, 2 * D]. The first half of x are
        the hidden states, the second the experts' output that the pair's second layer is to add; that is 0 before the
        first layer and after the second.
        """
        x, waiting = jnp.split(x, 2, axis=-1)
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + attended
        normed = self.mlp_norm(x)
        with jax.named_scope("mlp"):
            x = x + self.mlp(normed, step.rows)
        if not self.is_first:
            return jnp.concatenate([x + waiting, jnp.zeros_like(x)], axis=-1), kv
        with jax.named_scope("experts"):
            return jnp.concatenate([x, self.experts(normed, step.rows)], axis=-1), kv


class LongcatFlashForCausalLM(Decoder):
    """Decoder of LongcatFlashLayers, two for each layer in a checkpoint; its next-token layer is a single one."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        next_layer=NextLayer(
            (
                *((f"model.mtp.layers.0.{norm}.m.", f"{norm}.") for norm in ("enorm", "hnorm")),
                ("model.mtp.layers.0.transformer_layer.", ""),
                ("model.mtp.layers.0.", ""),
                ("model.mtp.norm.", "norm."),
            ),
            norm="norm",
            normed=True,
            dense=True,
        )
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(**ONLY)
        count, q_rank = fields.integer("num_layers"), fields.integer("q_lora_rank")
        own = {"num_hidden_layers": 2 * count, "intermediate_size": fields.integer("ffn_hidden_size")}
        bias = fields.boolean("attention_bias", False)
        options = {"read": hf_latent_fields, "bias": bias, "output_bias": bias}
        shared = gated_fields(ConfigFields({**fields.raw, **own}), **options)
        # The model multiplies queries by this root; here it is part of the scale of products instead.
        root = (shared["hidden_size"] / q_rank) ** 0.5
        zeros = 0 if "zero_expert_num" in fields.raw else 256  # null is none
        experts = ExpertsConfig(
            num_experts=fields.integer("n_routed_experts"),
            num_per_token=fields.integer("moe_topk"),
            intermediate_size=fields.integer("expert_ffn_hidden_size"),
            norm_weights=False,
            dense_layers=tuple(range(1, 2 * count, 2)),
            correction_bias=True,
            routed_scaling_factor=fields.number("routed_scaling_factor", 6.0),
            num_zero_experts=fields.integer("zero_expert_num", zeros, minimum=0),
            shortcut=True,
        )
        layers = (replace(each, scale=each.sm_scale * root) for each in shared["attention"])
        # Files do not say that there is a next-token layer.
        return shared | {"attention": tuple(layers), "experts": experts, "num_nextn_predict_layers": 1}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        if config.num_layers % 2 and layer == config.num_layers - 1:  # the next-token layer, after all pairs
            attention = _attention(config, layer, f"{LAYER}.self_attn", build)
            return LlamaLayer(config, attention, _mlp(config, f"{LAYER}.mlp", build), build)
        return LongcatFlashLayer(config, layer, build)

    def make_norm(self, build: Build) -> nnx.Module:
        return NormOfFirst(super().make_norm(build), 2)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] as [T, 2 * D], whose second half, for experts' outputs, is 0."""
        return jnp.concatenate([x, jnp.zeros_like(x)], axis=-1)

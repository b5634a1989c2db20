"""ZAYA (Zyphra 2025): compressed convolutional attention (Figliolia et al. 2025, arXiv:2510.04476), experts whose
routers read the routers of earlier layers, and residuals in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.altup import WideResiduals
from jaxengine.models.config.compressed import QueryKeyConvolutions
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import read_each_layer, ropes_by_kind
from jaxengine.models.families.inkling import HYBRID, HYBRID_SLIDING
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.layers.states.convolved_attention import ConvolvedAttention, States
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults for fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262272,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 2,
    "eos_token_id": 106,
}
_ROPES = {
    HYBRID: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    HYBRID_SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}
_GATE = f"{LAYER}.mlp.gate"


def _vector(name: str, size: int, build: Build, value: float) -> nnx.Param:
    """Return a new parameter [size] that the checkpoint has as `name`. value: that of dummy weights."""
    return declare((size,), build.dtype, ParamDecl((None,), (Source(name, size),), init_value=value))


class Scaled(nnx.Module):
    """Function (x + bias) * scale, computed in float32, with both for each element. names: those of scale and bias."""

    def __init__(self, size: int, names: tuple[str, str], build: Build):
        self.scale, self.bias = (_vector(name, size, build, value) for name, value in zip(names, (1, 0), strict=True))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return (x + bias) * scale of each element, f32[T, D] for x [T, D]."""
        wide = x.astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return wide * self.scale[...].astype(jnp.float32)


class ZayaRouter(nnx.Module):
    """Hidden states of a layer's router: a projection, to which those of the layer before are added, times learned
    factors, and of their norm two further projections, each with GELU.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        assert config.wide_residuals is not None
        size = config.wide_residuals.router_size

        def linear(in_size: int, name: str) -> Linear:
            source = (Source(f"{_GATE}.{name}", size),)
            return Linear(in_size, source, axes=("embed", "latent"), bias=True, build=build)

        self.down = linear(config.hidden_size, "down_proj")
        self.before = _vector(f"{_GATE}.router_states_scale", size, build, 1) if layer else None
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{_GATE}.router_mlp.norm", build=build)
        self.inner = nnx.List([linear(size, f"router_mlp.{name}") for name in ("fc1", "fc2")])

    def __call__(self, x: jax.Array, before: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states [T, R] for the next layer, and what scores are projected from, [T, R].

        The former are a projection of x [T, D] plus the weighted `before` [T, R], those of the layer before, if there
        is one; the latter their norm after layers with GELU.
        """
        state = self.down(x, rows)
        if self.before is not None:
            state = state + (before.astype(jnp.float32) * self.before[...].astype(jnp.float32)).astype(state.dtype)
        y = self.norm(state)
        for linear in self.inner:
            y = gelu(linear(y, rows))
        return state, y


class ZayaExperts(MixtureOfExperts):
    """Mixture of experts whose router may also choose none, which is its last score: a token then gets zeros."""

    def __init__(self, config: ModelConfig, build: Build):
        assert config.wide_residuals is not None
        names = ExpertNames(router="gate.router_mlp.out_proj", correction_bias="gate.balancing_biases")
        size = config.wide_residuals.router_size
        super().__init__(config, source=f"{LAYER}.mlp", names=names, router_size=size, build=build)

    def make_correction_bias(self, source: str, num_experts: int) -> nnx.Param:
        return super().make_correction_bias(source, num_experts + 1)


class ZayaLayer(nnx.Module):
    """Layer of attention, then experts, whose outputs and residuals are scaled before they are added up in float32.

    It passes on a token's hidden state as two numbers for each element, the sum in the model's dtype and what this
    leaves, and the hidden states of its router.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        size, eps, own = config.hidden_size, config.rms_norm_eps, config.attention[layer]
        self.input_norm = RMSNorm(size, eps, source=f"{LAYER}.input_layernorm", build=build)
        self.attention = ConvolvedAttention(own, size, source=f"{LAYER}.self_attn", build=build)
        self.mlp_norm = RMSNorm(size, eps, source=f"{LAYER}.post_attention_layernorm", build=build)
        self.router, self.mlp = ZayaRouter(config, layer, build), ZayaExperts(config, build)

        def scales(part: str) -> nnx.List:
            source = f"{LAYER}.post_{part}_residual_scale"
            names = ((f"{source}.{each}_scale", f"{source}.{each}_bias") for each in ("hidden_states", "residual"))
            return nnx.List([Scaled(size, pair, build) for pair in names])

        self.attention_scales, self.mlp_scales = scales("attention"), scales("mlp")

    def __call__(
        self, x: jax.Array, kv: tuple[KVPages, States], pages: tuple[LayerPages, StateRows], step: StepInputs
    ) -> tuple[jax.Array, tuple[KVPages, States]]:
        """Map x[T, 2 * D + R] to (the same for the next layer, the pool and the states after this step's tokens).

        x is the hidden state, in two parts that are added in float32, and the router's state. Outputs of attention and
        experts and what they are added to are scaled.
        """
        size, dtype = self.input_norm.weight.shape[0], x.dtype
        high, low, before = jnp.split(x, [size, 2 * size], axis=1)
        with jax.named_scope("attention"):
            y, kv = self.attention(self.input_norm(high), kv, pages, step)
            of_output, of_residual = self.attention_scales
            residual = of_output(y) + of_residual(high.astype(jnp.float32) + low.astype(jnp.float32))
        with jax.named_scope("mlp"):
            normed = self.mlp_norm(residual.astype(dtype))
            state, scored = self.router(normed, before, step.rows)
            of_output, of_residual = self.mlp_scales
            residual = of_output(self.mlp(normed, step.rows, scored)) + of_residual(residual)
        return jnp.concatenate([*in_two(residual, dtype), state], axis=1), kv


def in_two(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return x f32[T, D] as the sum of two arrays of `dtype`: x rounded, and what this leaves."""
    high = x.astype(dtype)
    return high, (x - high.astype(jnp.float32)).astype(dtype)


class FirstRMSNorm(RMSNorm):
    """RMSNorm of the first elements, as many as it has weights."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x[:, : self.weight.shape[0]])


class ZayaForCausalLM(Decoder):
    """Decoder of ZayaLayers. Embeddings are scaled like the residuals of layers."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        squeezed=(".conv_qk_depthwise.weight",), flattened=(".conv_qk_grouped.weight",)
    )

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        if self.stage.is_first:
            names = tuple(f"model.input_hidden_states_{part}" for part in ("scale", "bias"))
            self.scaled = Scaled(config.hidden_size, (names[0], names[1]), self.build)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        fields.require(lm_head_bias=False, num_experts_per_tok=1)
        kinds = read_each_layer(fields, "layer_types", (HYBRID, HYBRID_SLIDING))
        kinds = kinds or [HYBRID] * fields.integer("num_hidden_layers")
        window = fields.integer("sliding_window") if HYBRID_SLIDING in kinds else None
        experts = ExpertsConfig(
            num_experts=fields.integer("num_experts", 16),
            num_per_token=1,
            intermediate_size=fields.integer("moe_intermediate_size", 2048),
            norm_weights=False,
            correction_bias=True,
            num_idle=1,
        )
        ropes = fields if fields.mapping("rope_parameters") else ConfigFields({**fields.raw, "rope_parameters": _ROPES})
        bias, head_dim = fields.boolean("attention_bias", False), fields.integer("head_dim")
        shared = gated_fields(
            ConfigFields({**fields.raw, "intermediate_size": experts.intermediate_size}),
            windows=[window if kind == HYBRID_SLIDING else None for kind in kinds],
            ropes=ropes_by_kind(ropes, head_dim, kinds, partial_rotary=True),
            tied=True,
            bias=bias,
            output_bias=bias,
        )
        first = shared["attention"][0]
        state = QueryKeyConvolutions(
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=head_dim,
            kernels=(fields.integer("cca_time0", 2), fields.integer("cca_time1", 2)),
        )
        layers = (replace(each, state=state, beside_state=True) for each in shared["attention"])
        residuals = WideResiduals(fields.integer("router_hidden_size", 256))
        return shared | {"attention": tuple(layers), "experts": experts, "wide_residuals": residuals}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return ZayaLayer(self.config, layer, build)

    def make_norm(self, build: Build) -> nnx.Module:
        return FirstRMSNorm(self.config.hidden_size, self.config.rms_norm_eps, source="model.norm", build=build)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] as [T, 2 * D + R]: scaled by `scaled`, as two numbers for each element,
        and R zeros.
        """
        parts = jnp.concatenate(in_two(self.scaled(x), x.dtype), axis=1)
        return jnp.pad(parts, ((0, 0), (0, self.config.stream_size - parts.shape[1])))

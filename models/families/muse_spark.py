"""Muse Spark (Meta 2026), served as text: Muse Glimmer's layers with learned gates of residuals, and with experts that
work on a smaller state, whose outputs are normed before they are weighted.
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
from jaxengine.models.config.readers.hf import listed_dense, text_fields
from jaxengine.models.families.llama import LAYER
from jaxengine.models.families.muse_glimmer import (
    DEFAULTS,
    MuseAttention,
    MuseGlimmerForConditionalGeneration,
    MuseLayer,
    muse_fields,
)
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import FixedRMSNorm, InputScaledRMSNorm, OffsetRMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.normed import NormedExperts
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames

# transformers' defaults for fields that a file lacks, where they differ from those of Muse Glimmer.
_DEFAULTS: dict[str, Any] = {
    **DEFAULTS,
    "hidden_size": 8192,
    "intermediate_size": 16384,
    "num_hidden_layers": 62,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "max_position_embeddings": 1 << 20,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.1767766952966369,
    "moe_intermediate_size": 4096,
    "moe_hidden_size": 4096,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "residual_gate_temperature": 0.3,
}
_LEAST = 1e-3  # of the square of a residual's factor
_SOURCE = f"{LAYER}.mlp"


class ResidualGate(nnx.Module):
    """Learned sum of the residual x and the output y of a layer's part, a * x + b * y, with factors for each element: b
    = sigmoid(gate / temperature) and a = sqrt(max(1 - b * b, _LEAST)).
    """

    def __init__(self, config: ModelConfig, *, source: str):
        assert config.normed_outputs is not None
        size, temperature = config.hidden_size, config.normed_outputs.gate_temperature
        assert temperature is not None
        gate = ParamDecl((None,), (Source(f"{source}.gate", size),), init_std=0.3)
        self.gate, self.temperature = declare((size,), jnp.float32, gate), temperature

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return a * x + b * y, [T, D], for x and y [T, D], computed in float32, in x's dtype: b is the sigmoid of the
        gate over the temperature, a**2 + b**2 is 1, and a**2 at least _LEAST.
        """
        gate = self.gate[...] / self.temperature
        ours = jax.nn.sigmoid(gate)
        kept = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-gate) * (1.0 + ours), _LEAST))
        return (kept * x.astype(jnp.float32) + ours * y.astype(jnp.float32)).astype(x.dtype)


class PooledExperts(nnx.Module):
    """Experts with a smaller input and output, projected from and to the hidden state, which alone the router sees. The
    projected input has a norm.
    """

    def __init__(self, config: ModelConfig, build: Build):
        assert config.experts is not None
        assert config.experts.latent_size is not None
        size, latent = config.hidden_size, config.experts.latent_size
        assert config.normed_outputs is not None
        self.experts = NormedExperts(
            replace(config, hidden_size=latent),
            source=_SOURCE,
            build=build,
            eps=config.normed_outputs.eps,
            router_size=size,
            router_scale=config.logit_scale,
        )
        into, back = (Source(f"{_SOURCE}.{name}_expert_proj", rows) for name, rows in (("pre", latent), ("post", size)))
        self.into = Linear(size, (into,), axes=("embed", "latent"), build=build)
        self.norm = OffsetRMSNorm(latent, config.rms_norm_eps, source=f"{_SOURCE}.pre_expert_norm", build=build)
        self.back = Linear(latent, (back,), axes=("latent", "embed"), build=build)

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return back(experts(norm(into(x)))), [T, D] -> [T, D]. Padding goes to no expert."""
        return self.back(self.experts(self.norm(self.into(x, rows)), rows, x), rows)


class MuseSparkForConditionalGeneration(MuseGlimmerForConditionalGeneration):
    """Decoder of MuseLayers with ResidualGates and, unless a layer is dense, PooledExperts."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=MuseGlimmerForConditionalGeneration.checkpoint_names.prefixes,
        unused=(*MuseGlimmerForConditionalGeneration.checkpoint_names.tower, "model.audio_tower."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields, optional=True).with_defaults(**_DEFAULTS)
        text.require(num_shared_experts=0)
        if not text.mapping("rope_parameters") and not text.mapping("rope_scaling"):
            text = ConfigFields({**text.raw, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
        shared = muse_fields(text, "hidden_act")
        temperature = text.number("residual_gate_temperature")
        experts = ExpertsConfig(
            num_experts=text.integer("num_local_experts"),
            num_per_token=text.integer("num_experts_per_tok"),
            intermediate_size=text.integer("moe_intermediate_size"),
            dense_layers=listed_dense(text) or (),
            scoring_func="sigmoid",
            correction_bias=True,
            routed_scaling_factor=text.number("routed_scaling_factor", 1.0),
            min_weight_sum=1e-15,
            latent_size=text.integer("moe_hidden_size"),
        )
        outputs = shared["normed_outputs"]._replace(gate_temperature=temperature)
        return shared | {"normed_outputs": outputs, "experts": experts}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        assert config.experts is not None
        if layer in config.experts.dense_layers:
            sizes, activation = (config.hidden_size, config.intermediate_size), ACTIVATIONS[config.activation]
            mlp: Any = GatedMLP(*sizes, source=_SOURCE, activation=activation, build=build)
        else:
            mlp = PooledExperts(config, build)
        gates = [
            ResidualGate(config, source=f"{LAYER}.post_{part}_residual_gate") for part in ("attention", "feedforward")
        ]
        options: dict[str, Any] = {"norms": (FixedRMSNorm, InputScaledRMSNorm), "sums": gates}
        return MuseLayer(config, MuseAttention(config, layer, build), mlp, build, **options)

"""Muse Glimmer (Meta 2026): norms before and after both parts of a layer, norms of queries, keys and embeddings without
weights, gated attention, and windows with rope in three of four layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig, NormedOutputs
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_layers
from jaxengine.models.config.readers.hf import (
    FULL,
    SLIDING,
    read_each_layer,
    read_head_dim,
    read_rope,
    text_fields,
    windows_by_kind,
)
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM, read_cap
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import FixedRMSNorm, NormClass, OffsetRMSNorm, RMSNorm, rms_normalized
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.muse_glimmer import ADAPTER, PROJECTION, TOWER, read_muse_tower
from jaxengine.pallas_kernels.kv.pages import KVPages

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "bos_token_id": 200000,
    "eos_token_id": 200001,
}
_WINDOW, _FULL_EVERY = 2048, 4


class MuseAttention(Attention):
    """Attention with norms of each head of q and k, without weights except in GGUF files, and with a gate of its own
    projection, which has no bias. In models with gates of residuals the heads' outputs have such norms too.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        own, source = config.attention[layer], f"{LAYER}.self_attn"
        size, eps = config.hidden_size, config.rms_norm_eps
        norm = FixedRMSNorm(own.head_dim, eps, source=source, build=build)
        super().__init__(own, size, eps=eps, source=source, build=build, qk_norms=None if own.qk_norm else (norm, norm))
        gate = Source(f"{source}.gate_proj", own.num_heads * own.head_dim, group=own.head_dim)
        self.gate = Linear(size, (gate,), axes=("embed", "heads"), build=build)
        outputs = config.normed_outputs
        self.o_norm = norm if outputs is not None and outputs.gate_temperature is not None else None

    def gated(self, o: jax.Array, gate: jax.Array, x: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N, H], normed if they have a norm, multiplied by the sigmoid of the gate,
        projected from the layer's input x [T, D]. The argument `gate` is not used.
        """
        o = o if self.o_norm is None else self.o_norm(o)
        gate = self.gate(x, step.rows).astype(jnp.float32).reshape(o.shape)
        return (o.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(o.dtype)


class MuseLayer(nnx.Module):
    """Layer that computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    norms: classes of the norms after attention and after the MLP, whose epsilon is that of `config.normed_outputs`.
    sums: modules that add the output y of attention, and that of the MLP, to x: (x, y) -> [T, D]; None for x + y.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: nnx.Module,
        mlp: nnx.Module,
        build: Build,
        *,
        norms: tuple[NormClass, NormClass] = (OffsetRMSNorm, OffsetRMSNorm),
        sums: tuple[nnx.Module, nnx.Module] | tuple[None, None] = (None, None),
    ):
        assert config.normed_outputs is not None
        size, eps, after = config.hidden_size, config.rms_norm_eps, config.normed_outputs.eps
        self.attention, self.mlp = attention, mlp

        def norm(make: NormClass, eps: float, name: str) -> Any:
            return make(size, eps, source=f"{LAYER}.{name}_layernorm", build=build)

        self.input_norm, self.attention_norm = (
            norm(OffsetRMSNorm, eps, "input"),
            norm(norms[0], after, "post_attention"),
        )
        self.mlp_input_norm = norm(OffsetRMSNorm, eps, "pre_feedforward")
        self.mlp_norm = norm(norms[1], after, "post_feedforward")
        self.attention_sum, self.mlp_sum = sums

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            attended = self.attention_norm(attended)
            x = x + attended if self.attention_sum is None else self.attention_sum(x, attended)
        with jax.named_scope("mlp"):
            y = self.mlp_norm(self.mlp(self.mlp_input_norm(x), step.rows))
            return x + y if self.mlp_sum is None else self.mlp_sum(x, y), kv


class MuseGlimmerForConditionalGeneration(Gemma2ForCausalLM):
    """Decoder of MuseLayers with normed embeddings, with scaled and soft-capped logits, and with a tower of images and
    videos, except in checkpoints of the text alone.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.language_model.", "model."), ("language_model.", "model.")),
        tower=(f"{TOWER}.", f"{ADAPTER}.", f"{PROJECTION}."),
    )
    gguf_architecture: ClassVar[str | None] = "muse-glimmer"
    norm_class = RMSNorm

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        # Weights of norms of queries in files are the factor of the products of queries and keys.
        fields, shared = gguf.fields, gguf_fields(gguf, qk_norm=True)
        layer = shared["attention"][0]
        return shared | {
            "attention": gguf_layers(fields, layer, replace(layer, window=None, rope=None), 4),
            "logit_scale": fields.number("logit_scale"),
            "logit_soft_cap": fields.number("final_logit_softcapping", None),
            "normed_outputs": NormedOutputs(DEFAULTS["post_norm_eps"]),
        }

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        sees = "text_config" in fields.raw or fields.value("model_type", None) == "muse_glimmer"
        text = (text_fields(fields, optional=True) if sees else fields).with_defaults(**DEFAULTS)
        shared = muse_fields(text, "hidden_activation")
        return shared | {"tower": read_muse_tower(fields, shared["rms_norm_eps"]) if sees else None}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, activation = self.config, ACTIVATIONS[self.config.activation]
        sizes = config.hidden_size, config.intermediate_size
        mlp = GatedMLP(*sizes, source=f"{LAYER}.mlp", activation=activation, build=build)
        return MuseLayer(config, MuseAttention(config, layer, build), mlp, build)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], with an RMS norm without weights, in their dtype."""
        x = self.embed(token_ids)
        return rms_normalized(x, self.config.rms_norm_eps).astype(x.dtype)


def muse_fields(fields: ConfigFields, activation: str) -> dict[str, Any]:
    """Return the keyword arguments of ModelConfig that Muse models share, from the fields of the text, which must have
    defaults as DEFAULTS has them. activation: name of its field.

    Unless `layer_types` lists them, the last layer and every fourth before it attend to all keys, and the others have a
    window, `sliding_window` (2048 if absent, none if null). Products are scaled by `qk_scale_factor`, logits by
    `output_multiplier` and then capped by `final_logit_softcapping` (20 if absent, none if null); `post_norm_eps` is
    that of norms after a layer's parts. Raises ModelConfigError for wrong fields.
    """
    kinds = read_each_layer(fields, "layer_types", (FULL, SLIDING)) or [
        FULL if is_last else SLIDING for is_last in _last_of_four(fields)
    ]
    window = fields.integer("sliding_window", None if "sliding_window" in fields.raw else _WINDOW)
    bias = fields.boolean("attention_bias", False)
    scale = fields.number("qk_scale_factor") * read_head_dim(fields) ** -0.5
    shared = gated_fields(
        fields,
        windows=windows_by_kind(kinds, window),
        ropes=_ropes(fields),
        named=activation,
        scale=scale,
        bias=bias,
        output_bias=bias,
    )
    return shared | {
        "logit_scale": fields.number("output_multiplier"),
        "logit_soft_cap": read_cap(fields, "final_logit_softcapping", 20.0),
        "normed_outputs": NormedOutputs(fields.number("post_norm_eps")),
    }


def _last_of_four(fields: ConfigFields) -> list[bool]:
    """Return, for each layer, whether it is the last one, or a multiple of four layers before it. Raises
    ModelConfigError for a wrong number of layers.
    """
    count = fields.integer("num_hidden_layers")
    return [(count - 1 - layer) % _FULL_EVERY == 0 for layer in range(count)]


def _ropes(fields: ConfigFields) -> list[Rope | None]:
    """Return the rope of each layer, None where `layer_rope_theta` is 0; without this list, in the last layer and every
    fourth before it.

    Raises ModelConfigError for another list than one with 0 or the rope's own base for each layer.
    """
    rope, name = read_rope(fields, read_head_dim(fields)), "layer_rope_theta"
    bases = read_each_layer(fields, name, (0, rope.theta))
    rotated = [not is_last for is_last in _last_of_four(fields)] if bases is None else map(bool, bases)
    return [rope if each else None for each in rotated]

"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): norms before and after both parts of a layer, windows in every second
layer, soft caps on attention and logits, and a scaled embedding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_layers
from jaxengine.models.config.readers.hf import layer_kinds, windows_by_kind
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS, GELU_TANH
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import OffsetRMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.pallas_kernels.kv.pages import KVPages

# The fields of families whose MLPs have a tanh GELU, unless the file says otherwise.
gelu_fields = partial(gated_fields, named="hidden_activation", default=GELU_TANH)


class Gemma2Layer(nnx.Module):
    """Layer that computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, attention: nnx.Module, build: Build):
        """Create four norms, whose weights are stored as their difference to one, and a gated MLP."""
        size, eps = config.hidden_size, config.rms_norm_eps

        def norm(name: str) -> OffsetRMSNorm:
            return OffsetRMSNorm(size, eps, source=f"{LAYER}.{name}_layernorm", build=build)

        self.input_norm, self.attention_norm = norm("input"), norm("post_attention")
        self.attention = attention
        self.mlp_input_norm, self.mlp_norm = norm("pre_feedforward"), norm("post_feedforward")
        ffn, activation = config.intermediate_size, ACTIVATIONS[config.activation]
        self.mlp = GatedMLP(size, ffn, source=f"{LAYER}.mlp", activation=activation, build=build)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + self.attention_norm(attended)
        with jax.named_scope("mlp"):
            return x + self.mlp_norm(self.mlp(self.mlp_input_norm(x), step.rows)), kv


class Gemma2ForCausalLM(Decoder):
    """Decoder of Gemma2Layers with a scaled embedding and soft-capped logits."""

    gguf_architecture: ClassVar[str | None] = "gemma2"
    norm_class = OffsetRMSNorm

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        window = fields.integer("sliding_window", None if "sliding_window" in fields.raw else 4096)
        fields.require(use_bidirectional_attention=False)
        bias = fields.boolean("attention_bias", False)
        shared = gelu_fields(
            fields,
            windows=windows_by_kind(layer_kinds(fields, full_every=2), window),
            head_dim=256,
            tied=True,
            scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            soft_cap=read_cap(fields, "attn_logit_softcapping", 50.0),
            bias=bias,
            output_bias=bias,
        )
        return shared | {"logit_soft_cap": read_cap(fields, "final_logit_softcapping", 30.0)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        gguf = gguf._replace(metadata={"gemma2.attention.sliding_window": 4096, **gguf.metadata})
        fields = gguf.fields
        soft_cap = fields.number("attn_logit_softcapping", 50.0)
        shared = gguf_fields(gguf, scale=gguf_scale(fields, 46), soft_cap=soft_cap)
        sliding, full = shared["attention"][0], replace(shared["attention"][0], window=None)
        return shared | {
            "attention": gguf_layers(fields, sliding, full, full_every=2),
            "logit_soft_cap": fields.number("final_logit_softcapping", 30.0),
            "activation": GELU_TANH,
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Gemma2Layer(self.config, self.make_attention(layer, build), build)

    make_attention = LlamaForCausalLM.make_attention

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T], multiplied by the root of D in their dtype."""
        x = self.embed(token_ids)
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)


def gguf_scale(fields: ConfigFields, layers_of_27b: int) -> float:
    """Return the scale of products of q and k, query_pre_attn_scalar ** -0.5. GGUF files lack that scalar. As in
    llama.cpp it is taken as hidden_size / heads for the model of 27B parameters, and head_dim (256 if absent) for all
    others.

    layers_of_27b: number of layers by which that model is recognised. Raises ModelConfigError for wrong fields.
    """
    if fields.integer("block_count") != layers_of_27b:
        return fields.integer("attention.key_length", 256) ** -0.5
    return (fields.integer("embedding_length") / fields.integer("attention.head_count")) ** -0.5


def read_cap(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """Return the soft cap in the field `name`: `default` if it is absent, None (no cap) if it is null. Raises
    ModelConfigError for any other value that is not a number > 0.
    """
    return fields.number(name, None if name in fields.raw else default)

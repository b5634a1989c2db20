"""Apertus (Swiss AI Initiative 2025, arXiv:2509.14233): Llama with an RMS norm on each head of q and k, and an MLP
without a gate whose activation, usually xIELU, has two weights in each layer."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, as_array, gguf_fields
from jaxengine.models.config.readers.hf import Activation, hf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, LlamaLayer
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames

BETA, EPS = 0.5, -1e-6
XIELU_NAME = "xielu"  # in configurations
# transformers' default for a file without rope fields.
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


class XIELU(nnx.Module):
    """Activation xIELU (Huang and Schlag 2024, arXiv:2411.13010): a_p x^2 + b x where x > 0, else
    a_n (exp(min(x, EPS)) - 1 - x) + b x.

    a_p is softplus(alpha_p) and a_n is b + softplus(alpha_n), where alpha_p and alpha_n are learned numbers; b is BETA.
    """

    def __init__(self, *, source: str, build: Build):
        def scalar(name: str) -> nnx.Param:
            return declare((1,), build.dtype, ParamDecl((None,), (Source(f"{source}.{name}", 1),), init_std=0.5))

        self.alpha_p, self.alpha_n = scalar("alpha_p"), scalar("alpha_n")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return xIELU of each element of x f32[T, F], computed in float32: a_p x^2 + b x above 0, else a_n (exp(min(x,
        EPS)) - 1 - x) + b x.
        """
        a_p = jax.nn.softplus(self.alpha_p[...].astype(jnp.float32))
        a_n = BETA + jax.nn.softplus(self.alpha_n[...].astype(jnp.float32))
        return BETA * x + jnp.where(x > 0, a_p * x * x, a_n * (jnp.expm1(jnp.minimum(x, EPS)) - x))


class ApertusForCausalLM(LlamaForCausalLM):
    """Llama with q/k norm and XIELU. The text part of Apertus 1.5 may have logits of its first tokens alone."""

    gguf_architecture: ClassVar[str | None] = "apertus"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(constants={".act_fn.beta": BETA, ".act_fn.eps": EPS})

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(rms_norm_eps=1e-5, rope_theta=ROPE["rope_theta"])
        fields.require(post_norm=False, qk_norm=True, mlp_bias=False)
        if not (fields.has("rope_parameters") or fields.has("rope_scaling")):
            fields = ConfigFields({**fields.raw, "rope_parameters": ROPE})
        bias = fields.boolean("attention_bias", False)
        activation = fields.text("hidden_act", XIELU_NAME)
        if activation != XIELU_NAME:
            activation = read_activation(fields)
        named = Activation("hidden_act", (activation,))
        shared = hf_fields(fields, activation=named, qk_norm=True, bias=bias, output_bias=bias)
        scored = fields.integer("output_vocab_size", None)
        if scored is not None and scored > shared["vocab_size"]:
            raise fields.fail("output_vocab_size", f"at most vocab_size, {shared['vocab_size']}")
        return shared | {"scored_tokens": scored, "activation": activation}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        general = ConfigFields(gguf.metadata)
        for name, value in (("xielu.beta", BETA), ("xielu.eps", EPS)):
            listed = as_array(general.value(name))
            if listed.dtype.kind != "f" or not np.allclose(listed, value, rtol=0.01, atol=0):  # of bfloat16
                raise general.fail(name, f"{value} in all layers")
        return gguf_fields(gguf, qk_norm=True) | {"activation": XIELU_NAME}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = self.make_attention(layer, build), self.make_mlp(layer, build)
        return LlamaLayer(self.config, *parts, build, norm_names=("attention_layernorm", "feedforward_layernorm"))

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.mlp"
        if config.activation == XIELU_NAME:
            activation: Any = XIELU(source=f"{source}.act_fn", build=build)
        else:
            activation = ACTIVATIONS[config.activation]
        return MLP(config.hidden_size, config.intermediate_size, source=source, activation=activation, build=build)

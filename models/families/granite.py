"""Granite 3 (IBM 2024, "Granite 3.0 Language Models"): Llama with four multipliers: of embeddings, of attention's
products, of the outputs that layers add, and of logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LlamaForCausalLM, LlamaLayer, gated_fields
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.scale import scaled
from jaxengine.pallas_kernels.kv.pages import KVPages


class ScaledResidualLayer(LlamaLayer):
    """Layer that computes x + r * attention(norm(x)), then x + r * mlp(norm(x)), where r is the configuration's
    residual_multiplier.
    """

    def __init__(self, config: ModelConfig, attention: nnx.Module, mlp: nnx.Module, build: Build):
        super().__init__(config, attention, mlp, build)
        self.multiplier = config.residual_multiplier

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + scaled(attended, self.multiplier)
        with jax.named_scope("mlp"):
            return x + scaled(self.mlp(self.mlp_norm(x), step.rows), self.multiplier), kv


class GraniteForCausalLM(LlamaForCausalLM):
    """Llama of ScaledResidualLayers, with scaled embeddings and logits."""

    gguf_architecture: ClassVar[str | None] = "granite"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias = fields.boolean("attention_bias", False)
        scale = fields.number("attention_multiplier", 1.0)
        shared = gated_fields(fields, bias=bias, output_bias=bias, scale=scale)
        return shared | granite_multipliers(fields) | {"mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return granite_gguf_fields(gguf)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return ScaledResidualLayer(self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build)


def granite_gguf_fields(gguf: GGUFConfig, experts: ExpertsConfig | None = None) -> dict[str, Any]:
    """Return `gguf_fields` with Granite's multipliers, products scaled by `attention.scale`, if present, and these
    experts. Raises ModelConfigError for a field that is missing, wrong or not supported.
    """
    scale = gguf.fields.number("attention.scale", None)
    return with_gguf_multipliers(gguf.fields, gguf_fields(gguf, scale=scale, experts=experts))


def with_gguf_multipliers(fields: ConfigFields, shape: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of ModelConfig, `shape`, with what `granite_multipliers` returns, from `embedding_scale`,
    `residual_scale` and `logit_scale` (logits are divided by it) of a GGUF file, and without rope if its
    `rope.scaling.finetuned` is false. Raises ModelConfigError for values that are not numbers > 0.
    """
    if not fields.boolean("rope.scaling.finetuned", True):
        shape = shape | {"attention": tuple(replace(each, rope=None) for each in shape["attention"])}
    return shape | {
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logit_scale": 1 / fields.number("logit_scale", 1.0),
    }


def granite_multipliers(fields: ConfigFields) -> dict[str, Any]:
    """Return the multipliers outside of attention, as arguments of ModelConfig: embedding_multiplier,
    residual_multiplier, and logit_scale, which is 1 / logits_scaling. Each is 1 if the file lacks it. Raises
    ModelConfigError for values that are not numbers > 0.
    """
    return {
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "logit_scale": 1 / fields.number("logits_scaling", 1.0),
    }

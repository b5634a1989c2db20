"""Command R7B and Command A (Cohere 2, arXiv:2504.00698): attention and MLP in parallel after one norm; windows with
rope in three of four layers, neither in the fourth; scaled logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_layers
from jaxengine.models.config.readers.hf import layer_kinds, read_head_dim, read_rope, windows_by_kind
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.norm import UnbiasedLayerNorm
from jaxengine.pallas_kernels.kv.pages import KVPages

DEFAULTS: dict[str, Any] = {
    "layer_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}


class ParallelLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)) + mlp(norm(x)), one norm for both."""

    def __init__(self, config: ModelConfig, attention: nnx.Module, mlp: nnx.Module, build: Build):
        source = f"{LAYER}.input_layernorm"
        self.norm = UnbiasedLayerNorm(config.hidden_size, config.rms_norm_eps, source=source, build=build)
        self.attention = attention
        self.mlp = mlp

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        normed = self.norm(x)
        with jax.named_scope("attention"):
            attended, kv = self.attention(normed, kv, pages, step)
        with jax.named_scope("mlp"):
            return x + attended + self.mlp(normed, step.rows), kv


class Cohere2ForCausalLM(LlamaForCausalLM):
    """Decoder of ParallelLayers whose rope rotates neighbouring elements."""

    gguf_architecture: ClassVar[str | None] = "cohere2"
    norm_class = UnbiasedLayerNorm

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(
            use_parallel_block=True,
            use_gated_activation=True,
            use_qk_norm=False,
            rotary_pct=1.0,
            position_embedding_type="rope_gptj",
        )
        kinds = layer_kinds(fields, fields.integer("sliding_window_pattern"))
        # If the configuration has no window, no layer has rope.
        windows = windows_by_kind(kinds, fields.integer("sliding_window", None))
        rope = read_rope(fields, read_head_dim(fields), interleaved=True)
        bias = fields.boolean("attention_bias", False)
        shared = gated_fields(
            fields,
            windows=windows,
            ropes=[None if window is None else rope for window in windows],
            tied=True,
            eps="layer_norm_eps",
            bias=bias,
            output_bias=bias,
        )
        return shared | {"logit_scale": fields.number("logit_scale", 0.0625)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        fields.integer("attention.sliding_window")
        shared = gguf_fields(gguf, eps="attention.layer_norm_epsilon", interleaved=True)
        sliding, full = shared["attention"][0], replace(shared["attention"][0], window=None, rope=None)
        return shared | {
            "attention": gguf_layers(fields, sliding, full, full_every=4),
            "logit_scale": fields.number("logit_scale"),
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return ParallelLayer(self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build)

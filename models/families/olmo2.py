"""OLMo 2 (OLMo Team 2025, arXiv:2501.00656): Llama with norms after attention and MLP instead of before them, and one
norm over all heads of q, one over all of k.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs, head_copies
from jaxengine.models.layers.base.norm import HeadsRMSNorm, RMSNorm
from jaxengine.pallas_kernels.kv.pages import KVPages

DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-5}


class PostNormLayer(nnx.Module):
    """Layer that computes x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: ModelConfig, attention: nnx.Module, mlp: nnx.Module, build: Build):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = attention
        self.attention_norm = RMSNorm(size, eps, source=f"{LAYER}.post_attention_layernorm", build=build)
        self.mlp = mlp
        self.mlp_norm = RMSNorm(size, eps, source=f"{LAYER}.post_feedforward_layernorm", build=build)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(x, kv, pages, step)
            x = x + self.attention_norm(attended)
        with jax.named_scope("mlp"):
            return x + self.mlp_norm(self.mlp(x, step.rows)), kv


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Llama of PostNormLayers."""

    gguf_architecture: ClassVar[str | None] = "olmo2"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(clip_qkv=None)
        bias = fields.boolean("attention_bias", False)
        return gated_fields(fields.with_defaults(**DEFAULTS), bias=bias, output_bias=bias)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return PostNormLayer(self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        return normed_attention(self.config, layer, build)


def normed_attention(config: ModelConfig, layer: int, build: Build) -> Attention:
    """Return the attention of layer number `layer`, with one RMS norm over all heads of q and one over all heads of
    k.
    """
    attention, eps, source = config.attention[layer], config.rms_norm_eps, f"{LAYER}.self_attn"
    num_heads, num_kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    copies = head_copies(attention, build.mesh)
    norms = (
        HeadsRMSNorm(num_heads, head_dim, eps, source=f"{source}.q_norm", build=build),
        HeadsRMSNorm(num_kv_heads, head_dim, eps, source=f"{source}.k_norm", copies=copies, build=build),
    )
    return Attention(attention, config.hidden_size, eps=eps, source=source, qk_norms=norms, build=build)

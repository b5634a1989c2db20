"""Command R and Command R+ (Cohere 2024), and Aya 23 (Aryabumi et al. 2024, arXiv:2405.15032): Cohere 2 with rope and
without windows in all layers, and in some models layer norms on the heads of q and k, with separate weights for each
head.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.families.cohere2 import Cohere2ForCausalLM
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.layers.attention.attention import Attention, head_copies
from jaxengine.models.layers.base.norm import rms_normalized
from jaxengine.models.params.declare import ParamDecl, Source, declare


class PerHeadLayerNorm(nnx.Module):
    """Layer norm (x - mean(x)) / sqrt(var(x) + eps) * weight over each head, with weights [heads, H].

    copies: how often each head is stored on a mesh of more devices than heads (see layers.attention).
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, source: str, build: Build, copies: int = 1):
        rows = Source(source, num_heads, repeat=copies).tensor("weight")
        self.weight = declare((rows.num_contributed, head_dim), build.dtype, ParamDecl(("heads", None), (rows,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return each head of x [T, heads of this device, H] normalised by its mean and variance and multiplied by its
        weights. Computed in float32; returned in the dtype of x.
        """
        y = x.astype(jnp.float32)
        y = rms_normalized(y - jnp.mean(y, axis=-1, keepdims=True), self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class CohereForCausalLM(Cohere2ForCausalLM):
    """Cohere 2's decoder in which all layers are alike, with rope and without windows."""

    gguf_architecture: ClassVar[str | None] = "command-r"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(layer_norm_eps=1e-5, rope_theta=500_000.0, bos_token_id=5, eos_token_id=255001)
        rope = read_rope(fields, read_head_dim(fields), interleaved=True)
        bias = fields.boolean("attention_bias", False)
        shared = gated_fields(
            fields,
            ropes=[rope] * fields.integer("num_hidden_layers"),
            tied=True,
            eps="layer_norm_eps",
            bias=bias,
            output_bias=bias,
            qk_norm=fields.boolean("use_qk_norm", False),
        )
        return shared | {"logit_scale": fields.number("logit_scale", 0.0625)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        qk_norm = "attn_q_norm" in gguf.stored
        shared = gguf_fields(gguf, eps="attention.layer_norm_epsilon", interleaved=True, qk_norm=qk_norm)
        return shared | {"logit_scale": gguf.fields.number("logit_scale")}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        attention, eps, source = self.config.attention[layer], self.config.rms_norm_eps, f"{LAYER}.self_attn"
        norms, head_dim = None, attention.head_dim
        if attention.qk_norm:
            copies = head_copies(attention, build.mesh)
            norms = (
                PerHeadLayerNorm(attention.num_heads, head_dim, eps, source=f"{source}.q_norm", build=build),
                PerHeadLayerNorm(
                    attention.num_kv_heads, head_dim, eps, source=f"{source}.k_norm", copies=copies, build=build
                ),
            )
        return Attention(attention, self.config.hidden_size, eps=eps, source=source, qk_norms=norms, build=build)

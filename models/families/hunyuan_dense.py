"""Hunyuan dense (Tencent 2025: 0.5B, 1.8B, 4B and 7B): Llama with an RMS norm on each head of q and k after rope, whose
base is multiplied by a fixed factor.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import read_head_dim
from jaxengine.models.config.rope import stretched_base
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.attention import Attention, StepInputs
from jaxengine.models.layers.base.norm import RMSNorm


class NormAfterRope(Attention):
    """Attention whose RMS norms of each head of q and k, `query_layernorm` and `key_layernorm`, come after rope."""

    def __init__(self, attention: LayerAttention, hidden_size: int, *, eps: float, source: str, build: Build):
        super().__init__(attention, hidden_size, eps=eps, source=source, build=build)
        self.query_norm = RMSNorm(attention.head_dim, eps, source=f"{source}.query_layernorm", build=build)
        self.key_norm = RMSNorm(attention.head_dim, eps, source=f"{source}.key_layernorm", build=build)

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        q, k = super().rotate(q, k, step)
        with jax.named_scope("qk_norm"):
            return self.query_norm(q), self.key_norm(k)


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Llama whose attention is NormAfterRope."""

    gguf_architecture: ClassVar[str | None] = "hunyuan-dense"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(use_qk_norm=True, use_cla=False, mlp_bias=False)
        fields, head_dim = fields.with_defaults(rms_norm_eps=1e-5), fields.integer("attention_head_dim", None)
        bias = fields.boolean("attention_bias", False)
        return gated_fields(with_stretched_base(fields, head_dim), head_dim=head_dim, bias=bias, output_bias=bias)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        alpha, base = gguf.fields.number("rope.scaling.alpha", 1.0), f"{gguf.fields.prefix}rope.freq_base"
        size = gguf.fields.integer("attention.key_length", 0) or 4
        stretched = stretched_base(gguf.fields.number("rope.freq_base", 10000.0), alpha, size)
        return gguf_fields(gguf._replace(metadata={**gguf.metadata, base: stretched}))

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.self_attn"
        eps = config.rms_norm_eps
        return NormAfterRope(config.attention[layer], config.hidden_size, eps=eps, source=source, build=build)


def with_stretched_base(fields: ConfigFields, head_dim: int | None = None) -> ConfigFields:
    """Return the fields with plain rope in place of rope_type "dynamic" with `alpha`; other fields are returned
    unchanged.

    The base becomes `stretched_base` of rope_theta (10000 by default) at any length, for the file's `head_dim`.
    head_dim: that of a file without it; None for hidden_size / num_attention_heads. Raises ModelConfigError for wrong
    fields, and as `stretched_base` does.
    """
    rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
    kind = rope.text("rope_type", None) or rope.text("type", "default")
    if kind != "dynamic" or not rope.has("alpha"):
        return fields
    theta = rope.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    stretched = stretched_base(theta, rope.number("alpha"), read_head_dim(fields, head_dim))
    plain = {"rope_type": "default", "rope_theta": stretched}
    return ConfigFields({**fields.raw, "rope_parameters": plain, "rope_scaling": None})

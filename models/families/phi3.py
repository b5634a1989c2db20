"""Phi-3 and Phi-4 (Abdin et al. 2024, arXiv:2404.14219): Llama whose checkpoints join q, k and v, and gate and up.

Those of 128k tokens and Phi-4-mini have longrope, whose factors an engine chooses once, by its max_model_len.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.params.declare import parts_of


class Phi3ForCausalLM(LlamaForCausalLM):
    """Llama without biases, with joined projections and, in some checkpoints, one sliding window that all layers
    share.
    """

    gguf_architecture: ClassVar[str | None] = "phi3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        rope = ConfigFields(fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {})
        kind = rope.text("rope_type", None) or rope.text("type", "default")
        if kind not in ("default", "longrope", "su", "yarn"):
            raise ModelConfigError(f"rope_type of Phi-3 must be default, longrope, su or yarn, got {kind!r}")
        if kind == "yarn":  # as old files call longrope, also in transformers
            longrope = {**rope.raw, "rope_type": "longrope"}
            fields = ConfigFields({**fields.raw, "rope_parameters": longrope, "rope_scaling": None})
        fields = fields.with_defaults(rms_norm_eps=1e-5, original_max_position_embeddings=4096)
        return gated_fields(fields, windows=fields.integer("sliding_window", None), partial_rotary=True)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, partial_rotary=True)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, attention = self.config, self.config.attention[layer]
        source = f"{LAYER}.self_attn"
        q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        qkv = parts_of(f"{source}.qkv_proj", q_size, kv_size, kv_size)
        size, eps = config.hidden_size, config.rms_norm_eps
        return Attention(attention, size, eps=eps, source=source, qkv=qkv, build=build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        size, ffn, source = self.config.hidden_size, self.config.intermediate_size, f"{LAYER}.mlp"
        parts, activation = parts_of(f"{source}.gate_up_proj", ffn, ffn), ACTIVATIONS[self.config.activation]
        return GatedMLP(size, ffn, source=source, gate_up=parts, activation=activation, build=build)

"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786), with and without a vision tower: Gemma 2 with norms of q and k instead
of soft caps, and windows, with a separate rope, in five of six layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import (
    EMBEDDING_GEMMA,
    GGUFConfig,
    gguf_architecture,
    gguf_fields,
    gguf_layers,
)
from jaxengine.models.config.readers.hf import (
    layer_kinds,
    read_head_dim,
    ropes_by_kind,
    text_fields,
    windows_by_kind,
)
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM, gelu_fields, gguf_scale, read_cap
from jaxengine.models.families.llama import LAYER
from jaxengine.models.families.llava import NAMES
from jaxengine.models.layers.attention.attention import QK_NORMS, Attention
from jaxengine.models.layers.base.activations import GELU_TANH
from jaxengine.models.layers.base.norm import OffsetRMSNorm
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.gemma3 import read_gemma3

# transformers' defaults for fields that a file lacks; published files of the models with a tower lack most of them.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Decoder with Gemma 2's layers and an RMS norm on each head of q and k."""

    gguf_architecture: ClassVar[str | None] = "gemma3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        fields.require(attn_logit_softcapping=None)
        kinds = layer_kinds(fields, fields.integer("sliding_window_pattern"))
        bias = fields.boolean("attention_bias", False)
        is_causal, window = not fields.boolean("use_bidirectional_attention", False), fields.integer("sliding_window")
        shared = gelu_fields(
            fields,
            windows=windows_by_kind(kinds, window if is_causal else window // 2 + 1),  # both sides together
            ropes=ropes_by_kind(fields, read_head_dim(fields), kinds, sliding_theta="rope_local_base_freq"),
            tied=True,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            bias=bias,
            output_bias=bias,
            causal=is_causal,
        )
        return shared | {"logit_soft_cap": read_cap(fields, "final_logit_softcapping", None)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        # Files of the first converters lack it, and llama.cpp then has none.
        window = fields.integer("attention.sliding_window")
        both_ways = gguf_architecture(gguf.metadata) == EMBEDDING_GEMMA
        shared = gguf_fields(gguf, scale=gguf_scale(fields, 62), causal=not both_ways)
        layer = shared["attention"][0]
        if both_ways:
            layer = replace(layer, window=window // 2 + 1)  # both sides together
        local, full = replace(layer, rope=Rope(layer.head_dim, 10_000.0)), replace(layer, window=None)
        return shared | {
            "attention": gguf_layers(fields, local, full, full_every=6),
            "logit_soft_cap": fields.number("final_logit_softcapping", None),
            "activation": GELU_TANH,
        }

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        attention, eps, source = self.config.attention[layer], self.config.rms_norm_eps, f"{LAYER}.self_attn"
        norms = [OffsetRMSNorm(attention.head_dim, eps, source=f"{source}.{name}", build=build) for name in QK_NORMS]
        return Attention(attention, self.config.hidden_size, eps=eps, source=source, qk_norms=norms, build=build)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 with images in the prompt. Tokens of one image attend to each other in both directions."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # A text part alone may be stored under this name.
        tower = read_gemma3(fields) if fields.has("vision_config") else None
        # transformers' class does not cap logits, whatever text_config says.
        return super().read_hf(text_fields(fields)) | {"tower": tower, "logit_soft_cap": None}

"""EXAONE 4 (LG AI Research 2025, arXiv:2507.11407): norms after attention and MLP, RMS norms on each head of q and k,
and in the larger models windows with rope in three of four layers, neither in the fourth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_layers
from jaxengine.models.config.readers.hf import (
    SLIDING,
    layer_kinds,
    read_head_dim,
    read_rope,
    text_of_type,
    windows_by_kind,
)
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields
from jaxengine.models.families.olmo2 import PostNormLayer
from jaxengine.models.families.qwen2_vl import QWEN_NAMES
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.exaone4_5 import read_exaone4_5


class Exaone4ForCausalLM(LlamaForCausalLM):
    """Llama of PostNormLayers with q/k norm. If the model has windows, layers without one have no rope."""

    gguf_architecture: ClassVar[str | None] = "exaone4"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(sliding_window=4096, rms_norm_eps=1e-5)
        rope, window = read_rope(fields, read_head_dim(fields)), fields.integer("sliding_window", None)
        if window is None:
            return gated_fields(fields, qk_norm=True)
        listed = fields.has("layer_types")  # then a pattern, such as "LLLG", says the same
        kinds = layer_kinds(fields) if listed else layer_kinds(fields, fields.integer("sliding_window_pattern", 4))
        ropes = [rope if kind == SLIDING else None for kind in kinds]
        return gated_fields(fields, windows=windows_by_kind(kinds, window), ropes=ropes, qk_norm=True)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        shared = gguf_fields(gguf, qk_norm=True)
        if not gguf.fields.has("attention.sliding_window"):
            return shared
        sliding, full = shared["attention"][0], replace(shared["attention"][0], window=None, rope=None)
        return shared | {"attention": gguf_layers(gguf.fields, sliding, full, full_every=4)}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return PostNormLayer(self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build)


class Exaone4_5_ForConditionalGeneration(Exaone4ForCausalLM):
    """EXAONE 4.5 (LG AI Research 2026): EXAONE 4 with a vision tower, whose embeddings have the positions of tokens."""

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text, vision = text_of_type(fields, "exaone4", "exaone4_5_text"), fields.mapping("vision_config")
        if vision is None:
            raise fields.fail("vision_config", "a mapping")
        shared = super().read_hf(text)
        return shared | {"tower": read_exaone4_5(ConfigFields(vision), shared["hidden_size"])}

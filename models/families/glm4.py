"""GLM-4-0414 and GLM-Z1 (Z.ai 2025): GLM-4 with norms after both parts of a layer, too."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, as_array, gguf_fields
from jaxengine.models.families.glm import GlmForCausalLM
from jaxengine.models.families.llama import LAYER, LlamaLayer
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.pallas_kernels.kv.pages import KVPages


class Glm4Layer(LlamaLayer):
    """Layer that computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, attention: nnx.Module, mlp: nnx.Module, build: Build):
        super().__init__(config, attention, mlp, build)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attended_norm = RMSNorm(size, eps, source=f"{LAYER}.post_self_attn_layernorm", build=build)
        self.output_norm = RMSNorm(size, eps, source=f"{LAYER}.post_mlp_layernorm", build=build)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + self.attended_norm(attended)
        with jax.named_scope("mlp"):
            return x + self.output_norm(self.mlp(self.mlp_norm(x), step.rows)), kv


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM decoder of Glm4Layers."""

    gguf_architecture: ClassVar[str | None] = "glm4"

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        # With sections for three positions, those of GLM-4.1V and GLM-OCR, rows are in the order of halves.
        sections = np.any(as_array(gguf.fields.value("rope.dimension_sections", 0)))
        return gguf_fields(gguf, partial_rotary=True, interleaved=not sections, bias=True)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Glm4Layer(self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build)

"""Gemma (Gemma Team 2024, arXiv:2403.08295): Llama with a scaled embedding, a tanh GELU, and norms stored as their
difference to one."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM
from jaxengine.models.families.llama import LAYER, LlamaLayer, gated_fields
from jaxengine.models.layers.base.activations import ACTIVATIONS, GELU_TANH
from jaxengine.models.layers.base.mlp import GatedMLP


class GemmaForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 with Llama's layer, and without windows and caps."""

    gguf_architecture: ClassVar[str | None] = "gemma"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(use_bidirectional_attention=False, hidden_activation="gelu_pytorch_tanh")
        bias = fields.boolean("attention_bias", False)
        # Files of the first release have "gelu", by which they mean its tanh form.
        if fields.text("hidden_act", "gelu") == "gelu":
            fields = ConfigFields({**fields.raw, "hidden_act": GELU_TANH})
        return gated_fields(fields, head_dim=256, tied=True, bias=bias, output_bias=bias)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf) | {"activation": GELU_TANH}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        sizes = self.config.hidden_size, self.config.intermediate_size
        mlp = GatedMLP(*sizes, source=f"{LAYER}.mlp", activation=ACTIVATIONS[self.config.activation], build=build)
        return LlamaLayer(self.config, self.make_attention(layer, build), mlp, build, norm_class=self.norm_class)

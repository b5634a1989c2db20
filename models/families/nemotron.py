"""Nemotron 4 and Minitron (Parmar et al. 2024, arXiv:2402.16819; Muralidharan et al. 2024, arXiv:2407.14679): layer
norms whose weights are stored as their difference to one, a squared ReLU without a gate, half of each head rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.layers.base.norm import OffsetLayerNorm

_ACTIVATION = "relu2"


class NemotronForCausalLM(LlamaForCausalLM):
    """Llama's layer with layer norms and an MLP without a gate."""

    gguf_architecture: ClassVar[str | None] = "nemotron"
    norm_class = OffsetLayerNorm

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(partial_rotary_factor=0.5, norm_eps=1e-5)
        bias = fields.boolean("attention_bias", False)
        shared = gated_fields(
            fields,
            default=_ACTIVATION,
            partial_rotary=True,
            eps="norm_eps",
            bias=bias,
            output_bias=bias,
        )
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        shared = gguf_fields(gguf, eps="attention.layer_norm_epsilon", partial_rotary=True)
        return shared | {"activation": _ACTIVATION}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.mlp"
        size, ffn = config.hidden_size, config.intermediate_size
        return MLP(
            size, ffn, source=source, activation=ACTIVATIONS[config.activation], bias=config.mlp_bias, build=build
        )

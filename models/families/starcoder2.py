"""StarCoder 2 (Lozhkov et al. 2024, arXiv:2402.19173): layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.base.activations import ACTIVATIONS, GELU_TANH
from jaxengine.models.layers.base.mlp import MLP
from jaxengine.models.layers.base.norm import LayerNorm


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """Llama's layer with layer norms, and at most one sliding window, which all layers share."""

    gguf_architecture: ClassVar[str | None] = "starcoder2"
    norm_class = LayerNorm

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(norm_epsilon=1e-5)
        fields.require(norm_type="layer_norm", mlp_type="default")
        bias = fields.boolean("use_bias", True)
        shared = gated_fields(
            fields,
            windows=fields.integer("sliding_window", None),
            default=GELU_TANH,
            tied=True,
            eps="norm_epsilon",
            bias=bias,
            output_bias=bias,
        )
        return shared | {"mlp_bias": bias}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        """Return keyword arguments of ModelConfig, with all biases unless the file's tensors say otherwise,
        and without a sliding window, as in llama.cpp. Raises ModelConfigError for wrong fields.
        """
        shared = gguf_fields(gguf, eps="attention.layer_norm_epsilon", bias=True, output_bias=True)
        return shared | {"mlp_bias": True, "activation": GELU_TANH}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.mlp"
        size, ffn = config.hidden_size, config.intermediate_size
        names, activation = {"up": "c_fc", "down": "c_proj"}, ACTIVATIONS[config.activation]
        return MLP(size, ffn, source=source, activation=activation, bias=config.mlp_bias, build=build, **names)

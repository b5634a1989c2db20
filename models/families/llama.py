"""Llama and models of its structure (Llama 2/3, SmolLM2, Mistral). Other families subclass it and override what
differs.

Pre-norm, rope, grouped-query attention, gated MLP (Touvron et al. 2023, arXiv:2302.13971).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import Activation, hf_fields
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.base.activations import ACTIVATIONS, SILU
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import NormClass, RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.pre_norm import PreNormLayer

LAYER = "model.layers.{layer}"


def gated_fields(
    fields: ConfigFields,
    *,
    named: str = "hidden_act",
    default: str = SILU,
    read: Callable[..., dict[str, Any]] = hf_fields,
    **options: Any,
) -> dict[str, Any]:
    """Return `hf_fields`, or what `read` returns, of a family whose MLPs and experts have any of ACTIVATIONS, with that
    activation as a further argument of ModelConfig.

    named: name of its field. default: activation of a file without it. options: those of `read`. Raises
    ModelConfigError for wrong fields.
    """
    found = fields.text(named, default)
    allowed = Activation(named, (default, *(name for name in ACTIVATIONS if name != default)))
    return read(fields, activation=allowed, **options) | {"activation": SILU if found == "swish" else found}


class LlamaLayer(PreNormLayer):
    """PreNormLayer with the given attention, MLP and class of norms. norm_names: checkpoint names of the two norms."""

    def __init__(
        self,
        config: ModelConfig,
        attention: nnx.Module,
        mlp: nnx.Module,
        build: Build,
        *,
        norm_class: NormClass = RMSNorm,
        norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        input_norm, mlp_norm = (norm_class(size, eps, source=f"{LAYER}.{name}", build=build) for name in norm_names)
        super().__init__(input_norm, attention, mlp_norm, mlp)


class LlamaForCausalLM(Decoder):
    """Decoder-only transformer: pre-norm, rope, grouped-query attention, gated MLP."""

    gguf_architecture: ClassVar[str | None] = "llama"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias = fields.boolean("attention_bias", False)
        shared = gated_fields(fields, bias=bias, output_bias=bias)
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False)}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        parts = self.make_attention(layer, build), self.make_mlp(layer, build)
        return LlamaLayer(self.config, *parts, build, norm_class=self.norm_class)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        source, eps = f"{LAYER}.self_attn", config.rms_norm_eps
        return Attention(config.attention[layer], config.hidden_size, eps=eps, source=source, build=build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        """Return the feed-forward part of layer number `layer`, ([T, D], Rows) -> [T, D]: here a gated MLP."""
        config = self.config
        sizes = config.hidden_size, config.intermediate_size
        options = {"bias": config.mlp_bias, "activation": ACTIVATIONS[config.activation]}
        return GatedMLP(*sizes, source=f"{LAYER}.mlp", build=build, **options)

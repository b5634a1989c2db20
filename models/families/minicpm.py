"""MiniCPM and MiniCPM 4, dense (Hu et al. 2024, arXiv:2404.06395): Granite's multipliers, given by widths and depth."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.families.granite import GraniteForCausalLM
from jaxengine.models.families.llama import gated_fields


class MiniCPMForCausalLM(GraniteForCausalLM):
    """Granite whose residual multiplier decreases with the number of layers and whose logit scale with the width."""

    gguf_architecture: ClassVar[str | None] = "minicpm"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        if fields.has("sparse_config"):
            raise fields.fail("sparse_config", "null or absent: attention to blocks is not supported")
        if fields.integer("num_experts", 0, minimum=0):
            raise fields.fail("num_experts", "0 or absent: MiniCPM-MoE is not supported")
        bias = fields.boolean("attention_bias", False)
        return gated_fields(fields, tied=True, bias=bias, output_bias=bias) | multipliers(fields)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        for name in ("embedding_scale", "residual_scale", "logit_scale"):
            gguf.fields.number(name)  # files of old converters lack them
        return super().read_gguf(gguf)


def multipliers(fields: ConfigFields) -> dict[str, float]:
    """Return, as arguments of ModelConfig, the multipliers of embeddings (scale_emb), of layers' outputs (scale_depth /
    the root of the number of layers) and of logits (dim_model_base / hidden_size). MiniCPM's fields are 1 by default.
    Raises ModelConfigError for wrong fields.
    """
    num_layers, hidden_size = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    return {
        "embedding_multiplier": fields.number("scale_emb", 1.0),
        "residual_multiplier": fields.number("scale_depth", 1.0) / num_layers**0.5,
        "logit_scale": fields.number("dim_model_base", 1.0) / hidden_size,
    }

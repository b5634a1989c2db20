"""InternLM 3 (Shanghai AI Laboratory 2025): Llama with a separate head dimension and other names of the fields for
biases.
"""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields


class InternLM3ForCausalLM(LlamaForCausalLM):
    """Llama in which `qkv_bias` decides about biases of q, k and v, and `bias` about those of all other projections."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias, fields = fields.boolean("bias", False), fields.with_defaults(rms_norm_eps=1e-5)
        shared = gated_fields(fields, head_dim=128, bias=fields.boolean("qkv_bias", False), output_bias=bias)
        return shared | {"mlp_bias": bias}

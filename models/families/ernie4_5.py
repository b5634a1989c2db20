"""ERNIE 4.5 dense (Baidu 2025, "ERNIE 4.5 Technical Report"): Llama with rope over neighbouring elements, and one
switch for all biases.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields

HEAD_DIM = 128


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """Llama whose rope rotates neighbouring elements."""

    gguf_architecture: ClassVar[str | None] = "ernie4_5"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(compression_ratio=1.0)
        fields = fields.with_defaults(rope_theta=500000.0, rms_norm_eps=1e-5)
        rope = read_rope(fields, read_head_dim(fields, HEAD_DIM), interleaved=True)
        bias = fields.boolean("use_bias", False)
        ropes = (rope,) * fields.integer("num_hidden_layers")
        shared = gated_fields(fields, head_dim=HEAD_DIM, ropes=ropes, tied=True, bias=bias, output_bias=bias)
        return shared | {"mlp_bias": bias}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf, interleaved=True)

"""GLM-4 as GlmForCausalLM (Team GLM 2024, arXiv:2406.12793): Llama with biases on q, k and v, rope over neighbouring
elements of half of each head, and joined gate and up projections.
"""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields
from jaxengine.models.families.phi3 import Phi3ForCausalLM

HEAD_DIM = 128
EOS = [151329, 151336, 151338]


class GlmForCausalLM(LlamaForCausalLM):
    """Llama with a bias on q, k and v only, and joined gate and up projections."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(partial_rotary_factor=0.5, rms_norm_eps=1.5625e-07, eos_token_id=EOS)
        rope = read_rope(fields, read_head_dim(fields, HEAD_DIM), partial_rotary=True, interleaved=True)
        bias = fields.boolean("attention_bias", True)
        ropes = (rope,) * fields.integer("num_hidden_layers")
        return gated_fields(fields, head_dim=HEAD_DIM, ropes=ropes, bias=bias)

    make_mlp = Phi3ForCausalLM.make_mlp

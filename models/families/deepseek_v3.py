"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv:2412.19437), Kimi K2 and Moonlight: DeepSeek-V2 with experts picked by
sigmoid scores and a learned correction. Multi-token-prediction (MTP) layers make drafts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import DEEPSEEK_V3, GGUFConfig, gguf_shared_experts
from jaxengine.models.config.readers.hf import predicting
from jaxengine.models.config.readers.latent import gguf_latent_fields, hf_latent_fields
from jaxengine.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.llama import gated_fields

# transformers' defaults for fields that a file lacks.
DEFAULTS = {
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Llama with latent attention, and experts that are chosen by corrected sigmoid scores, in some checkpoints within
    groups.
    """

    gguf_architecture: ClassVar[str | None] = DEEPSEEK_V3

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(moe_layer_freq=1)
        fields = fields.with_defaults(**DEFAULTS)
        bias = fields.boolean("attention_bias", False)
        interleaved = fields.boolean("rope_interleave", True, null_is_false=True)
        options: dict[str, Any] = {"interleaved": interleaved, "bias": bias, "output_bias": bias}
        shared = gated_fields(fields, read=hf_latent_fields, **options)
        return predicting(shared) | {"experts": sigmoid_experts(fields)}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_latent_fields(gguf, experts=gguf_shared_experts(gguf.fields, scoring_func="sigmoid"))

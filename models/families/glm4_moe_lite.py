"""GLM-4.7-Flash: DeepSeek-V3 with a list of the layers that have experts."""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3, by default with one dense layer."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        defaults = {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8}
        return super().read_hf(fields.with_defaults(**defaults, q_lora_rank=768, n_group=1, topk_group=1))

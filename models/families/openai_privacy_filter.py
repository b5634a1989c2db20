"""OpenAI's privacy filter (2026): gpt-oss whose tokens see a window on both sides in every layer, with rope of
neighbouring elements, and scores of labels for each token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import CLS
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.families.gpt_oss import GptOssForCausalLM
from jaxengine.models.params.source import CheckpointNames, StackedExperts

# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 640,
    "intermediate_size": 640,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_theta": 150_000.0,
    "eos_token_id": 199999,
}
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class OpenAIPrivacyFilterModel(GptOssForCausalLM):
    """gpt-oss without a causal mask. Its checkpoints store gates before ups instead of alternating with them."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        stacked_experts=StackedExperts(out_first=False), heads=("lm_head.", "score.")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**DEFAULTS)
        if (stored := fields.mapping("quantization_config")) and stored.get("quant_method") == "mxfp4":
            raise fields.fail("quantization_config", "another method than mxfp4, which interleaves gates and ups")
        if not (fields.mapping("rope_parameters") or fields.mapping("rope_scaling")):
            fields = ConfigFields({**fields.raw, "rope_parameters": _ROPE})
        rope, window = read_rope(fields, read_head_dim(fields), interleaved=True), fields.integer("sliding_window") + 1
        shared = super().read_hf(fields)
        layers = (replace(each, rope=rope, window=window, causal=False) for each in shared["attention"])
        return shared | {"attention": tuple(layers)}

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        return CLS

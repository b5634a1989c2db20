"""PaddleOCR-VL (Cui et al. 2025, arXiv:2510.14528): ERNIE 4.5's layers with M-RoPE (rotation by positions in time,
height and width), over halves of a head, and a vision tower for images of any shape.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.ernie4_5 import HEAD_DIM
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields
from jaxengine.models.families.qwen2_vl import with_sight, without_mrope
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.paddleocr_vl import PROJECTOR, read_paddleocr_vl

_VISUAL = "visual"


class PaddleOCRVLForConditionalGeneration(LlamaForCausalLM):
    """Llama with one switch for all biases, M-RoPE and a vision tower."""

    # Names in the published files, and in transformers 5.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            (f"model.{_VISUAL}.", f"{_VISUAL}."),
            ("model.projector.", f"{PROJECTOR}."),
            ("model.language_model.", "model."),
        ),
        tower=(f"{_VISUAL}.", f"{PROJECTOR}."),
        flattened=(".patch_embedding.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(tie_word_embeddings=True)
        # In the published file the text's fields are not nested.
        text = text_fields(fields) if fields.has("text_config") else fields
        text.require(compression_ratio=1.0)
        text = without_mrope(text.with_defaults(rope_theta=500000.0, rms_norm_eps=1e-5))
        bias = text.boolean("use_bias", False)
        shared = gated_fields(text, head_dim=HEAD_DIM, bias=bias, output_bias=bias) | {"mlp_bias": bias}
        return with_sight(shared, text, fields, read_paddleocr_vl)

"""Qianfan-OCR (Baidu 2026): Qwen3 with InternVL's vision tower, for documents."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.internvl import InternVLForConditionalGeneration
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.internvl import read_internvl
from jaxengine.models.vision.llava import TOWER

_NAMES = InternVLForConditionalGeneration.checkpoint_names


class QianfanOCRForConditionalGeneration(InternVLForConditionalGeneration):
    """Qwen3 with a vision tower over image tiles; its files have the tensor names of the first InternVL checkpoints."""

    text: ClassVar[str] = "qwen3"
    checkpoint_names: ClassVar[CheckpointNames] = _NAMES._replace(
        prefixes=(
            (f"model.{TOWER}.layers.", f"{TOWER}.encoder.layer."),
            ("vision_model.layernorm.", f"{TOWER}.layernorm."),
            ("vision_model.embeddings.mask_token", f"{TOWER}.embeddings.mask_token"),
            # transformers also renames the text's layers so when it writes the tower's original names.
            ("language_model.model.encoder.layers.", "model.layers."),
            *_NAMES.prefixes,
        ),
        divided={".attention.qkv": tuple(f".attention.{part}_proj" for part in "qkv")},
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        vision = {"attention_bias": True, **(fields.mapping("vision_config") or {})}
        fields = ConfigFields({**fields.with_defaults(tie_word_embeddings=False).raw, "vision_config": vision})
        return cls.read_text(fields) | {"tower": read_internvl(fields, joined_qkv=True)}

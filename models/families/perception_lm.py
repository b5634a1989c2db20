"""PerceptionLM (Cho et al. 2025, arXiv:2504.13180): Llama with the Perception Encoder over an image as a whole and in
tiles, and over frames of videos.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llava import NAMES, LlavaForConditionalGeneration
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import TOWER
from jaxengine.models.vision.perception_encoder import read_perception_encoder


class PerceptionLMForConditionalGeneration(LlavaForConditionalGeneration):
    """Llama, or a model with its layers, with timm's Perception Encoder."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=((f"model.{TOWER}.timm_model.", f"{TOWER}."), *NAMES.prefixes),
        flattened=tuple(f"{TOWER}.{name}" for name in ("patch_embed.proj.weight", "cls_token", "pos_embed")),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = cls.read_text(fields)
        # Unlike in most classes of transformers, that of the file goes before that of text_config.
        tied = fields.boolean("tie_word_embeddings", shared["tie_word_embeddings"])
        return shared | {"tie_word_embeddings": tied, "tower": read_perception_encoder(fields)}

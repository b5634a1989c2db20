"""Ovis2 (AIDC 2025), as transformers stores it: Qwen 2.5 with a vision tower that gives means of visual words."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llava import NAMES, LlavaForConditionalGeneration, read_text
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import TOWER
from jaxengine.models.vision.ovis2 import WORDS, read_ovis2


class Ovis2ForConditionalGeneration(LlavaForConditionalGeneration):
    """Qwen 2.5, or another model with Llama's layers, with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(*NAMES.prefixes, (f"model.{WORDS}.", f"{WORDS}.")), tower=(f"{TOWER}.", f"{WORDS}.")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(tie_word_embeddings=True)
        return read_text(fields, "qwen2") | {"tower": read_ovis2(fields)}

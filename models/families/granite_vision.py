"""Granite Vision 3 (IBM 2025, arXiv:2502.09927): Granite with LLaVA-NeXT's vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.granite import DEFAULTS, GraniteForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import read_llava_next


class GraniteVisionForConditionalGeneration(GraniteForCausalLM):
    """Granite with a vision tower over images and their tiles, whose embeddings are multiplied as those of tokens are.
    Its files have the class name LlavaNextForConditionalGeneration.
    """

    gguf_architecture: ClassVar[str | None] = None  # its GGUF files are those of the text part
    checkpoint_names: ClassVar[CheckpointNames] = NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(text_fields(fields).with_defaults(**DEFAULTS))
        return shared | {"tower": replace(read_llava_next(fields), multiplier=shared["embedding_multiplier"])}

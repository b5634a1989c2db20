"""Idefics2 (Laurençon et al. 2024, arXiv:2405.02246): Mistral with a vision tower that gives each image, and each
quarter of one, the same number of embeddings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.idefics2 import CONNECTOR, TOWER, read_idefics2


class Idefics2ForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Mistral, or another model with Llama's layers, with a vision tower."""

    text: ClassVar[str] = "mistral"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.text_model.", "model."),
            *((f"model.{part}.", f"{part}.") for part in (TOWER, CONNECTOR)),
        ),
        tower=(f"{TOWER}.", f"{CONNECTOR}."),
        flattened=FLATTENED,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        return cls.read_text(fields) | {"tower": read_idefics2(fields, text)}

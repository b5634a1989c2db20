"""Idefics3 (Laurençon et al. 2024, arXiv:2408.12637) and SmolVLM (Marafioti et al. 2025, arXiv:2504.05299): Llama with
a vision tower that encodes images in tiles.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.idefics3 import CONNECTOR, TOWER, read_idefics3


class Idefics3ForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Llama with a vision tower over image tiles."""

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
        return cls.read_text(fields) | {"tower": read_idefics3(fields)}


class SmolVLMForConditionalGeneration(Idefics3ForConditionalGeneration):
    """Idefics3 by another name."""

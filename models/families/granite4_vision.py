"""Granite 4 Vision (IBM 2026): Granite with a vision tower, whose embeddings come in parts, each for another layer."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.granite import GraniteForCausalLM
from jaxengine.models.families.llava import FLATTENED, NAMES
from jaxengine.models.families.wrapped import of_kind
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.granite4_vision import LAYERWISE, SPATIAL, read_granite4_vision

_PROJECTORS = (f"{LAYERWISE}.", f"{SPATIAL}.")


class Granite4VisionForConditionalGeneration(GraniteForCausalLM):
    """Granite with a vision tower over images and their tiles. Embeddings of images are not multiplied."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(*NAMES.prefixes, *((f"model.{part}", part) for part in _PROJECTORS)),
        tower=(*NAMES.tower, *_PROJECTORS),
        flattened=(*FLATTENED, ".query", ".image_positions"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, "granite", "granite4_vision_text")
        shared = super().read_hf(of_kind(text, "granite"))
        return shared | {"tower": read_granite4_vision(fields, len(shared["attention"]))}

"""dots.ocr (rednote hi lab 2025, arXiv:2512.02498): Qwen2 with a vision tower for images of any shape."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.dots_ocr import TOWER, read_dots_ocr


class DotsOCRForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        tower=(f"{TOWER}.",), flattened=(".patchifier.proj.weight",)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(fields)
        return shared | {"tower": read_dots_ocr(fields, shared["hidden_size"])}

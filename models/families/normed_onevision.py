"""R-4B (Yang et al. 2025, arXiv:2508.21113) and Bee-8B (Zhang et al. 2025, arXiv:2510.13795): Qwen3 with
LLaVA-OneVision's vision tower, whose states a norm precedes the projector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llava import NAMES, LlavaForConditionalGeneration
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import PROJECTOR
from jaxengine.models.vision.llava_onevision import read_llava_onevision

_EPS = 1e-6  # in the model's code
_NORM = f"{PROJECTOR}.projector_layernorm."


class RForConditionalGeneration(LlavaForConditionalGeneration):
    """Qwen3 with a vision tower over images in tiles.

    Attributes:
      projector_factor: outputs of the projector's first product, in multiples of the hidden size.
    """

    text: ClassVar[str] = "qwen3"
    projector_factor: ClassVar[int] = 1
    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(*((start + f"{PROJECTOR}.pre_norm.", _NORM) for start in ("model.", "")), *NAMES.prefixes)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(multimodal_projector_bias=True)
        fields.require(projector_hidden_act="gelu", multimodal_projector_bias=True)
        shared = cls.read_text(fields)
        size = cls.projector_factor * shared["hidden_size"]
        tower = replace(read_llava_onevision(fields), norm_eps=_EPS, projector_size=size)
        return shared | {"tower": tower}


class BeeForConditionalGeneration(RForConditionalGeneration):
    """R-4B with a wider projector."""

    projector_factor: ClassVar[int] = 4

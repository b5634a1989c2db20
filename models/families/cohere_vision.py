"""Aya Vision (Dash et al. 2025, arXiv:2505.08751) and Command A Vision (Cohere 2025): Cohere's models with a vision
tower that encodes images in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.families.cohere2 import Cohere2ForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.aya import read_aya, read_cohere2_vision

# transformers' classes do not scale logits, whatever text_config says.
_UNSCALED = {"logit_scale": 1.0}


class AyaVisionForConditionalGeneration(Wrapper, Cohere2ForCausalLM):
    """Cohere, Cohere 2 or another text model with a vision tower."""

    text: ClassVar[str] = "cohere2"
    checkpoint_names: ClassVar[CheckpointNames] = NAMES
    read_tower: ClassVar[Callable[[ConfigFields], TowerConfig]] = staticmethod(read_aya)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(fields) | _UNSCALED | {"tower": cls.read_tower(fields)}


class Cohere2VisionForConditionalGeneration(AyaVisionForConditionalGeneration):
    """Command A Vision: Aya Vision with another tower."""

    read_tower: ClassVar[Callable[[ConfigFields], TowerConfig]] = staticmethod(read_cohere2_vision)

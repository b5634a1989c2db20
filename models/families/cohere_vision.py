"""Aya Vision (Dash et al. 2025, arXiv:2505.08751) and Command A Vision (Cohere 2025): Cohere's models with a vision
tower that encodes images in tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.families.cohere import CohereForCausalLM
from jaxengine.models.families.cohere2 import Cohere2ForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.aya import read_aya, read_cohere2_vision

# transformers' defaults for fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
}
# transformers' classes do not scale logits, whatever text_config says.
_UNSCALED = {"logit_scale": 1.0}
_TEXTS = {"cohere": CohereForCausalLM, "cohere2": Cohere2ForCausalLM}


class AyaVisionForConditionalGeneration(CohereForCausalLM):
    """Cohere or Cohere 2, by text_config's model_type, with a vision tower. The layers serve for both, which differ
    only in the configuration of attention.
    """

    gguf_architecture: ClassVar[str | None] = None  # not read from GGUF
    checkpoint_names: ClassVar[CheckpointNames] = NAMES
    read_tower: ClassVar[Callable[[ConfigFields], TowerConfig]] = staticmethod(read_aya)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields).with_defaults(**_DEFAULTS)
        kind = text.text("model_type", "cohere2")
        if kind not in _TEXTS:
            raise text.fail("model_type", f"one of {', '.join(_TEXTS)} in text_config")
        return _TEXTS[kind].read_hf(text) | _UNSCALED | {"tower": cls.read_tower(fields)}


class Cohere2VisionForConditionalGeneration(AyaVisionForConditionalGeneration):
    """Command A Vision: Aya Vision with another tower."""

    read_tower: ClassVar[Callable[[ConfigFields], TowerConfig]] = staticmethod(read_cohere2_vision)

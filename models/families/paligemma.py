"""PaliGemma (Beyer et al. 2024, arXiv:2407.07726) and PaliGemma 2 (Steiner et al. 2024, arXiv:2412.03555): Gemma or
Gemma 2 with a vision tower. All tokens of a prompt with images attend to each other.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.gemma import GemmaForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.families.wrapped import Wrapper, of_kind
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.paligemma import read_paligemma


class PaliGemmaForConditionalGeneration(Wrapper, GemmaForCausalLM):
    """Gemma or Gemma 2 with images at the beginning of prompts. Such prompts must be no longer than a window."""

    text: ClassVar[str] = "gemma"
    multiplies: ClassVar[bool] = False
    checkpoint_names: ClassVar[CheckpointNames] = NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        if (kind := text.text("model_type", cls.text)) not in ("gemma", "gemma2"):
            raise text.fail("model_type", "gemma or gemma2 in text_config")
        text.require(use_bidirectional_attention=True)  # prompts are attended to so in any case
        kept = {name: value for name, value in text.raw.items() if name != "use_bidirectional_attention"}
        shared = cls.family.read_hf(of_kind(ConfigFields(kept), kind))
        windows = [layer.window for layer in shared["attention"] if layer.window is not None]
        return shared | {"tower": read_paligemma(fields, min([shared["max_position_embeddings"], *windows]))}

"""PaliGemma (Beyer et al. 2024, arXiv:2407.07726) and PaliGemma 2 (Steiner et al. 2024, arXiv:2412.03555): Gemma or
Gemma 2 with a vision tower. All tokens of a prompt with images attend to each other.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.gemma import GemmaForCausalLM
from jaxengine.models.families.gemma2 import Gemma2ForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.families.wrapped import of_kind
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.paligemma import read_paligemma


class PaliGemmaForConditionalGeneration(GemmaForCausalLM):
    """Gemma with images at the beginning of prompts."""

    gguf_architecture: ClassVar[str | None] = None
    checkpoint_names: ClassVar[CheckpointNames] = NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(_text(fields, "gemma"))
        return shared | {"tower": read_paligemma(fields, shared["max_position_embeddings"])}


class PaliGemma2ForConditionalGeneration(Gemma2ForCausalLM):
    """Gemma 2 with images at the beginning of prompts. Such prompts must be no longer than a window: within it all
    tokens of a prompt attend to each other, and beyond it windowed layers could not do so.
    """

    gguf_architecture: ClassVar[str | None] = None
    checkpoint_names: ClassVar[CheckpointNames] = NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(_text(fields, "gemma2"))
        windows = [layer.window for layer in shared["attention"] if layer.window is not None]
        return shared | {"tower": read_paligemma(fields, min([shared["max_position_embeddings"], *windows]))}


def _text(fields: ConfigFields, kind: str) -> ConfigFields:
    """Return the fields of text_config, with its sizes and without use_bidirectional_attention, which is always true
    for prompts here. Raises ModelConfigError if it is false, and for a model_type other than `kind`.
    """
    text = text_fields(fields)
    if text.text("model_type", kind) != kind:
        raise text.fail("model_type", "gemma or gemma2 in text_config")
    text.require(use_bidirectional_attention=True)
    kept = {name: value for name, value in text.raw.items() if name != "use_bidirectional_attention"}
    return of_kind(ConfigFields(kept), kind)

"""Processor of ERNIE 4.5-VL: Qwen2-VL's for images alone, with other bounds of their pixels and patches of one
frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor
from jaxengine.media.processors.text_placeholder import with_one_token
from jaxengine.models.config.model_config import ModelConfig

# What the published chat template writes for an image's token.
_PUBLISHED = "<|image@placeholder|>"


class ErnieVLProcessor(Qwen2VLProcessor):
    """Processor of Ernie4_5_VLMoeForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    around_name: ClassVar[str | None] = "image"
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(56 * 56, 28 * 28 * 6177)}

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        tower: Any = model_config.tower
        super().__init__(folder, {**config_json, **dict(tower.tokens)}, model_config, tokenizer)

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with an image's token for each text _PUBLISHED. token_ids: token ids
        of the whole text (see `with_one_token`).
        """
        if _PUBLISHED not in text:
            return list(token_ids)
        return with_one_token(text, token_ids, _PUBLISHED, self.token_ids["image"], self.tokenizer)

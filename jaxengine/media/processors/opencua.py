"""Processor of OpenCUA: Qwen2.5-VL's for images alone, whose embeddings have the positions of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxengine.media.processors.dots_ocr import TokenPositions
from jaxengine.media.processors.qwen2_vl import Qwen2_5VLProcessor
from jaxengine.models.config.model_config import ModelConfig

_TOKEN = "media_placeholder_token_id"
# The token <|media_placeholder|>, for a configuration that does not name it.
_USUAL = 151664


class OpenCuaProcessor(TokenPositions, Qwen2_5VLProcessor):
    """Processor of OpenCUAForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|media_begin|>image<|media_content|>", "<|media_end|>")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and the token of images from `media_placeholder_token_id`. Raises
        ModelConfigError for an invalid token id, ModelFileError for missing or invalid settings.
        """
        named = {"image_token_id": config_json.get(_TOKEN, _USUAL)}
        super().__init__(folder, {**config_json, **named}, model_config, tokenizer)

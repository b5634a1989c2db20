"""Processor of VideoLLaMA 3: Qwen2-VL's for images alone, with patches of one frame, each of which is an embedding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from jaxengine.media.processors.dots_ocr import TokenPositions
from jaxengine.media.processors.qwen2_vl import Qwen2VLProcessor
from jaxengine.models.config.model_config import ModelConfig

# transformers' default of image_token_id.
_IMAGE = 151655


class VideoLlama3Processor(TokenPositions):
    """Processor of VideoLlama3ForConditionalGeneration. Its videos, of whose embeddings those of still parts are left
    out, are not supported.
    """

    modalities: tuple[str, ...] = ("image",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen2VLProcessor.defaults,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "temporal_patch_size": 1,
        "merge_size": 1,
    }

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        super().__init__(folder, {"image_token_id": _IMAGE, **config_json}, model_config, tokenizer)

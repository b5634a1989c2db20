"""Processors of models with Qwen2-VL's towers whose embeddings have the positions of tokens, not M-RoPE positions:
dots.ocr, EXAONE 4.5, HyperCLOVA X SEED Think 32B, LLaVA-OneVision 1.5, OpenCUA and VideoLLaMA 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2_5VLProcessor, Qwen2VLProcessor
from jaxengine.models.config.model_config import ModelConfig


class TokenPositions(Qwen2VLProcessor):
    """Base of processors of Qwen2-VL's towers in models without M-RoPE: embeddings have the positions of tokens.

    Attributes:
      around_texts: texts before and after a placeholder in the model's chat template.
      usual_token: field of config.json with the token of images, and its value where the field is missing; None for the
        fields and values of Qwen2-VL.
    """

    around_name: ClassVar[str | None] = None
    around_texts: ClassVar[tuple[str, str]] = ("", "")
    usual_token: ClassVar[tuple[str, int] | None] = None

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings and the token of images. Raises ModelConfigError for an invalid token id,
        ModelFileError for missing or invalid settings.
        """
        if self.usual_token is not None:
            name, usual = self.usual_token
            config_json = {**config_json, "image_token_id": config_json.get(name, usual)}
        super().__init__(folder, config_json, model_config, tokenizer)

    def placeholder(self, modality: str) -> str:
        before, after = self.around_texts
        return f"{before}{GridProcessor.placeholder(self, modality)}{after}"

    expand = GridProcessor.expand  # without M-RoPE positions


class DotsOcrProcessor(TokenPositions):
    """Processor of DotsOCRForCausalLM: for images alone, with larger bounds and patches of one frame."""

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|img|>", "<|endofimg|>")
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(56 * 56, 28 * 28 * 14400)}


class LlavaOnevision15Processor(TokenPositions):
    """Processor of LLaVAOneVision1_5_ForConditionalGeneration: for images alone, with patches of one frame. They fill
    blocks of attention of their own, for the tower has a class token in each block.
    """

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|vision_start|>", "<|vision_end|>")
    defaults: ClassVar[Mapping[str, Any]] = DotsOcrProcessor.defaults

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of a grid's patches, followed by padding up to a multiple of the tower's unit."""
        made, merge = super().processed(patches, grid, seconds), self.tower.merge
        missing = -len(made.patches) % self.tower.unit
        return made._replace(
            patches=np.pad(made.patches, ((0, missing), (0, 0))),
            columns=np.pad(made.columns, ((0, 0), (0, missing)), constant_values=-1),
            rows=np.pad(made.rows, (0, missing // merge), constant_values=-1),
        )


class VideoLlama3Processor(TokenPositions):
    """Processor of VideoLlama3ForConditionalGeneration: for images alone, with patches of one frame, each of which is
    an embedding. Its videos, of whose embeddings those of still parts are left out, are not supported.
    """

    modalities: tuple[str, ...] = ("image",)
    usual_token: ClassVar[tuple[str, int] | None] = ("image_token_id", 151655)
    defaults: ClassVar[Mapping[str, Any]] = {
        **DotsOcrProcessor.defaults,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "merge_size": 1,
    }


class Exaone4_5Processor(TokenPositions, Qwen2_5VLProcessor):
    """Processor of Exaone4_5_ForConditionalGeneration."""

    around_texts: ClassVar[tuple[str, str]] = ("<vision>", "</vision>")


class HyperClovaVisionProcessor(TokenPositions, Qwen2_5VLProcessor):
    """Processor of HyperCLOVAXVisionV2ForConditionalGeneration, for images alone: its chat template needs the length of
    a video in seconds, which messages do not have.
    """

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|image_start|>", "<|image_end|>")


class OpenCuaProcessor(TokenPositions, Qwen2_5VLProcessor):
    """Processor of OpenCUAForConditionalGeneration, for images alone. Its usual token is <|media_placeholder|>."""

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|media_begin|>image<|media_content|>", "<|media_end|>")
    usual_token: ClassVar[tuple[str, int] | None] = ("media_placeholder_token_id", 151664)

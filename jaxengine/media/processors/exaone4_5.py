"""Processors of EXAONE 4.5 and of HyperCLOVA X SEED Think 32B: Qwen2.5-VL's, but embeddings have the positions of
tokens, not M-RoPE positions.
"""

from __future__ import annotations

from typing import ClassVar

from jaxengine.media.processors.dots_ocr import TokenPositions
from jaxengine.media.processors.qwen2_vl import Qwen2_5VLProcessor


class Exaone4_5Processor(TokenPositions, Qwen2_5VLProcessor):
    """Processor of Exaone4_5_ForConditionalGeneration."""

    around_texts: ClassVar[tuple[str, str]] = ("<vision>", "</vision>")


class HyperClovaVisionProcessor(TokenPositions, Qwen2_5VLProcessor):
    """Processor of HyperCLOVAXVisionV2ForConditionalGeneration, for images alone: its chat template needs the length of
    a video in seconds, which messages do not have.
    """

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|image_start|>", "<|image_end|>")

"""Processor of dots.ocr, and base of others of Qwen2-VL's towers whose embeddings have the positions of tokens, not
M-RoPE positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor


class TokenPositions(Qwen2VLProcessor):
    """Base of processors of Qwen2-VL's towers in models without M-RoPE: embeddings have the positions of tokens.

    Attributes:
      around_texts: texts before and after a placeholder in the model's chat template.
    """

    around_name: ClassVar[str | None] = None
    around_texts: ClassVar[tuple[str, str]] = ("", "")

    def placeholder(self, modality: str) -> str:
        before, after = self.around_texts
        return f"{before}{GridProcessor.placeholder(self, modality)}{after}"

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt of GridProcessor.expand, without M-RoPE positions."""
        return GridProcessor.expand(self, token_ids, items)


class DotsOcrProcessor(TokenPositions):
    """Processor of DotsOCRForCausalLM: for images alone, with larger bounds and patches of one frame."""

    modalities: tuple[str, ...] = ("image",)
    around_texts: ClassVar[tuple[str, str]] = ("<|img|>", "<|endofimg|>")
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(56 * 56, 28 * 28 * 14400)}

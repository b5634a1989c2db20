"""Processor of dots.ocr: Qwen2-VL's for images alone, with larger bounds and patches of one frame; embeddings have the
positions of tokens, not M-RoPE positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.qwen2_vl import Bounds, Qwen2VLProcessor

# Texts before and after a placeholder in the model's chat template.
_AROUND = "<|img|>", "<|endofimg|>"


class DotsOcrProcessor(Qwen2VLProcessor):
    """Processor of DotsOCRForCausalLM."""

    modalities: tuple[str, ...] = ("image",)
    around_name: ClassVar[str | None] = None
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen2VLProcessor.defaults, "temporal_patch_size": 1}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {"image": Bounds(56 * 56, 28 * 28 * 14400)}

    def placeholder(self, modality: str) -> str:
        before, after = _AROUND
        return f"{before}{self.tokenizer.convert_ids_to_tokens([self.token_ids[modality]])[0]}{after}"

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        return GridProcessor.expand(self, token_ids, items)

"""Processor of LightOnOCR: Pixtral's, without tokens between the lines of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.pixtral import PixtralProcessor


class LightOnOcrProcessor(PixtralProcessor):
    """Processor of LightOnOcrForConditionalGeneration."""

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        return GridProcessor.expand(self, token_ids, items)

"""Processor of GOT-OCR 2.0: InternVL's for images alone, each stretched to one square unless tiles are requested."""

from __future__ import annotations

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.tiles import TilesProcessor


class GotOcr2Processor(TilesProcessor):
    """Processor of GotOcr2ForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    needs_tokenizer = False
    crops = False

    def placeholder_id(self) -> int:
        """Return image_token_index of config.json, or else image_token_id. Raises ModelConfigError if it is missing or
        invalid.
        """
        return self.token_id("image_token_index", "image_token_id")

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the placeholder once for each embedding."""
        return [self.image_id] * item.num_rows

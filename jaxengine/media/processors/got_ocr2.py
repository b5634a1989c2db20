"""Processor of GOT-OCR 2.0: InternVL's for images alone, each stretched to one square unless tiles are requested."""

from __future__ import annotations

from jaxengine.media.processors.tiles import TilesProcessor


class GotOcr2Processor(TilesProcessor):
    """Processor of GotOcr2ForConditionalGeneration."""

    modalities: tuple[str, ...] = ("image",)
    needs_tokenizer = False
    crops = False
    token_names = ("image_token_index", "image_token_id")

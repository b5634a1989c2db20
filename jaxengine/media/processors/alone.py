"""Processor of models that embed an image by itself (CLIP, SigLIP): its prompt is one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.llava import LlavaProcessor
from jaxengine.scheduler.base.errors import RequestError


class AloneProcessor(LlavaProcessor):
    """Processor of CLIPModel and SiglipModel: LLaVA's, for images that are prompts.

    Attributes:
      stand_alone: images come without a text.
    """

    stand_alone = True
    most_given = 1

    def placeholder_id(self) -> int:
        """Return 0: the token of an image, whose own embedding is not read."""
        return 0

    def placeholder(self, modality: str) -> str:
        """Return "": nothing stands for an image in a text."""
        return ""

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt of an image. Raises RequestError for a prompt with tokens of its own, or several images."""
        count = len(items.get("image", ()))
        if count != 1 or token_ids:
            problem = f"the prompt has {count} images and {len(token_ids)} tokens of a text; this model embeds an image"
            raise RequestError(f"{problem} by itself, with an empty text", param="prompt")
        return Expanded([self.image_id], [np.zeros(1, np.int32)], [("image", 0)])

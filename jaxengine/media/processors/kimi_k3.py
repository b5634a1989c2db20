"""Processor of Kimi K3: Kimi K2.5's for images, whose size the prompt states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.kimi_k25 import KimiMediaProcessor
from jaxengine.media.processors.text_placeholder import TextPlaceholder
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.errors import RequestError


class KimiK3Processor(TextPlaceholder, KimiMediaProcessor):
    """Processor of KimiK3ForConditionalGeneration. The text that stands for an image becomes the text of its size and
    the tokens of its embeddings.
    """

    needs_grid = True

    def read_tokens(self, fields: ConfigFields, model_config: ModelConfig) -> None:
        """Read the placeholder from a config.json (`fields`), and set token_ids and image_id; with a tokenizer also its
        text, image_placeholder.

        Raises ModelConfigError for an invalid token id, and ModelFileError for a text without tokens.
        """
        super().read_tokens(fields, model_config)
        self.image_id = self.token_ids["image"]
        if self.tokenizer is not None:
            text = fields.text("image_placeholder", "<|kimi_image_placeholder|>")
            self.place_text(Path("config.json"), "image_placeholder", text)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], as KimiVLProcessor.process does, with its size."""
        return super().process(modality, value, options, most)._replace(size=value.shape[:2])

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with the tokens of each placeholder replaced by those of its image. Raises RequestError for
        another number of images than placeholders, and for an image without a tokenizer.
        """
        return super().expand(token_ids if self.tokenizer is None else self.with_tokens(token_ids), items)

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an image, with -1 for each of its embeddings, between its size and the end of its block.
        The size is that before the image is scaled; of one given as embeddings, that of its grid.

        Raises RequestError without a tokenizer.
        """
        if self.tokenizer is None:
            problem = "an image needs the model's tokenizer, for prompts state its size"
            raise RequestError(problem, param=modality)
        patch = self.tower.patch_size
        height, width = item.size or (item.grid[1] * patch, item.grid[2] * patch)
        before = f"<|media_begin|>image {width}x{height}<|media_content|>"
        return self.between(before, item.num_rows, "<|media_end|>")

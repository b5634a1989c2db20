"""Processor of Kimi K3: Kimi K2.5's for images, whose size the prompt states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import GridProcessor
from jaxengine.media.processors.kimi_k25 import KimiMediaProcessor
from jaxengine.media.processors.text_placeholder import TextPlaceholder
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.errors import RequestError


class KimiK3Processor(TextPlaceholder, KimiMediaProcessor):
    """Processor of KimiK3ForConditionalGeneration. The text that stands for an image becomes the text of its size and
    the tokens of its embeddings.
    """

    def read_tokens(self, fields: ConfigFields, model_config: ModelConfig) -> None:
        """Read the placeholder from a config.json (`fields`), and set token_ids and image_id.

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

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return the grid, (1, height, width) in patches, of an image given as num_rows embeddings. Raises RequestError
        without a grid, and if it does not make num_rows.
        """
        return GridProcessor.grid_of(self, num_rows, grid)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each token of a placeholder replaced by the text of the image's size and as many such
        tokens as it has embeddings.

        The size is that of the image before it is scaled; of one given as embeddings, that of its grid. Raises
        RequestError for another number of images than placeholders, and without a tokenizer.
        """
        if self.tokenizer is None and any(items.values()):
            raise RequestError("an image needs the model's tokenizer, for prompts state its size", param="image")
        ids = np.asarray(token_ids if self.tokenizer is None else self.with_tokens(token_ids), np.int64)
        at, order = self.placeholders(ids, items)
        parts: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        copied = end = 0
        for place, (modality, number) in zip(at.tolist(), order, strict=True):
            item = items[modality][number]
            patch = self.tower.patch_size
            height, width = item.size or (item.grid[1] * patch, item.grid[2] * patch)
            before = self.ids(f"<|media_begin|>image {width}x{height}<|media_content|>")
            after = self.ids("<|media_end|>")
            first = end + place - copied + len(before)
            positions.append(np.arange(first, first + item.num_rows, dtype=np.int32))
            embedded = np.full(item.num_rows, self.image_id, np.int64)
            parts += [ids[copied:place], np.asarray(before, np.int64), embedded, np.asarray(after, np.int64)]
            end = first + item.num_rows + len(after)
            copied = place + 1
        whole = np.concatenate([*parts, ids[copied:]]).astype(np.int64)
        return Expanded(whole.tolist(), positions, order)

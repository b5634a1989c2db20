"""Processor of GLM-4V-9B: an image as a square, with an embedding before and one after those of its patches, which have
one position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.mrope import EmbeddingRun, mrope_positions
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD
from jaxengine.media.processors.text_placeholder import TextPlaceholder
from jaxengine.media.processors.units import UnitProcessor, gridless
from jaxengine.models.config.model_config import ModelConfig

_PLACEHOLDER = "<|begin_of_image|><|endoftext|><|end_of_image|>"


class Glm4v9bProcessor(TextPlaceholder, UnitProcessor):
    """Processor of GLM4VForCausalLM."""

    # Those of the published code: checkpoints have no file of settings.
    defaults: ClassVar[Mapping[str, Any]] = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    needs_settings = False
    needs_tokenizer = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and the tokens before, of and after an image's patches: boi_token_id,
        pad_token_id and eoi_token_id. Raises ModelConfigError for missing tokens, ModelFileError for invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self._begin, self._patch, self._end = (self.token_id(f"{name}_token_id") for name in ("boi", "pad", "eoi"))
        self.place_text(Path(folder), "the placeholder of images", _PLACEHOLDER)

    def placeholder_id(self) -> int:
        """Return the id of the token before an image's patches."""
        return self._begin

    @property
    def image_id(self) -> int:
        """Token that stands for an image once its placeholder's text is replaced: the one before its patches."""
        return self._begin

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        """Tokens at whose positions embeddings go: all of an image's."""
        return self._begin, self._patch, self._end

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image, uint8[H, W, 3], resized to the tower's square, and (1, 1). options: none are used."""
        del options
        return [self.pixels.resized(picture, self.side, self.side)], (1, 1)

    def largest_size(self) -> tuple[int, int]:
        return self.side, self.side

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3]. The rows of its beginning and its end come after those of patches.

        options: none are known. most: limit of patches, if any. Raises RequestError for options, other values, extreme
        aspect ratios, and more patches.
        """
        made = super().process(modality, value, options, most)
        ends = np.zeros((self.tower.unit - len(made.patches), made.patches.shape[1]), np.float32)
        count = self._count
        # The tower has the beginning and the end after the patches.
        rows = np.asarray([*range(1, count - 1), 0, count - 1], np.int32)
        patches = np.concatenate([made.patches, ends])
        return Processed(patches, np.zeros((0, len(patches)), np.int32), rows, count, made.grid)

    @property
    def _count(self) -> int:
        """Number of an image's embeddings."""
        return self.tower.unit // self.tower.merge

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        gridless(num_rows, grid, num_rows == self._count, f"{self._count}")
        side = self.side // self.patch
        return 1, side, side

    def pieces(self, item: Processed) -> list[int]:
        return [self._begin, *[self._patch] * (item.num_rows - 2), self._end]

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt with its positions: tokens between an image's beginning and its end have one.

        Raises RequestError for another number of items than placeholders.
        """
        found = super().expand(self.with_tokens(token_ids), items)
        counts = [len(places) - 2 for places in found.positions]
        runs = [
            EmbeddingRun(int(places[1]), (count, 1, 1), np.zeros(count, np.int32))
            for places, count in zip(found.positions, counts, strict=True)
        ]
        positions, delta = mrope_positions(len(found.token_ids), runs)
        return found._replace(rope_positions=positions, rope_delta=delta)

"""Processor of Llama 3.2 Vision: an image is fitted into the best tiling, with black at the right and at the bottom,
and cut into tiles. One token stands for it in the prompt, also for the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.settings import tiles_of
from jaxengine.media.processors.units import UnitProcessor
from jaxengine.models.config.fields import ConfigFields
from jaxengine.scheduler.base.errors import RequestError

_BILINEAR = 2


class MllamaProcessor(UnitProcessor):
    """Processor of MllamaForConditionalGeneration. A unit is an image."""

    defaults = {
        "resample": _BILINEAR,
        "image_mean": (0.5,) * 3,
        "image_std": (0.5,) * 3,
        "size": {"height": 224, "width": 224},
        "max_image_tiles": 4,
    }
    config_defaults = {"image_token_index": 128256}
    token_names = ("image_token_id", "image_token_index")

    def read_settings(self, fields: ConfigFields) -> None:
        """Raise ModelConfigError unless the size is the tower's, and so is the largest number of tiles,
        max_image_tiles.
        """
        self.check_square(fields)
        fields.require(max_image_tiles=self.tower.max_tiles)

    def largest_size(self) -> tuple[int, int]:
        return self.side, self.side * self.tower.max_tiles

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], for the tower: the patches of all tiles, zeros in those that are not
        used, and as their one column the number of its tiling, from 1.

        most: limit of patches, if any. Raises RequestError for any option, other values, extreme aspect ratios, and
        more patches.
        """
        height, width = self.checked_size(modality, value, options)
        check_room(modality, self.tower.unit, most)
        side, tilings = self.side, self.tower.tilings
        rows, columns = _tiling(height, width, side, tilings)
        room = rows * side, columns * side
        by_height, by_width = (min(max(own, side), most) / own for own, most in zip((height, width), room, strict=True))
        if by_width < by_height:
            wide = min(max(width, side), room[1])
            high = min(math.floor(height * by_width) or 1, min(max(height, side), room[0]))
        else:
            high = min(max(height, side), room[0])
            wide = min(math.floor(width * by_height) or 1, min(max(width, side), room[1]))
        canvas = np.zeros((*room, 3), np.uint8)
        canvas[:high, :wide] = self.pixels.resized(value, high, wide)
        tiles = tiles_of(canvas, rows, columns)
        patches = np.zeros((self.tower.unit, self.tower.num_features), np.float32)
        cut = self._cut(tiles)
        patches[: len(cut)] = cut
        number = np.full((1, len(patches)), 1 + tilings.index((rows, columns)), np.int32)
        grid = 1, rows * self.tower.vit.grid, columns * self.tower.vit.grid
        return Processed(patches, number, np.zeros(1, np.int32), 1, grid)

    def pieces(self, item: Processed) -> list[int]:
        return [self.image_id]

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Raise RequestError, since images cannot be given as embeddings."""
        raise RequestError("images of this model are not given as embeddings", param="image")


def _tiling(height: int, width: int, side: int, allowed: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the (rows, columns) of `allowed` into which an image of height x width pixels is to be fitted: the one
    that enlarges it least, or if none does so, shrinks it least; of equal ones the one with the fewest tiles, and of
    these the first. side: of a tile in pixels.
    """
    scales = [min(rows * side / height, columns * side / width) for rows, columns in allowed]
    larger = [scale for scale in scales if scale >= 1]
    best = min(larger) if larger else max(scales)
    equal = [tiling for tiling, scale in zip(allowed, scales, strict=True) if scale == best]
    return min(equal, key=lambda tiling: tiling[0] * tiling[1])

"""Processor of Llama 4: images are fitted into the best tiling, padded with black to the right and below, and cut into
tiles, which the whole image, scaled down, follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

import ml_dtypes
import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import check_options, switch, tiles_of
from jaxengine.media.processors.units import UnitProcessor, boolean_option, integer_option
from jaxengine.models.config.fields import ConfigFields

_STANDARD, _BILINEAR = (0.5, 0.5, 0.5), 2
_MAX_TILES = 64
_IMAGE, _BEGIN, _END = "<|image|>", "<|image_start|>", "<|image_end|>"
_BESIDE, _BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4Processor(UnitProcessor):
    """Processor of Llama4ForConditionalGeneration.

    Attributes:
      max_tiles: limit of an image's tiles, not counting the whole image.
      fills: whether a small image is enlarged to fill a tiling.
    """

    defaults = {
        "resample": _BILINEAR,
        "image_mean": _STANDARD,
        "image_std": _STANDARD,
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    }
    needs_tokenizer = True
    embedded_names = ("image_token_index", "image_token_id")
    most_given = 1  # the row and column of further tiles would be unknown
    max_tiles: int
    fills: bool

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the largest number of tiles (max_patches), `fills` (resize_to_max_canvas), and `rounds`: whether
        pixels are both scaled and normalised (do_rescale and do_normalize), which transformers computes in bfloat16,
        and either alone in float32. Raises ModelConfigError if the size is not the tower's or there may be too many
        tiles.
        """
        self.check_square(fields)
        self.rounds = switch(fields, "do_rescale") and switch(fields, "do_normalize")
        self.max_tiles, self.fills = fields.integer("max_patches"), fields.boolean("resize_to_max_canvas", False)
        if self.max_tiles > _MAX_TILES:
            raise fields.fail("max_patches", f"at most {_MAX_TILES}")

    def option_names(self) -> tuple[str, ...]:
        return ("max_patches", "resize_to_max_canvas")

    def placeholder_id(self) -> int:
        """Return the id of the token <|image|>."""
        return self._id(_IMAGE)

    def largest_size(self) -> tuple[int, int]:
        rows, columns = max(_tilings(self.max_tiles), key=lambda tiling: tiling[0] * tiling[1])
        return rows * self.side, columns * self.side

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's tiles, line by line, and (rows, columns); if there are several tiles, the whole image,
        resized to a square, follows them.

        picture: uint8[H, W, 3], which is fitted into the best tiling, but without `fills` enlarged to one tile at most,
        and padded with black at the right and at the bottom. options: mm_processor_kwargs, of which `max_patches` and
        `resize_to_max_canvas` override max_tiles and fills. Raises RequestError for an invalid option.
        """
        side, resize = self.side, self.pixels.resized
        most, fills = self._limits(options)
        height, width = picture.shape[:2]
        rows, columns = _tiling(height, width, side, most, fills)
        room = rows * side, columns * side
        if not fills:  # enlarged to one tile at most
            room = min(max(height, side), room[0]), min(max(width, side), room[1])
        by_height, by_width = room[0] / height, room[1] / width
        if by_width < by_height:
            high, wide = min(math.floor(height * by_width), room[0]), room[1]
        else:
            high, wide = room[0], min(math.floor(width * by_height), room[1])
        fitted = resize(picture, max(high, 1), max(wide, 1))
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[: len(fitted), : fitted.shape[1]] = fitted
        tiles = tiles_of(canvas, rows, columns)
        return tiles if len(tiles) == 1 else [*tiles, resize(picture, side, side)], (rows, columns)

    def num_units(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        count = math.prod(_tiling(height, width, self.side, *self._limits(options)))
        return count + (count > 1)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.max_tiles, found.fills = self._limits(options)
        return found

    def _limits(self, options: Mapping[str, Any]) -> tuple[int, bool]:
        """Return (max_tiles, fills), overridden by `options`. Raises RequestError for an invalid option."""
        most = integer_option(options, "max_patches", self.max_tiles, _MAX_TILES)
        return most, boolean_option(options, "resize_to_max_canvas", self.fills)

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the placeholders of its tiles line by line with separators, if there
        are several, and those of the whole image, between the start and end tokens.
        """
        grid = self.side // self.patch
        rows, columns = item.grid[1] // grid, item.grid[2] // grid
        tile = [self.image_id] * (self.tower.unit // self.tower.merge)
        pieces = [self._id(_BEGIN)]
        for _ in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                pieces += [*tile, *([self._id(_BESIDE)] if column < columns - 1 else [])]
            pieces.append(self._id(_BELOW))
        return [*pieces, self.placeholder_id(), *tile, self._id(_END)]

    def normalized(self, units: np.ndarray) -> np.ndarray:
        """Return uint8[..., 3] normalised to f32[..., 3], if it `rounds` to bfloat16 at each operation, as in
        transformers for this family whatever the model's dtype.
        """
        if not self.rounds:
            return super().normalized(units)
        pixels, half = self.pixels, ml_dtypes.bfloat16
        scaled = (units.astype(np.float32) * np.float32(pixels.scale)).astype(half).astype(np.float32)
        mean, std = (np.asarray(each, half).astype(np.float32) for each in (pixels.mean, pixels.std))
        return ((scaled - mean).astype(half).astype(np.float32) / std).astype(half).astype(np.float32)

    def _id(self, name: str) -> int:
        """Return the id of a token by its text."""
        return int(self.tokenizer.encode(name, add_special_tokens=False)[0])


def _tilings(most: int) -> list[tuple[int, int]]:
    """Return all (rows, columns) of at most `most` tiles, most tiles first, except that tilings of the same aspect
    ratio follow each other.
    """
    by_shape: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_shape.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [tiling for alike in by_shape.values() for tiling in alike]


def _tiling(height: int, width: int, side: int, most: int, fills: bool) -> tuple[int, int]:
    """Return the (rows, columns) of the tiling that shrinks an image least. If it fits into several without shrinking,
    the one that enlarges it least (with `fills`, most), and the smallest of equal ones.

    height, width: size of the image in pixels. side: side of a tile in pixels. most: limit of tiles.
    """
    tilings = _tilings(most)
    sizes = np.asarray(tilings) * side
    scales = np.minimum(
        sizes[:, 0].astype(np.float32) / np.float32(height), sizes[:, 1].astype(np.float32) / np.float32(width)
    )
    fitting = scales[scales >= 1]
    best = (fitting.max() if fills else fitting.min()) if len(fitting) else scales.max()
    equal = np.flatnonzero(scales == best)
    return tilings[equal[np.argmin(sizes[equal].prod(axis=1))]]

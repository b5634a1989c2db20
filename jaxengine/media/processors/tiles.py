"""Base of processors that resize images to the tiling of the nearest aspect ratio; the whole image, scaled down,
follows the tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD, check_options, tiles_of
from jaxengine.media.processors.units import UnitProcessor, boolean_option, integer_option
from jaxengine.models.config.fields import ConfigFields

_BICUBIC = 3
MAX_TILES = 64


class LimitedTiles(UnitProcessor):
    """Base class of a UnitProcessor whose number of tiles an option limits.

    Attributes:
      limit_name: name of the setting, and of the option, that limits the number of tiles.
      max_tiles: largest number of an image's tiles, not counting the whole.
    """

    limit_name: ClassVar[str]
    max_tiles: int

    def read_limit(self, fields: ConfigFields) -> None:
        """Read and set the limit of tiles. Raises ModelConfigError for one that is not from 1 to MAX_TILES."""
        self.max_tiles = fields.integer(self.limit_name)
        if self.max_tiles > MAX_TILES:
            raise fields.fail(self.limit_name, f"from 1 to {MAX_TILES}")

    def option_names(self) -> tuple[str, ...]:
        return (self.limit_name,)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.max_tiles = self.limit(options)
        return found

    def limit(self, options: Mapping[str, Any]) -> int:
        """Return the limit of tiles with these options. Raises RequestError for an invalid one."""
        return integer_option(options, self.limit_name, self.max_tiles, MAX_TILES)


class TilesProcessor(UnitProcessor):
    """Base class of a UnitProcessor with a limited number of tiles.

    Attributes:
      min_tiles, max_tiles: limits of an image's tiles, not counting the whole image.
      adds_whole: whether several tiles are followed by the whole image.
      crops: whether images are cut into tiles by default.
      most_lines: limit of rows, and of columns, of tiles.
    """

    defaults = {
        "resample": _BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"height": 384, "width": 384},
        "min_patches": 1,
        "max_patches": 12,
    }
    needs_tokenizer = True
    adds_whole = crops = True
    most_lines = MAX_TILES
    min_tiles: int
    max_tiles: int

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, min_patches and max_patches. Raises ModelConfigError for a size other than
        the tower's, and for limits out of range.
        """
        self.check_square(fields)
        self.min_tiles, self.max_tiles = fields.integer("min_patches"), fields.integer("max_patches")
        if self.max_tiles > MAX_TILES or self.min_tiles > self.max_tiles:
            raise fields.fail("max_patches", f"from min_patches {self.min_tiles} to {MAX_TILES}")

    @property
    def tile_side(self) -> int:
        """Side of a tile in pixels; in this class that of the whole image's square."""
        return self.side

    def option_names(self) -> tuple[str, ...]:
        return ("crop_to_patches", "min_patches", "max_patches")

    def largest_size(self) -> tuple[int, int]:
        every = tilings(self.min_tiles, self.max_tiles, self.most_lines)
        rows, columns = max(every, key=lambda tiling: tiling[0] * tiling[1])
        return rows * self.tile_side, columns * self.tile_side

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's tiles, line by line, and (rows, columns); if there are several tiles and `adds_whole`, the
        whole image, resized to a square, follows them.

        picture: uint8[H, W, 3], which is resized to the nearest tiling. options: mm_processor_kwargs, of which
        `min_patches` and `max_patches` override the limits of tiles; with `crop_to_patches` False the result is only
        the whole image, and (1, 1). Raises RequestError for an invalid option.
        """
        side, resize = self.side, self.pixels.resized
        rows, columns = self._tiling_for(picture.shape[0], picture.shape[1], options)
        whole = resize(picture, rows * side, columns * side)
        tiles = tiles_of(whole, rows, columns)
        if len(tiles) > 1 and self.adds_whole:
            tiles.append(resize(picture, side, side))
        return tiles, (rows, columns)

    def num_units(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        rows, columns = self._tiling_for(height, width, options)
        return rows * columns + (rows * columns > 1 and self.adds_whole)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.min_tiles, found.max_tiles, found.crops = self._limits(options)
        return found

    def _limits(self, options: Mapping[str, Any]) -> tuple[int, int, bool]:
        """Return (min_tiles, max_tiles, crops), overridden by `options`. Raises RequestError for an invalid option."""
        most = integer_option(options, "max_patches", self.max_tiles, MAX_TILES)
        least = integer_option(options, "min_patches", min(self.min_tiles, most), most)
        return least, most, boolean_option(options, "crop_to_patches", self.crops)

    def _tiling_for(self, height: int, width: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the (rows, columns) of tiles of an image of height x width pixels with these options; (1, 1) if it is
        not cut.

        Raises RequestError for an invalid option.
        """
        least, most, crops = self._limits(options)
        return self.tiling(height, width, least, most) if crops and most > 1 else (1, 1)

    def tiling(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) whose aspect ratio is nearest to the image's; (1, 1) if the limits allow no
        tiling.

        height, width: size of the image in pixels. least, most: limits of the number of tiles. Among equally near ones
        it is the one with the most tiles whose area is less than twice the image's, else the one with the fewest tiles.
        """
        return nearest_tiling(height, width, self.tile_side, tilings(least, most, self.most_lines))


def nearest_tiling(height: int, width: int, side: int, listed: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (rows, columns) of `listed` whose aspect ratio is nearest to that of an image, of height x width
    pixels; (1, 1) if none are listed. Of equally near ones a later one counts if its tiles, of `side` pixels, have
    together less than twice the image's area.
    """
    best, nearest = (1, 1), float("inf")
    for rows, columns in listed:
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * side**2 * rows * columns):
            best, nearest = (rows, columns), distance
    return best


def largest_share(height: int, width: int, side: int, listed: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (rows, columns) of `listed` that suits an image of height x width pixels best: the first with the
    largest product of how near its aspect ratio is and the share of the image's pixels that its tiles, of `side`
    pixels, keep, of which 0.6 is enough (Eagle 2, Li et al. 2025, arXiv:2501.14818).
    """
    ratio = width / height

    def share(tiling: tuple[int, int]) -> float:
        own = tiling[1] / tiling[0]
        return min(math.prod(tiling) * side * side / (width * height), 0.6) * min(own / ratio, ratio / own)

    return max(listed, key=share)


def tilings(least: int, most: int, most_lines: int = MAX_TILES) -> list[tuple[int, int]]:
    """Return all (rows, columns) of up to `most_lines` each with `least` to `most` tiles, sorted by number of tiles,
    then by columns.
    """
    sides = range(1, min(most, most_lines) + 1)
    found = [(rows, columns) for columns in sides for rows in sides if least <= rows * columns <= most]
    return sorted(found, key=lambda tiling: tiling[0] * tiling[1])


class GotOcr2Processor(TilesProcessor):
    """Processor of GotOcr2ForConditionalGeneration: for images alone, each stretched to one square unless tiles are
    requested.
    """

    modalities: tuple[str, ...] = ("image",)
    needs_tokenizer = False
    crops = False
    token_names = ("image_token_index", "image_token_id")

"""Processor of DeepSeek-OCR 2: the whole image in a square with margins, after its tiles if it is large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.settings import IMAGES, WHOLE, switch, tiles_of
from jaxengine.media.processors.tiles import TilesProcessor
from jaxengine.media.processors.units import gridless
from jaxengine.models.config.fields import ConfigFields

_MEAN = [0.5, 0.5, 0.5]
_GREY = [127, 127, 127]


class DeepseekOcr2Processor(TilesProcessor):
    """Processor of DeepseekOcr2ForConditionalGeneration.

    Attributes:
      colour: red, green and blue of margins.
    """

    needs_tokenizer = False
    config_defaults = {"image_token_id": 128815}
    # The first files have settings of images alone where transformers' have those of all processors.
    places = (IMAGES, (IMAGES[0], WHOLE))
    defaults = {
        **TilesProcessor.defaults,
        "image_mean": _MEAN,
        "image_std": _MEAN,
        "size": {"height": 1024, "width": 1024},
        "min_patches": 2,
        "max_patches": 6,
    }
    colour: list[int]

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, whether there are any (crop_to_patches), and the colour of margins
        (background_color, by default a grey of 127).

        Raises ModelConfigError for limits out of range, sizes other than the tower's, and a colour that is not three
        bytes.
        """
        super().read_settings(fields)
        self.crops = switch(fields, "crop_to_patches")
        self.read_tile_size(fields)
        colour = fields.value("background_color", _GREY)
        right = isinstance(colour, (list, tuple)) and len(colour) == 3
        if not right or any(type(value) is not int or not 0 <= value <= 255 for value in colour):
            raise fields.fail("background_color", "three integers from 0 to 255")
        self.colour = list(colour)

    def read_tile_size(self, fields: ConfigFields) -> None:
        """Check `tile_size`. Raises ModelConfigError for another size than the tower's tiles have."""
        if fields.integer("tile_size", 768) != self.tile_side:
            raise fields.fail("tile_size", f"{self.tile_side}, three quarters of the tower's image_size {self.side}")

    @property
    def ahead(self) -> int:
        """Number of patches along a side that become one row."""
        return int(self.tower.merge**0.5)

    @property
    def tile_side(self) -> int:
        return self.tower.tile_grid * self.patch

    def whole_side(self, crops: bool) -> int:
        """Return the side in pixels of the whole image's square: the tower's, or a tile's if images are not cut."""
        return self.side if crops else self.tile_side

    def largest_size(self) -> tuple[int, int]:
        height, width = super().largest_size()
        return max(height, self.tile_side + 1), width

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        height, width = self.checked_size(modality, value, options)
        least, limit, crops = self._limits(options)
        is_cut = crops and max(height, width) > self.tile_side
        rows, columns = self.tiling(height, width, least, limit) if is_cut else (0, 0)
        check_room(modality, (rows * columns + 1) * self.tower.unit, most)
        side, units = self.tile_side, []
        if is_cut:
            whole = self.pixels.resized(value, rows * side, columns * side)
            units += tiles_of(whole, rows, columns)
        return self._joined([*units, self._framed(value, self.whole_side(crops))], (rows, columns))

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return (1, 1, num_rows): the grid counts for nothing.

        Raises RequestError if a grid is given, and unless num_rows is 1 (the separator) plus the embeddings of the
        whole image and any number of tiles, or plus those of a whole image of a tile's size.
        """
        whole, tile = ((side // self.patch // self.ahead) ** 2 for side in (self.side, self.tile_side))
        right = num_rows == tile + 1 or (num_rows > whole and (num_rows - whole - 1) % tile == 0)
        return gridless(num_rows, grid, right, f"{whole + 1} and {tile} for each tile, or {tile + 1}")

    def _framed(self, picture: np.ndarray, side: int) -> np.ndarray:
        """Return an image, uint8[H, W, 3], scaled to a longer side of `side` pixels, in the middle of a square of
        `colour`. The shorter side is rounded, and at least 1; an odd pixel of margin is after the image.
        """
        height, width = picture.shape[:2]
        scale = side / max(height, width)
        fitted = self.pixels.resized(picture, *(max(1, round(length * scale)) for length in (height, width)))
        square = np.empty((side, side, 3), np.uint8)
        square[:] = self.colour
        top, left = (side - len(fitted)) // 2, (side - fitted.shape[1]) // 2
        square[top : top + len(fitted), left : left + fitted.shape[1]] = fitted
        return square

    def _joined(self, squares: list[np.ndarray], tiling: tuple[int, int]) -> Processed:
        """Return the Processed item of tiles and, last, the whole image: uint8[side, side, 3] each, of the tower's side
        or a tile's. tiling: (rows, columns) of the tiles.
        """
        tower, grid = self.tower, self.side // self.patch
        patches = np.zeros((len(squares), tower.unit, tower.num_features), np.float32)
        sides = [len(square) // self.patch for square in squares]
        for number, (square, side) in enumerate(zip(squares, sides, strict=True)):
            corner = patches[number, : grid * grid].reshape(grid, grid, -1)
            corner[:side, :side] = self._cut([square]).reshape(side, side, -1)
        rows, count = self.numbered(sides, tiling)
        columns = np.repeat(np.asarray(sides, np.int32), tower.unit)[None]
        flat = patches.reshape(-1, tower.num_features)
        return Processed(flat, columns, rows.ravel(), count, (1, 1, count))

    def numbered(self, sides: list[int], tiling: tuple[int, int]) -> tuple[np.ndarray, int]:
        """Return the numbers of the tower's rows in the prompt, i32[squares, rows of a unit], -1 for those that are not
        in it, and how many are: those of each square in order, and then the separator.

        sides: rows and columns of patches of each square, the whole image last. tiling: not used.
        """
        del tiling
        tower, count = self.tower, 0
        out = np.full((len(sides), tower.unit // tower.merge), -1, np.int32)
        for number, side in enumerate(sides):
            # Queries are learned for each size and come one after the other, so rows are not numbered by lines.
            used = (side // self.ahead) ** 2
            out[number, :used] = np.arange(count, count + used)
            count += used
        out[-1, (self.side // self.patch // self.ahead) ** 2] = count
        return out, count + 1

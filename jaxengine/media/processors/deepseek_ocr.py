"""Processor of DeepSeek-OCR: the whole image in a square with margins, after its tiles if it is large, line by line."""

from __future__ import annotations

import numpy as np

from jaxengine.media.processors.deepseek_ocr2 import DeepseekOcr2Processor
from jaxengine.media.processors.tiles import MAX_TILES, tilings
from jaxengine.media.processors.units import gridless
from jaxengine.models.config.fields import ConfigFields


class DeepseekOcrProcessor(DeepseekOcr2Processor):
    """Processor of DeepseekOCRForCausalLM: as that of DeepSeek-OCR 2, but the embeddings of all tiles are in one grid,
    each line of which has an end, and so are those of the whole image, whose square has the tower's size even if images
    are not cut.
    """

    defaults = {**DeepseekOcr2Processor.defaults, "tile_size": 640}

    def read_tile_size(self, fields: ConfigFields) -> None:
        """Read and set the side of tiles, `tile_size`. Raises ModelConfigError unless it is a multiple of the pixels of
        a row, and at most the tower's size.
        """
        size, ahead = fields.integer("tile_size"), self.ahead * self.patch
        if size % ahead or size > self.side:
            raise fields.fail("tile_size", f"a multiple of {ahead}, at most the tower's image_size {self.side}")
        self._tile_side = size

    @property
    def tile_side(self) -> int:
        return self._tile_side

    def whole_side(self, crops: bool) -> int:
        """Return the side in pixels of the whole image's square, which is the same whether images are cut."""
        del crops
        return self.side

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        whole, tile = (side // self.patch // self.ahead for side in (self.side, self.tile_side))
        first = whole * (whole + 1) + 1
        cut = {rows * tile * (columns * tile + 1) for rows, columns in tilings(2, MAX_TILES)}
        allowed = f"{first}, and for R lines of C tiles {tile} * R * ({tile} * C + 1) more"
        return gridless(num_rows, grid, num_rows - first in {0, *cut}, allowed)

    def numbered(self, sides: list[int], tiling: tuple[int, int]) -> tuple[np.ndarray, int]:
        """Return the numbers of the tower's rows in the prompt, i32[squares, rows of a unit], -1 for those that are not
        in it, and how many are: tiles as one grid, the whole image, and the separator. Each line ends with the row for
        its end, of tiles that of the last one.

        sides: rows and columns of patches of each square, the whole image last. tiling: (rows, columns) of tiles.
        """
        tower, (rows, columns) = self.tower, tiling
        lines, tile = tower.lines, sides[0] // self.ahead
        out = np.full((len(sides), tower.unit // tower.merge), -1, np.int32)
        squares = out[:, : lines**2].reshape(-1, lines, lines)
        ends = out[:, lines**2 : -1]
        width = columns * tile + 1
        for number in range(rows * columns):
            (row, column), own = divmod(number, columns), np.arange(tile)
            firsts = (row * tile + own) * width
            squares[number, :tile, :tile] = firsts[:, None] + column * tile + own
            if column == columns - 1:
                ends[number, :tile] = firsts + width - 1
        count = rows * tile * width if rows else 0
        whole = count + np.arange(lines * (lines + 1)).reshape(lines, -1)
        squares[-1], ends[-1] = whole[:, :-1], whole[:, -1]
        out[-1, -1] = count + whole.size
        return out, count + whole.size + 1

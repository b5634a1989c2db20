"""Processor of Granite Docling: a page is resized to the tiling of the nearest aspect ratio, and the whole page, scaled
down, follows several tiles. In the prompt each tile is preceded by its row and column.
"""

from __future__ import annotations

from copy import copy

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.gemma3 import merged_newlines
from jaxengine.media.processors.settings import switch
from jaxengine.media.processors.tiles import MAX_TILES, TilesProcessor
from jaxengine.models.config.fields import ConfigFields

_LIMITS = ("dense_max_scale", "dense_min_aspect", "dense_max_aspect")


class GraniteDoclingProcessor(TilesProcessor):
    """Processor of GraniteDoclingForConditionalGeneration.

    Attributes:
      dense_tiles: limit of the tiles of a dense page; 0 if no page is dense.
      dense_limits: (scale, least, most): a page is dense if its tiles' width over its own is below scale, and its
        aspect ratio (width / height) above least and up to most; 0 for no limit. Without scale and least no page is.
    """

    defaults = {**TilesProcessor.defaults, "size": {"height": 512, "width": 512}, "max_patches": 32}
    config_defaults = {"image_token_id": 100337}
    most_given = 1  # the row and column of further tiles would be unknown
    most_lines = 16  # there are no tokens for further rows and columns
    dense_tiles: int
    dense_limits: tuple[float, float, float]

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, whether pages are cut (crop_to_patches), `dense_tiles`, which is
        dense_max_patches, and `dense_limits`, the fields of _LIMITS, 0 if absent. Raises ModelConfigError for a size
        other than the tower's, for limits out of range, and for a `fine_route` that is true: four times as many
        embeddings are not supported.
        """
        fields.require(fine_route=False)
        super().read_settings(fields)
        self.crops = switch(fields, "crop_to_patches")
        self.dense_tiles = fields.integer("dense_max_patches", 0, minimum=0)
        if self.dense_tiles > MAX_TILES:
            raise fields.fail("dense_max_patches", f"an integer from 0 to {MAX_TILES}")
        scale, least, most = (0.0 if not fields.value(name, 0) else fields.number(name) for name in _LIMITS)
        self.dense_limits = scale, least, most

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the item of a black page with the most tiles, those of dense pages among them, or of `size`, (height,
        width) in pixels.
        """
        if size is not None or self.max_tiles == 1 or self.dense_tiles <= self.max_tiles:
            return super().largest(modality, size, num_frames)
        all_dense = copy(self)
        all_dense.max_tiles, all_dense.dense_tiles = self.dense_tiles, 0
        return all_dense.largest(modality)

    def tiling(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the base class's (rows, columns) of tiles, least to most, or, for pages within dense_limits, (1, 1) if
        `dense_tiles` is 1, and otherwise those with `dense_tiles` as the limit. height, width: of the page, in pixels.
        """
        found = super().tiling(height, width, least, most)
        scale, narrowest, widest = self.dense_limits
        ratio = width / height
        if (
            not self.dense_tiles
            or not (scale or narrowest)
            or (narrowest and ratio <= narrowest)
            or (widest and ratio > widest)
            or (scale and found[1] * self.side / width >= scale)
        ):
            return found
        if self.dense_tiles == 1:
            return 1, 1
        return super().tiling(height, width, min(least, self.dense_tiles), self.dense_tiles)

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a page (`item`): the placeholders of each tile after its row and column, with a line
        break after each line, then, after several tiles, those of the whole page.
        """
        grid = self.side // self.patch
        rows, columns = item.grid[1] // grid, item.grid[2] // grid
        fake, whole = self.ids("<fake_token_around_image>"), self.ids("<global-img>")
        embeddings = [self.image_id] * (self.tower.unit // self.tower.merge)
        pieces = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [*fake, *self.ids(f"<row_{row}_col_{column}>"), *embeddings]
            # An empty line follows the last row of several tiles.
            pieces += self.ids("\n\n" if row == rows and rows * columns > 1 else "\n")
        return pieces if rows == columns == 1 else [*pieces, *fake, *whole, *embeddings, *fake]

    def joined(self, token_ids: list[int], owners: list[int]) -> tuple[list[int], list[int]]:
        """Return (token ids, owners) with newlines after pages merged with those next to them in the prompt."""
        return merged_newlines(token_ids, owners, self.tokenizer)

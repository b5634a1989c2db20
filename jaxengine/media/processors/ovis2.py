"""Processor of Ovis2: images are cut into tiles, which the whole image, scaled down, precedes. Indicators, which are
embeddings of the tower's, stand around and between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import switch
from jaxengine.media.processors.text_placeholder import TextPlaceholderProcessor
from jaxengine.media.processors.tiles import tilings
from jaxengine.models.config.fields import ConfigFields
from jaxengine.scheduler.base.errors import RequestError

_IDS = "visual_indicator_token_ids"
_TOKENS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
NUM_INDICATORS = len(_TOKENS)
_START, _GRID, _COLUMN, _ROW, _END = range(NUM_INDICATORS)
# Share of an image's area that enough tiles keep.
_ENOUGH = 0.9


class Ovis2Processor(TextPlaceholderProcessor):
    """Processor of Ovis2ForConditionalGeneration. In a prompt the text <image> stands for an image; it need not be a
    token.
    """

    config_defaults = {"image_token_id": 151665, _IDS: [*range(151666, 151671)]}
    most_given = 1  # what stands between further tiles would be unknown

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, set <image> as the placeholder text, and set `indicators`, their token ids.
        Raises ModelConfigError or ModelFileError for missing or invalid settings, and for ids that are not those of the
        tokenizer's indicators.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self.place_text(Path(folder), "image_token", "<image>")
        listed, found = self.config_fields.value(_IDS), [self.ids(token) for token in _TOKENS]
        ids = [each[0] for each in found if len(each) == 1]
        is_list = isinstance(listed, (list, tuple)) and all(type(each) is int for each in listed)
        if not is_list or sorted(listed) != sorted(ids):
            raise self.config_fields.fail(_IDS, f"the ids of {', '.join(_TOKENS)}")
        self.indicators = tuple(ids)
        # Row of each indicator after those of a unit's patches.
        self._places = [list(listed).index(each) for each in ids]

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles, whether there are any (crop_to_patches, by default False), and how they are
        chosen (use_covering_area_grid). Raises ModelConfigError for invalid ones.
        """
        super().read_settings(fields)
        self.crops = switch(fields, "crop_to_patches", False)
        self.covers = switch(fields, "use_covering_area_grid")

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        return (self.image_id, *self.indicators)

    def largest_size(self) -> tuple[int, int]:
        height, width = super().largest_size()
        # Of an image that is just as large as many tiles, one tile fewer keeps enough.
        return 2 * height, 2 * width

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return the units of TilesProcessor.units with the whole image first, and (rows, columns) of its tiles."""
        units, size = super().units(picture, options)
        return [*units[-1:], *units[:-1]], size

    def tiling(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of the fewest tiles that keep 0.9 of an image's area when each is fitted to a
        square of the tower's, or of those that keep most of it; with use_covering_area_grid false, the tiling of the
        nearest aspect ratio.

        height, width: size of the image in pixels. As in transformers, what is measured for rows and columns of tiles
        is the image cut into as many columns and rows, and `least` counts for the nearest aspect ratio alone.
        """
        if not self.covers:
            return super().tiling(height, width, least, most)
        kept = {
            (rows, columns): kept_share(height, width, columns, rows, self.side) for rows, columns in tilings(1, most)
        }
        return best_of(kept)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], for the tower; its rows include those of indicators.

        most: limit of patches, if any. Raises RequestError for an invalid option, other values, extreme aspect ratios,
        and more patches.
        """
        made = super().process(modality, value, options, most)
        per_unit, unit = self.tower.vit.num_patches, self.tower.unit
        by_unit = made.patches.reshape(-1, per_unit, made.patches.shape[1])
        by_unit = np.pad(by_unit, ((0, 0), (0, unit - per_unit), (0, 0)))
        count = per_unit // self.tower.merge
        rows, number = np.full((len(by_unit), unit // self.tower.merge), -1, np.int32), 0
        for index, indicator in self._sequence(made.grid):
            first = 0 if indicator is None else count + self._places[indicator]
            size = count if indicator is None else 1
            rows[index, first : first + size] = number + np.arange(size)
            number += size
        patches = by_unit.reshape(-1, made.patches.shape[1])
        return Processed(patches, np.zeros((0, len(patches)), np.int32), rows.ravel(), number, made.grid)

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): indicators, and placeholders for the embeddings of each unit."""
        atoms = [self.image_id] * (self.tower.vit.num_patches // self.tower.merge)
        sequence = self._sequence(item.grid)
        return [token for _, each in sequence for token in (atoms if each is None else [self.indicators[each]])]

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        rows, side = self.tower.vit.num_patches // self.tower.merge + 3, self.side // self.patch
        if grid is not None or num_rows != rows:
            problem = f"embeddings of an image of this model must be {rows}, of one that is not cut, without a grid"
            raise RequestError(f"{problem}; got {num_rows}", param="image")
        return 1, side, side

    def _sequence(self, grid: tuple[int, int, int]) -> Iterator[tuple[int, int | None]]:
        """Yield (unit, None for its patches or the indicator) of an image in the order of its prompt: START, the whole
        image (unit 0) and GRID; then the tiles, if there are several, each but the last followed by COLUMN or, at the
        end of a line, ROW; then END. START, GRID and END have unit 0. grid: of all tiles, in patches.
        """
        rows, columns = (length // self.tower.vit.grid for length in grid[1:])
        yield from ((0, _START), (0, None), (0, _GRID))
        for index in range(1, 1 + rows * columns if rows * columns > 1 else 0):
            yield index, None
            if index % columns:
                yield index, _COLUMN
            elif index < rows * columns:
                yield index, _ROW
        yield 0, _END


def best_of(kept: Mapping[tuple[int, int], float]) -> tuple[int, int]:
    """Return the (rows, columns) of the fewest tiles that keep more than _ENOUGH of an image's area, or without any of
    those that keep most of it. kept: the share that each keeps.
    """
    enough = [tiling for tiling, share in kept.items() if share > _ENOUGH]
    if enough:
        return min(enough, key=lambda tiling: (tiling[0] * tiling[1], -kept[tiling]))
    return min(kept, key=lambda tiling: (-kept[tiling], tiling[0] * tiling[1]))


def kept_share(height: int, width: int, rows: int, columns: int, side: int) -> float:
    """Return the share of an image's area that is left if it is cut into rows and columns, the last ones larger, and
    each tile whose longer side exceeds `side` pixels is reduced to it.
    """
    tall, wide, area = height // rows, width // columns, 0.0
    for row in range(rows):
        for column in range(columns):
            h = height - row * tall if row == rows - 1 else tall
            w = width - column * wide if column == columns - 1 else wide
            long, short = max(h, w), min(h, w)
            area += side * (short / long * side) if long > side else long * short
    return area / (height * width)

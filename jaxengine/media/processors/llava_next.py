"""Processor of LLaVA-NeXT: the whole image, scaled down, and its tiles, for which it is fitted into the best tiling
with black margins.

An image is represented by the whole and then, line by line, by the patches of all tiles except the black ones; a
newline embedding follows each line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.llava import LlavaProcessor, middle
from jaxengine.media.processors.settings import Pixels, are_sizes, tiles_of
from jaxengine.media.processors.units import gridless
from jaxengine.models.config.fields import ConfigFields

_NAME = "image_grid_pinpoints"
_MAX_TILES, _MAX_PINPOINTS = 64, 256


class LlavaNextProcessor(LlavaProcessor):
    """Processor of LlavaNextForConditionalGeneration.

    Attributes:
      pinpoints: transformers' image_grid_pinpoints, for checkpoints that have none in either file.
      tilings: allowed (rows, columns) of tiles.
    """

    pinpoints: Sequence[Sequence[int]] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    tilings: tuple[tuple[int, int], ...]

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the settings of LLaVA, except `pads`, which is False whatever do_pad says, and the tilings
        (image_grid_pinpoints). crop_size, too, must be the tower's image_size, if it is given.

        Raises ModelConfigError for sizes other than the tower's, for tilings that differ from config.json's, and for
        more than _MAX_TILES tiles.
        """
        super().read_settings(fields)
        # do_pad makes squares in LLaVA 1.5; here it only concerns batches.
        self.pads = False
        if set(self.size.values()) != {self.side}:
            raise fields.fail("size", f"{self.side}, the tower's image_size")
        # transformers' tiles have the size of crops, if one is said, also where nothing is cropped.
        if fields.value("crop_size", None) not in (None, self.side, {"height": self.side, "width": self.side}):
            raise fields.fail("crop_size", f"{self.side}, the tower's image_size")
        ours = self._pinpoints(self.config_fields, self.pinpoints)
        listed = self._pinpoints(fields, ours)
        if sorted(map(list, listed)) != sorted(map(list, ours)):
            raise fields.fail(_NAME, "that of config.json")
        self.tilings = tuple((height // self.side, width // self.side) for height, width in listed)
        if max(rows * columns for rows, columns in self.tilings) > _MAX_TILES:
            raise fields.fail(_NAME, f"of at most {_MAX_TILES} tiles each")

    def _pinpoints(self, fields: ConfigFields, default: Any) -> Any:
        """Return the sizes of tilings in pixels, a list of [height, width]; `default` if the field is missing.

        Raises ModelConfigError for other forms, and for sides that are not multiples of the tower's image_size.
        """
        listed = fields.value(_NAME, default)
        if not are_sizes(listed, _MAX_PINPOINTS) or any(side % self.side for each in listed for side in each):
            raise fields.fail(_NAME, f"a list of [height, width], all multiples of the tower's image_size {self.side}")
        return listed

    def largest_size(self) -> tuple[int, int]:
        rows, columns = max(self.tilings, key=lambda tiling: tiling[0] * tiling[1])
        return rows * self.side, columns * self.side

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's squares and (rows, columns) of its tiles: first the whole image, cropped to a square, then
        the tiles of the best tiling, into which it is fitted with black margins.

        picture: uint8[H, W, 3]. options: ignored.
        """
        del options
        side = self.side
        rows, columns = self._tiling(*picture.shape[:2])
        canvas = on_canvas(self.pixels, picture, rows * side, columns * side)
        tiles = tiles_of(canvas, rows, columns)
        whole = self.pixels.resized(picture, side, side)
        return [middle(whole, side), *tiles], (rows, columns)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles for the tower; its rows leave out black margins, and include
        the newline after each line.

        most: limit of patches, if any. Raises RequestError for any option, other values, extreme aspect ratios, and
        more patches.
        """
        made = super().process(modality, value, options, most)
        height, width, _ = value.shape
        _, lines, columns = (side * self.tower.lines // self.tower.vit.grid for side in made.grid)
        span = self._without_black(height, width, lines, columns)
        return self.arranged(self.with_ends(made.patches), (1, lines, columns), span)

    def with_ends(self, patches: np.ndarray) -> np.ndarray:
        """Return the patches of each unit, f32[P, F], followed by zeros in the places that the tower has for the ends
        of its lines.
        """
        count, unit = self.tower.vit.num_patches, self.tower.unit
        by_unit = np.pad(patches.reshape(-1, count, patches.shape[1]), ((0, 0), (0, unit - count), (0, 0)))
        return by_unit.reshape(-1, patches.shape[1])

    def arranged(self, patches: np.ndarray, size: tuple[int, int, int], span: tuple[int, int, int, int]) -> Processed:
        """Return the item of an image's patches, f32[P, F] with places for ends of lines: all rows of the whole image,
        then those of the tiles within `span`, (first line, first column, lines, columns), line by line across tiles,
        each line followed by its end. Ends are in the first tile of each row of tiles, after its own rows.

        size: (1, lines, columns) of all tiles in rows of the tower.
        """
        grid, unit = self.tower.lines, self.tower.unit // self.tower.merge
        whole = grid * grid
        rows, columns = size[1] // grid, size[2] // grid
        top, left, lines, width = span
        # Index of each patch of the canvas, and in an extra column of each line's end; -1 for none.
        placed = np.full((size[1], size[2] + 1), -1, np.int32)
        numbers = whole + np.arange(lines * (width + 1), dtype=np.int32).reshape(lines, width + 1)
        placed[top : top + lines, left : left + width] = numbers[:, :width]
        placed[top : top + lines, -1] = numbers[:, width]
        out = np.full((1 + rows * columns, unit), -1, np.int32)
        out[0, :whole] = np.arange(whole)
        tiles = placed[:, :-1].reshape(rows, grid, columns, grid).swapaxes(1, 2)
        out[1:, :whole] = tiles.reshape(rows * columns, whole)
        # A line's end is stored in the first tile of its row of tiles, as each tile has room for it.
        out[1::columns, whole:] = placed[:, -1].reshape(rows, grid)
        count, no_columns = whole + numbers.size, np.zeros((0, len(patches)), np.int32)
        return Processed(patches, no_columns, out.ravel(), count, size)

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        return gridless(num_rows, grid, True, "any number")

    def _tiling(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) of `tilings` that keeps most of an image's pixels, and of equal ones the smallest.

        height, width: size of the image in pixels, which keeps its aspect ratio.
        """
        side = self.side
        tall, wide = best_size(height, width, [(rows * side, columns * side) for rows, columns in self.tilings])
        return tall // side, wide // side

    @staticmethod
    def _without_black(height: int, width: int, lines: int, columns: int) -> tuple[int, int, int, int]:
        """Return the first line, first column, lines and columns of the patches that are not black margin.

        height, width: size of the image in pixels; lines, columns: numbers of the patches of all tiles. A margin is
        rounded down to whole patches, the same on both sides.
        """
        if width / height > columns / lines:
            cut = (lines - int(round(height * (columns / width), 7))) // 2
            return cut, 0, lines - 2 * cut, columns
        cut = (columns - int(round(width * (lines / height), 7))) // 2
        return 0, cut, lines, columns - 2 * cut


def best_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (height, width) of `sizes`, all in pixels, that keeps most pixels of an image of height x width which
    is fitted into it, with sides rounded down and no more than it has, and of equal ones the one with the fewest pixels
    left over; the first of these.
    """
    best, most_kept, least_waste = sizes[0], 0, math.inf
    for tall, wide in sizes:
        scale = min(wide / width, tall / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = tall * wide - kept
        if kept > most_kept or (kept == most_kept and waste < least_waste):
            best, most_kept, least_waste = (tall, wide), kept, waste
    return best


def on_canvas(pixels: Pixels, picture: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """Return an image, uint8[H, W, 3], fitted into uint8[tall, wide, 3], in the middle of black margins. The side that
    does not fill it is rounded up; of an odd margin the greater part comes after the image.
    """
    height, width = picture.shape[:2]
    by_width, by_height = wide / width, tall / height
    if by_width < by_height:
        fitted = pixels.resized(picture, min(math.ceil(height * by_width), tall), wide)
    else:
        fitted = pixels.resized(picture, tall, min(math.ceil(width * by_height), wide))
    canvas = np.zeros((tall, wide, 3), np.uint8)
    top, left = (tall - len(fitted)) // 2, (wide - fitted.shape[1]) // 2
    canvas[top : top + len(fitted), left : left + fitted.shape[1]] = fitted
    return canvas


class LlavaFramesProcessor(LlavaNextProcessor):
    """LlavaNextProcessor of a model that also takes videos, unless their frames are no squares of the tower."""

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        self.modalities = ("image", "video") if self.reads_frames(Path(folder)) else ("image",)

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        return tuple(self.placeholder_id_of(modality) for modality in self.modalities)

    def placeholder_id_of(self, modality: str) -> int:
        """Return the token of config.json that stands for an image or a video. Raises ModelConfigError if it is missing
        or invalid.
        """
        return self.token_id("video_token_index", "video_token_id") if modality == "video" else self.placeholder_id()

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`): the placeholder once for each embedding."""
        return [self.placeholder_id_of("video")] * item.num_rows

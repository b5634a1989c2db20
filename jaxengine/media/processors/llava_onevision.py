"""Processor of LLaVA-OneVision: LLaVA-NeXT's, with two interpolations: the embeddings of images with many tiles are
reduced to a limit, those of each frame of a video to a quarter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.llava_next import LlavaFramesProcessor, LlavaNextProcessor
from jaxengine.models.config.tower import SHARES

# Images with more than this many times the limit's patches along a side are interpolated.
_TOLERANCE = 1.1


class LlavaOnevisionProcessor(LlavaFramesProcessor):
    """Processor of LlavaOnevisionForConditionalGeneration. All images of a prompt are cut into tiles, as in
    transformers' processor if they are in one list.
    """

    defaults = {**LlavaNextProcessor.defaults, "size": {"height": 384, "width": 384}}
    pinpoints = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles, or a frames.Video, each of whose frames is stretched to a
        tile.

        most: limit of patches, if any. Raises RequestError for any option, other values, extreme aspect ratios, and
        more patches.
        """
        if modality != "video":
            return super().process(modality, value, options, most)
        frames = self.checked_frames(modality, value, options, most)
        patches = self.with_ends(
            self.of_frames._cut([self.of_frames.pixels.resized(frame, self.side, self.side) for frame in frames])
        )
        half = -(-self.tower.vit.grid // 2)
        blocks = [_between(self._canvas(number, 1, 1), half, half) for number in range(len(frames))]
        return self._item(patches, [*blocks, self._line_ends(1)], (len(frames), half, half))

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return an item with the most tiles and, in num_rows, the most embeddings of any image, or the image of
        `size`, (height, width) in pixels; for "video" a video of num_frames
        (LARGEST_FRAMES if None) frames, whatever the size.
        """
        made = super().largest(modality, size, num_frames)
        if modality == "video" or size is not None:
            return made
        grid = self.tower.vit.grid
        lines = (self._size(rows * grid, columns * grid) for rows, columns in self.tilings)
        return made._replace(num_rows=grid**2 + max(rows * (columns + 1) for rows, columns in lines))

    def arranged(self, patches: np.ndarray, size: tuple[int, int, int], span: tuple[int, int, int, int]) -> Processed:
        """Return the item of an image: the whole image, then line by line the patches within `span`, interpolated if
        they are too many, with an end of line after each.

        patches: f32[P, F] with places for ends of lines. size: (1, lines, columns) of all tiles in patches. span:
        (first line, first column, lines, columns).
        """
        grid = self.tower.vit.grid
        top, left, lines, width = span
        canvas = self._canvas(1, size[1] // grid, size[2] // grid)[top : top + lines, left : left + width]
        cut = _between(canvas, *self._size(lines, width))
        cut = np.concatenate([cut, self._line_ends(cut.shape[1])], axis=2)
        return self._item(patches, [_between(self._canvas(0, 1, 1), grid, grid), cut], size)

    def _size(self, lines: int, columns: int) -> tuple[int, int]:
        """Return the (lines, columns) to which a grid of this size is interpolated: both divided by the root of how
        many times the patches of max_tiles tiles it has, and rounded down; the same if that root is at most _TOLERANCE.
        """
        ratio = math.sqrt(lines * columns / (self.tower.max_tiles * self.tower.vit.num_patches))
        return (int(lines // ratio), int(columns // ratio)) if ratio > _TOLERANCE else (lines, columns)

    def _canvas(self, first: int, rows: int, columns: int) -> np.ndarray:
        """Return the index in the tower of each patch of rows x columns units that are arranged in a rectangle:
        i32[rows * grid, columns * grid].

        first: number of the first unit.
        """
        grid, unit = self.tower.vit.grid, self.tower.unit
        begins = (first + np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)) * unit
        places = np.arange(grid**2, dtype=np.int32).reshape(grid, grid)
        by_tile = begins[:, None, :, None] + places[None, :, None]
        return by_tile.reshape(rows * grid, columns * grid)

    def _line_ends(self, lines: int) -> np.ndarray:
        """Return columns of the tower for `lines` ends of lines, one below the other: i32[6, lines, 1]."""
        return _between(np.full((lines, 1), self.tower.vit.num_patches, np.int32), lines, 1)

    def _item(self, patches: np.ndarray, blocks: Sequence[np.ndarray], size: tuple[int, int, int]) -> Processed:
        """Return the item of `patches`, f32[P, F], with the embeddings of all blocks in order.

        blocks: columns of the tower from `_between`, i32[6, lines, columns] each. size: the item's grid.
        """
        found = np.concatenate([block.reshape(len(block), -1) for block in blocks], axis=1)
        count = found.shape[1]
        columns, rows = np.full((len(found), len(patches)), -1, np.int32), np.full(len(patches), -1, np.int32)
        columns[:, :count], rows[:count] = found, np.arange(count)
        columns[:4, :count] -= rows[:count]
        return Processed(patches, columns, rows, count, size)


class OnevisionImagesProcessor(LlavaOnevisionProcessor):
    """Processor of RForConditionalGeneration and BeeForConditionalGeneration, which take images alone."""

    def reads_frames(self, folder: Path) -> bool:
        """Return False: videos are not supported, whatever settings the folder has. folder: not used."""
        del folder
        return False


def _between(canvas: np.ndarray, lines: int, columns: int) -> np.ndarray:
    """Return columns of the tower, i32[6, lines, columns], that interpolate the rows numbered in `canvas`, i32[H, W],
    to this size. Each place has the rows above left, above right, below left and below right of it, and how far down
    and right it is between them, in units of 1 / SHARES.
    """
    above, below, down = _taps(canvas.shape[0], lines)
    left, right, across = _taps(canvas.shape[1], columns)
    four = [canvas[np.ix_(line, column)] for line in (above, below) for column in (left, right)]
    shares = np.broadcast_arrays(down[:, None], across[None])
    return np.stack([*four, *shares]).astype(np.int32)


def _taps(size: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for `wanted` points spread evenly over `size` pixels, i64[wanted] each: the pixel before, the pixel
    after, and the distance from the former in units of 1 / SHARES. Pixels are areas (torch's align_corners=False).
    """
    scale = np.float32(size) / np.float32(max(wanted, 1))  # of an image without lines there are no points
    at = np.maximum((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    first = np.minimum(at.astype(np.int64), size - 1)
    share = np.round((at - first) * SHARES).astype(np.int64)
    return first, np.minimum(first + 1, size - 1), share

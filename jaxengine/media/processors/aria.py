"""Processor of Aria: an image, or each crop of one that is split, fitted into the upper left corner of a square."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.llava_next import best_size, on_canvas
from jaxengine.media.processors.settings import MAX_SIDE, are_sizes, bad_option, check_options
from jaxengine.media.processors.units import UnitProcessor, boolean_option, gridless, integer_option
from jaxengine.models.config.fields import ConfigFields

_MOST, _LEAST, _SPLIT, _SIZES = NAMES = "max_image_size", "min_image_size", "split_image", "split_resolutions"
# Sides of squares that there are, in pixels.
_SQUARES = 490, 980
# transformers' split_resolutions, in the lesser of these.
_ROWS_COLUMNS = (
    *((1, columns) for columns in range(2, 9)),
    *((2, columns) for columns in (4, 3, 2, 1)),
    *((3, 1), (3, 2), (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1)),
)
_MAX_CROPS, _MAX_SIZES = 64, 256


class AriaProcessor(UnitProcessor):
    """Processor of AriaForConditionalGeneration. A unit is a crop, or a whole image that is not split.

    max_image_size and split_image of a checkpoint's settings are not read: transformers' processor has 980 and False in
    their place, unless a caller says otherwise.

    Attributes:
      most, least: limits of the sides of a crop in pixels. Its longer side is scaled to `most`, then a shorter one than
        `least` is stretched to it.
      splits: whether images are cut into crops.
      sizes: (height, width) in pixels of the canvases that are cut into squares of `most` pixels, from the upper left
        corner on; an image that is split is fitted into one of them.
    """

    defaults = {
        "resample": int(Image.Resampling.BICUBIC),
        "image_mean": (0.5,) * 3,
        "image_std": (0.5,) * 3,
        _LEAST: 336,
    }
    config_defaults = {"image_token_index": 9}
    token_names = ("image_token_id", "image_token_index")
    most: int
    least: int
    splits: bool
    sizes: tuple[tuple[int, int], ...]

    def read_settings(self, fields: ConfigFields) -> None:
        """Set `most` (the side of the largest square that `_squares` returns), `least`, `sizes`, and `splits` to False.
        Raises ModelConfigError if there is no square, if its side is less than min_image_size, and for canvases that
        are no pairs of sides or have more than _MAX_CROPS crops.
        """
        if not (squares := self._squares()):
            raise self.config_fields.fail("projector_patch_to_query_dict", self._allowed())
        self.most, self.least, self.splits = max(squares), fields.integer(_LEAST), False
        if self.least > self.most:
            raise fields.fail(_LEAST, f"at most {self.most} pixels, the side of a square")
        given = fields.value(_SIZES, None)
        usual = [[rows * _SQUARES[0], columns * _SQUARES[0]] for rows, columns in _ROWS_COLUMNS]
        listed = usual if given is None else given
        if not are_sizes(listed, _MAX_SIZES):
            raise fields.fail(_SIZES, f"a list of 1 to {_MAX_SIZES} pairs [height, width] of 1 to {MAX_SIDE} pixels")
        self.sizes = tuple((height, width) for height, width in listed)
        if max(self._num_crops(size, self.most) for size in self.sizes) > _MAX_CROPS:
            raise fields.fail(_SIZES, f"of at most {_MAX_CROPS} squares of {self.most} pixels each")

    def option_names(self) -> tuple[str, ...]:
        return NAMES[:3]

    def with_options(self, options: Mapping[str, Any]) -> Any:
        """Return a copy with the options' `most`, `least`, whose default is its own but at most `most`, and `splits`.
        Raises RequestError for unknown or invalid options.
        """
        check_options(options, self.option_names())
        found = copy(self)
        found.most = integer_option(options, _MOST, self.most, MAX_SIDE)
        if found.most not in self._squares():
            raise bad_option(_MOST, found.most, self._allowed())
        if found.most != self.most and max(self._num_crops(size, found.most) for size in self.sizes) > _MAX_CROPS:
            raise bad_option(_MOST, found.most, f"a side with at most {_MAX_CROPS} crops")
        found.least = integer_option(options, _LEAST, min(self.least, found.most), found.most)
        found.splits = boolean_option(options, _SPLIT, self.splits)
        return found

    def largest_size(self) -> tuple[int, int]:
        if not self.splits:
            return self.most, self.most
        return max(self.sizes, key=lambda size: self._num_crops(size, self.most))

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], for the tower: the image itself or, if it is split, the squares of the
        size of `sizes` that suits it best.

        options: mm_processor_kwargs, names of `option_names`. most: limit of patches, if any. Raises RequestError for
        other options and values, extreme aspect ratios, and more patches.
        """
        height, width = self.checked_size(modality, value, options)
        own = self.with_options(options)
        size, side, unit = best_size(height, width, self.sizes), own.most, self.tower.unit
        check_room(modality, (self._num_crops(size, side) if own.splits else 1) * unit, most)
        crops = [value]
        if own.splits:
            canvas = on_canvas(self.pixels, value, *size)
            crops = [
                canvas[top : top + side, left : left + side]
                for top in range(0, size[0], side)
                for left in range(0, size[1], side)
            ]
        across = side // self.patch
        patches, places = self._placed(map(own._fitted, crops), len(crops), across)
        count, every = self._squares()[side], unit // self.tower.merge
        rows = np.full((len(crops), every), -1, np.int32)
        rows[:, :count] = np.arange(len(crops) * count).reshape(-1, count)
        return Processed(patches, places, rows.ravel(), len(crops) * count, (1, across, across * len(crops)))

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        count, side = self._squares()[self.most], self.most // self.patch
        gridless(num_rows, grid, num_rows % count == 0, f"a multiple of {count}")
        return 1, side, side * (num_rows // count)

    def _squares(self) -> dict[int, int]:
        """Number of embeddings of a square by its side in pixels, of those sides that the tower has one for."""
        queries = dict(self.tower.queries)
        counts = {side: queries.get((side // self.patch) ** 2) for side in _SQUARES}
        return {side: count for side, count in counts.items() if count is not None}

    def _allowed(self) -> str:
        """Return the text for errors that says what max_image_size may be, or, without any allowed side, what the tower
        must have.
        """
        if squares := self._squares():
            return f"{' or '.join(map(str, squares))}, of whose patches config.json has a number of queries"
        return f"with the number of patches of a square of {_SQUARES[0]} or {_SQUARES[1]} pixels"

    @staticmethod
    def _num_crops(size: tuple[int, int], side: int) -> int:
        """Number of squares of `side` pixels that cover a canvas, (height, width) in pixels."""
        return math.ceil(size[0] / side) * math.ceil(size[1] / side)

    def _fitted(self, crop: np.ndarray) -> np.ndarray:
        """Return a crop, uint8[H, W, 3], scaled to a longer side of `most` and a shorter one of at least `least`
        pixels, and normalised, f32[H', W', 3]: whole patches, with black pixels at the right and at the bottom of those
        that it fills in part.
        """
        patch = self.patch
        scale = self.most / max(crop.shape[:2])
        height, width = (max(int(each * scale), self.least) for each in crop.shape[:2])
        height, width = (height, self.most) if crop.shape[1] >= crop.shape[0] else (self.most, width)
        high, wide = (min(-(-each // patch), self.most // patch) for each in (height, width))
        canvas = np.zeros((high * patch, wide * patch, 3), np.uint8)
        fitted = self.pixels.resized(crop, height, width)[: high * patch, : wide * patch]
        canvas[: len(fitted), : fitted.shape[1]] = fitted
        return self.normalized(canvas)

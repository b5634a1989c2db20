"""Processor of LFM2-VL: an image keeps about its aspect ratio; a large one is cut into tiles, which the whole image,
scaled down, follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.grids import MAX_ASPECT_RATIO, GridProcessor, check_ratio
from jaxengine.media.processors.settings import (
    IMAGES,
    MAX_SIDE,
    OPTIONS,
    Pixels,
    check_options,
    check_pictures,
    read_settings,
    switch,
    tiles_of,
)
from jaxengine.media.processors.units import boolean_option, integer_option
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

_MOST_TILES, _MOST_TOKENS = 64, 1 << 14
_BILINEAR = 2
# Integers of the settings that a request may override: name -> transformers' value, and the largest allowed.
_INTEGERS = {
    "min_tiles": (2, _MOST_TILES),
    "max_tiles": (10, _MOST_TILES),
    "min_image_tokens": (64, _MOST_TOKENS),
    "max_image_tokens": (256, _MOST_TOKENS),
}
_BOOLEANS = ("do_image_splitting", "use_thumbnail")
_PAIRS = (("min_tiles", "max_tiles"), ("min_image_tokens", "max_image_tokens"))


class Lfm2VlProcessor(GridProcessor):
    """Processor of Lfm2VlForConditionalGeneration.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with its tower's sizes.
      tokenizer: of the model; None raises ModelConfigError.

    Attributes:
      limits: values of _INTEGERS and _BOOLEANS.
      tile: side of a tile in pixels.
      tolerance: an image is cut if it has more than this many times the pixels of max_image_tokens.
    """

    colours_last = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's placeholder token (image_token_id, 396 by default), pixel transform (by default
        bilinear, mean and deviation 0.5), limits and tile size. Raises ModelConfigError without a tokenizer and for an
        invalid placeholder token, ModelFileError for missing or invalid settings.
        """
        if tokenizer is None:
            raise ModelConfigError("this model's images need its tokenizer: leave skip_tokenizer_init False")
        super().__init__(model_config)
        self.tokenizer = tokenizer
        self.token_ids = {"image": ConfigFields(config_json).integer("image_token_id", 396, minimum=0)}
        self.check_token_ids(model_config)
        path, found = read_settings(Path(folder), IMAGES)
        with errors_of(path):
            half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
            self.pixels = Pixels.read(found.with_defaults(**half, resample=_BILINEAR))
            self._read_sizes(found)
        self.limits = self._limits({})
        about = f"{self.limits} {self.tile} {self.tolerance}"
        self.settings = f"{type(self).__name__} {self.pixels!r} {about} {self.tower!r}"

    def _read_sizes(self, fields: ConfigFields) -> None:
        """Read the settings by which images are cut, and set tile (tile_size, 512 by default), tolerance
        (max_pixels_tolerance, 2) and limits (the fields of _INTEGERS and _BOOLEANS).

        Raises ModelConfigError for settings that are out of range, for a least number above its largest, for an
        encoder_patch_size or downsample_factor other than the tower's, for a tile that is no multiple of a tower's row
        or above MAX_SIDE, and for a do_pad that is false.
        """
        tower = self.tower
        fields.require(do_pad=True)
        for name, default, wanted in (
            ("encoder_patch_size", 16, tower.patch_size),
            ("downsample_factor", 2, tower.spatial_merge_size),
        ):
            if fields.integer(name, default) != wanted:
                raise fields.fail(name, f"{wanted}, the tower's")
        self.tile = fields.integer("tile_size", 512)
        if self.tile > MAX_SIDE or self.tile % self.factor:
            raise fields.fail("tile_size", f"a multiple of {self.factor} pixels, a row of the tower, up to {MAX_SIDE}")
        self.tolerance = fields.number("max_pixels_tolerance", 2.0)
        self.limits = {name: fields.integer(name, default) for name, (default, _) in _INTEGERS.items()}
        for name, (_, most) in _INTEGERS.items():
            if self.limits[name] > most:
                raise fields.fail(name, f"1 to {most}")
        for least, most in _PAIRS:
            if self.limits[least] > self.limits[most]:
                raise fields.fail(least, f"at most {most}, {self.limits[most]}")
        self.limits |= {name: switch(fields, name) for name in _BOOLEANS}

    def option_names(self) -> tuple[str, ...]:
        return (*_INTEGERS, *_BOOLEANS)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.limits = self._limits(options)
        return found

    def _limits(self, options: Mapping[str, Any]) -> dict[str, int]:
        """Return a copy of `limits` overridden by `options`; a minimum that is not in options is lowered to its
        maximum.

        Raises RequestError for an invalid option, and for a minimum in options above its maximum.
        """
        found: dict[str, int] = {
            name: integer_option(options, name, self.limits[name], most) for name, (_, most) in _INTEGERS.items()
        }
        for least, most in _PAIRS:
            if found[least] > found[most]:
                if least in options:
                    problem = f"{OPTIONS}.{least} must be at most {most}, {found[most]}, got {found[least]}"
                    raise RequestError(problem, param=OPTIONS, value=found[least])
                found[least] = found[most]
        return found | {name: boolean_option(options, name, bool(self.limits[name])) for name in _BOOLEANS}

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Cut an image, uint8[H, W, 3], into crops, and the crops into patches.

        The crops are the image's tiles line by line, and then, unless the options leave it out, the whole image. An
        image that is not tiled is one crop. options: values by name (see option_names). most: largest number of
        patches; None for no limit. Raises RequestError for unknown options, invalid values, extreme aspect ratios, and
        images of more than `most` patches.
        """
        check_options(options, self.option_names())
        check_pictures(modality, value, self.modalities, 3)
        limits = self._limits(options)
        whole, (rows, columns) = self._cut_of(value.shape[0], value.shape[1], limits)
        check_room(modality, sum(math.prod(grid) for grid in self._grids(whole, rows, columns, limits)), most)
        crops: list[np.ndarray] = []
        if rows:
            side = self.tile
            fine = self.pixels.resized(value, rows * side, columns * side)
            crops += tiles_of(fine, rows, columns)
        if _has_whole(rows, columns, limits):
            crops.append(self.pixels.resized(value, *whole))
        made = [self.cut(self.pixels.normalized(crop[None])) for crop in crops]
        return self.joined_crops(made, made[0], (rows, columns))

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return an image with at least as many patches as any, or one of `size`, (height, width) in pixels, with
        patches f32[P, 0].

        Raises RequestError for an extreme aspect ratio.
        """
        limits = self.limits
        if size is not None:
            check_ratio(*size)
            whole, (rows, columns) = self._cut_of(*size, limits)
        else:
            whole = self.factor, self.factor * _most_rows(limits["min_image_tokens"], limits["max_image_tokens"])
            tiles = _layouts(limits["min_tiles"], limits["max_tiles"]) if _splits(limits) else ()
            # Without the whole after them, tiles may have fewer patches than an image that is not cut.
            rows, columns = max(
                ((0, 0), *((down, across) for across, down in tiles)),
                key=lambda cut: sum(map(math.prod, self._grids(whole, *cut, limits))),
            )
        made = [
            self.processed(np.empty((high * wide, 0), np.float32), (1, high, wide))
            for high, wide in self._grids(whole, rows, columns, limits)
        ]
        return self.joined_crops(made, made[0], (rows, columns))

    def _grids(
        self, whole: tuple[int, int], rows: int, columns: int, limits: Mapping[str, int]
    ) -> list[tuple[int, int]]:
        """Return (height, width) in patches of each crop: rows * columns tiles, and the whole image if it is encoded.
        whole: its size in pixels.
        """
        patch = self.tower.patch_size
        tiles = [(self.tile // patch, self.tile // patch)] * (rows * columns)
        return tiles + [(whole[0] // patch, whole[1] // patch)] * _has_whole(rows, columns, limits)

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an image (`item`): its crops, each after its name if there are several, between the
        start and end tokens, with -1 for each embedding.
        """
        merge = self.tower.spatial_merge_size
        crops = [(high // merge) * (wide // merge) for high, wide in item.crops or (item.grid[1:],)]
        first = item.crops[0] if item.crops else item.grid[1:]
        high, wide = item.grid[1] // first[0], item.grid[2] // first[1]
        if high * wide == 1:
            return self.between("<|image_start|>", crops[0], "<|image_end|>")
        pieces = [self.encoded("<|image_start|>")]
        for number, count in enumerate(crops):
            row, column = number // wide + 1, number % wide + 1
            name = f"<|img_row_{row}_col_{column}|>" if number < high * wide else "<|img_thumbnail|>"
            pieces += [self.encoded(name), np.full(count, -1)]
        return np.concatenate([*pieces, self.encoded("<|image_end|>")])

    def _cut_of(self, height: int, width: int, limits: Mapping[str, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return ((height, width) in pixels of the whole image after resizing, (rows, columns) of its tiles, (0, 0) for
        none) for an image of height x width pixels. It is cut, if the limits allow tiles, when it has more than
        max_image_tokens times `tolerance` embeddings: into the tiles whose aspect ratio is nearest to the image's, of
        equally near ones the last that have less than twice its area, else the first.

        Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        whole, factor = self._whole_size(height, width, limits), self.factor
        high, wide = (max(self.tower.patch_size, round(side / factor) * factor) for side in (height, width))
        if not _splits(limits) or high * wide <= limits["max_image_tokens"] * factor**2 * self.tolerance:
            return whole, (0, 0)
        best, nearest = (1, 1), math.inf
        for columns, rows in _layouts(limits["min_tiles"], limits["max_tiles"]):
            distance = abs(width / height - columns / rows)
            fits = width * height > 0.5 * self.tile**2 * rows * columns
            if distance < nearest or (distance == nearest and fits):
                best, nearest = (rows, columns), distance
        return whole, best

    def _whole_size(self, height: int, width: int, limits: Mapping[str, int]) -> tuple[int, int]:
        """Return (height, width) in pixels of the whole image after resizing, multiples of `factor`, with at most
        max_image_tokens embeddings and, unless that needs more, at least min_image_tokens. Sides are rounded to the
        nearest multiple if that fits; else the image is scaled, keeping its aspect ratio, to the limit, and sides are
        rounded down to fit the maximum or up to reach the minimum.
        """
        factor = self.factor
        least, most = (limits[f"{end}_image_tokens"] * factor**2 for end in ("min", "max"))
        high, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
        if high * wide > most:
            beta = math.sqrt(height * width / most)
            return _floored(height / beta, factor), _floored(width / beta, factor)
        if high * wide < least:
            beta = math.sqrt(least / (height * width))
            return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor
        return high, wide


def _floored(length: float, factor: int) -> int:
    """Return the largest multiple of factor that is at most `length`, but at least factor."""
    return max(factor, math.floor(length / factor) * factor)


def _splits(limits: Mapping[str, int]) -> bool:
    """Whether large images are cut into tiles."""
    return bool(limits["do_image_splitting"]) and not limits["min_tiles"] == limits["max_tiles"] == 1


def _has_whole(rows: int, columns: int, limits: Mapping[str, int]) -> bool:
    """Whether the whole image is encoded: without tiles, and after several tiles if use_thumbnail."""
    return rows * columns == 0 or (rows * columns > 1 and bool(limits["use_thumbnail"]))


@lru_cache(maxsize=256)
def _layouts(least: int, most: int) -> list[tuple[int, int]]:
    """Return all (columns, rows) with `least` to `most` tiles, sorted by their number; the list is cached.

    The order of layouts with equally many tiles decides where an image is equally near to both: transformers uses the
    order of a Python set of them, and so does this.
    """
    sides = [
        (n, columns, rows) for n in range(least, most + 1) for columns in range(1, n + 1) for rows in range(1, n + 1)
    ]
    return sorted({(columns, rows) for _, columns, rows in sides if least <= columns * rows <= most}, key=math.prod)


def _most_rows(least: int, most: int) -> int:
    """Return an upper bound of the embeddings of a whole image: `most`, or more where a strip is rounded to at least
    one row, or where both sides of a small image are rounded up from `least` embeddings.
    """
    found = max(most, math.isqrt(MAX_ASPECT_RATIO * most))
    for high in range(1, math.isqrt(least) + 2):
        longest = min(least / max(high - 1, 1e-9), math.sqrt(MAX_ASPECT_RATIO * least))
        found = max(found, high * math.ceil(longest))
    return found

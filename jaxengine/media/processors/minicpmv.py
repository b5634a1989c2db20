"""Processor of MiniCPM-V 4.6 and 4.7 and of MiniCPM-OCR: the whole image and, where it is large, slices of it.

The crops (the whole and each slice) keep about the image's aspect ratio. In the prompt each is between its start and
end tokens, after the number of the image; slices are in rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.grids import MAX_ASPECT_RATIO, GridProcessor, check_ratio
from jaxengine.media.processors.minicpmv_canvas import Frame, canvas_positions
from jaxengine.media.processors.settings import (
    IMAGES,
    Pixels,
    check_options,
    check_pictures,
    read_settings,
    switch,
    tiles_of,
    token_text,
)
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object

_OPTION, _MOST_SLICES, _MOST_RESOLUTION = "max_slice_nums", 64, 4096
_MODE, _UPSIZE = "downsample_mode", "small_image_upsize"
# Fields of tokenizer_config.json with the marks around crops and numbers, and transformers' texts of them.
_MARKS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
# Factor by which rounding may increase a slice's aspect ratio.
_SLACK = 1.25


class Crops(NamedTuple):
    """Sizes of an image's crops in pixels.

    Attributes:
      whole: (height, width) of the whole image after resizing.
      each: (height, width) of a slice.
      slices: (rows, columns) of slices; (0, 0) for none.
    """

    whole: tuple[int, int]
    each: tuple[int, int]
    slices: tuple[int, int]


class MiniCPMVProcessor(GridProcessor):
    """Processor of MiniCPMV4_6ForConditionalGeneration and, with canvas positions, MiniCPMV4_7ForConditionalGeneration.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with its tower's sizes.
      tokenizer: of the model; None raises ModelConfigError.

    Attributes:
      resolution: a crop has about this many pixels squared.
      slices: whether images are cut at all.
      most_slices: limit of an image's slices; 1 for none.
      enlarges: whether an image that is not cut is enlarged to `resolution`.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the placeholder token and the checkpoint's settings, and tokenize the texts before and after crops.
        Raises ModelConfigError without a tokenizer and for an invalid config.json, ModelFileError for missing or
        invalid settings, and, if the model has rope with sections, for marks that are not one token each.
        """
        if tokenizer is None:
            raise ModelConfigError("this model's images need its tokenizer: leave skip_tokenizer_init False")
        super().__init__(model_config)
        self.tokenizer = tokenizer
        self.token_ids = {"image": self.read_token(Path(folder), ConfigFields(config_json))}
        self.check_token_ids(model_config)
        self.has_canvas = any(layer.rope is not None and layer.rope.sections for layer in model_config.attention)
        path, found = read_settings(Path(folder), IMAGES)
        with errors_of(path):
            settings = found.with_defaults(**self.defaults_of(found))
            self.pixels = Pixels.read(settings)
            self.check_tower(settings)
            self._read_crops(settings)
        texts = _read_marks(Path(folder))
        # Between two rows of slices.
        self._line_break: list[int] = tokenizer.encode("\n", add_special_tokens=False)
        self.marks = {name: tokenizer.encode(text, add_special_tokens=False) for name, text in texts.items()}
        if self.has_canvas and any(len(ids) != 1 for ids in self.marks.values()):
            raise ModelFileError(folder, f"marks of images must be one token each: {', '.join(texts.values())}")
        about = f"{self.resolution} {self.slices} {self.most_slices} {self.enlarges}"
        self.settings = f"{type(self).__name__} {self.pixels!r} {about} {self.tower!r}"

    def read_token(self, folder: Path, fields: ConfigFields) -> int:
        """Return the placeholder token: `image_token_id` of config.json, `fields`. folder: of the checkpoint, for
        subclasses. Raises ModelConfigError if it is missing or invalid.
        """
        del folder
        return fields.integer("image_token_id", minimum=0)

    def defaults_of(self, fields: ConfigFields) -> Mapping[str, Any]:
        """Return the defaults of settings: mean and deviation of 0.5. fields: the settings, for subclasses."""
        del fields
        return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

    def check_tower(self, fields: ConfigFields) -> None:
        """Raise ModelConfigError for another patch_size or downsample_mode than the tower's."""
        joined = self.tower.joined_after is not None
        fields.require(patch_size=self.tower.patch_size)
        if fields.text(_MODE, "16x" if joined else "4x") != ("16x" if joined else "4x"):
            raise fields.fail(_MODE, "that of config.json")

    def _read_crops(self, fields: ConfigFields) -> None:
        """Read and set how images are cut and enlarged (scale_resolution, 448 by default, slice_mode, max_slice_nums,
        9, and small_image_upsize, "always" or "never"), and `numbers` (use_image_id), whether they are numbered in
        prompts. Raises ModelConfigError for settings that are out of range.
        """
        self.resolution = fields.integer("scale_resolution", 448)
        if self.resolution > _MOST_RESOLUTION:
            raise fields.fail("scale_resolution", f"1 to {_MOST_RESOLUTION}")
        self.slices, self.most_slices = switch(fields, "slice_mode"), fields.integer(_OPTION, 9)
        if self.most_slices > _MOST_SLICES:
            raise fields.fail(_OPTION, f"1 to {_MOST_SLICES}")
        self.most_slices = self._limit({})
        upsize = fields.text(_UPSIZE, "always")
        if upsize not in ("always", "never"):
            raise fields.fail(_UPSIZE, "always or never")
        self.enlarges = upsize == "always"
        self.numbers = switch(fields, "use_image_id")

    def option_names(self) -> tuple[str, ...]:
        return (_OPTION,)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.most_slices = self._limit(options)
        return found

    def _limit(self, options: Mapping[str, Any]) -> int:
        """Return the limit of slices from `options`, or most_slices; 1 if the settings cut no image. Raises
        RequestError for an invalid option.
        """
        limit = integer_option(options, _OPTION, self.most_slices, _MOST_SLICES)
        return limit if self.slices else 1

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Cut an image, uint8[H, W, 3], into crops and these into patches.

        options: only max_slice_nums. most: limit of patches, if any. Raises RequestError for other options and values,
        extreme aspect ratios, and more patches.
        """
        check_options(options, self.option_names())
        check_pictures(modality, value, self.modalities, 3)
        crops = self._crops(value.shape[0], value.shape[1], self._limit(options))
        (rows, columns), (height, width) = crops.slices, crops.each
        grids = [(1, *self._grid(crops.whole)), *[(1, *self._grid(crops.each))] * (rows * columns)]
        check_room(modality, sum(map(self.num_patches, grids)), most)
        made = [self.pixels.resized(value, *crops.whole)]
        if rows:
            fine = self.pixels.resized(value, rows * height, columns * width)
            made += tiles_of(fine, rows, columns)
        cut = [self.cut(self.pixels.normalized(crop[None])) for crop in made]
        return self.joined_crops(cut, cut[-1], crops.slices)

    def num_patches(self, grid: tuple[int, int, int]) -> int:
        """Return the number of patches that a crop of this grid, (1, height, width) in patches, takes in the tower."""
        return math.prod(grid)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return an image with at least as many patches as any, or one of `size`, (height, width) in pixels, with
        patches f32[P, 0].

        Raises RequestError for an extreme aspect ratio.
        """
        if size is not None:
            crops = self._crops(size[0], size[1], self.most_slices)
            grids = [self._grid(crops.whole), *[self._grid(crops.each)] * math.prod(crops.slices)]
        else:
            # With n + 1 slices, a slice has at most 1 / n of the image's aspect ratio: n in one row are possible, too.
            ratios = {n + 1: MAX_ASPECT_RATIO / n for n in range(1, self.most_slices)}
            each = {n: _largest_grid(self.resolution, self.factor, self.tower.patch_size, ratios[n]) for n in ratios}
            whole = _largest_grid(self.resolution, self.factor, self.tower.patch_size, MAX_ASPECT_RATIO)
            count = max(each, key=lambda n: n * math.prod(each[n]), default=0)
            crops = Crops((0, 0), (0, 0), (min(count, 1), count))
            grids = [whole, *[each.get(count, (0, 0))] * count]
        made = [self.processed(np.empty((math.prod(grid), 0), np.float32), (1, *grid)) for grid in grids]
        return self.joined_crops(made, made[-1], crops.slices)

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of one crop's patches, in the order in which the tower joins them: squares within
        squares.

        patches: f32[P, F], merged row by merged row, each line by line. grid: (1, height, width) in patches. seconds:
        not used.
        """
        made = super().processed(patches, grid, seconds)
        inside = np.arange(self.tower.merge)
        row, column = np.zeros_like(inside), np.zeros_like(inside)
        for level in range(self.tower.num_joins):
            digit = inside // 4**level % 4
            row, column = row + (digit // 2 << level), column + (digit % 2 << level)
        within = row * self.tower.spatial_merge_size + column
        order = (np.arange(0, len(made.patches), self.tower.merge)[:, None] + within).reshape(-1)
        return made._replace(patches=made.patches[order], columns=np.ascontiguousarray(made.columns[:, order]))

    def crop_grids(self, item: Processed) -> list[tuple[int, int]]:
        """Return (height, width) of each crop of an item, in embeddings. An image that was given as embeddings is one
        crop.
        """
        merge = self.tower.spatial_merge_size
        return [(height // merge, width // merge) for height, width in item.crops or (item.grid[1:],)]

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder replaced by its image's crops between their start and end tokens, and
        with canvas positions if the model has M-RoPE. items: by modality, in the order of the prompt.

        Raises RequestError for another number of items than placeholders.
        """
        at, order = self.placeholders(np.asarray(token_ids, np.int64), items)
        out: list[int] = []
        positions: list[np.ndarray] = []
        frames: list[Frame] = []
        done = 0
        for place, (modality, number) in zip(at.tolist(), order, strict=True):
            out += token_ids[done:place]
            item = items[modality][number]
            frame = self._append(out, number, item)
            spans = [np.arange(start, end, dtype=np.int32) for start, end in frame.spans]
            positions.append(np.concatenate(spans))
            frames.append(frame)
            done = place + 1
        out += token_ids[done:]
        if not self.has_canvas:
            return Expanded(out, positions, order)
        marks = {self.marks[name][0] for name in list(_MARKS)[:4]} | set(self._line_break)
        places, delta = canvas_positions(out, frames, marks)
        return Expanded(out, positions, order, places, delta)

    def _append(self, out: list[int], number: int, item: Processed) -> Frame:
        """Append the tokens of an image to `out`: its `number` in the prompt, if the checkpoint numbers images, then
        the whole image and, row by row, its slices, each between marks. Return where its crops are in `out`.
        """
        grids, marks, token = self.crop_grids(item), self.marks, self.token_ids["image"]
        if self.numbers:
            counted = self.tokenizer.encode(str(number), add_special_tokens=False)
            out += [*marks["image_id_start_token"], *counted, *marks["image_id_end_token"]]
        columns = item.grid[2] // item.crops[1][1] if len(grids) > 1 else 0
        spans = []
        for index, (height, width) in enumerate(grids):
            kind = "slice" if index else "image"
            if index > 1 and (index - 1) % columns == 0:
                out += self._line_break
            out += marks[f"{kind}_start_token"]
            spans.append((len(out), len(out) + height * width))
            out += [token] * (height * width) + marks[f"{kind}_end_token"]
        return Frame(tuple(spans), tuple(grids), columns)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (height, width) in patches of a crop of `size` pixels."""
        return size[0] // self.tower.patch_size, size[1] // self.tower.patch_size

    def _crops(self, height: int, width: int, most_slices: int) -> Crops:
        """Return the sizes of the crops of an image of height x width pixels: of slices as enlarged to about
        `resolution` squared, and of the whole image as scaled down to that, or without slices also enlarged if
        `enlarges`. most_slices: limit of slices. Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        rows, columns = _slices(height, width, self.resolution, most_slices)
        if not rows:
            return Crops(self._resized(height, width, self.enlarges), (0, 0), (0, 0))
        fine = _rounded(height, rows) / rows, _rounded(width, columns) / columns
        return Crops(self._resized(height, width, False), self._resized(*fine, True), (rows, columns))

    def _resized(self, height: float, width: float, enlarges: bool) -> tuple[int, int]:
        """Return (height, width) in pixels of a crop after resizing, multiples of `factor`. A crop larger than
        `resolution` squared, or any with `enlarges`, is resized to about that many pixels.
        """
        if height * width > self.resolution**2 or enlarges:
            ratio = width / height
            height = int(self.resolution / math.sqrt(ratio))
            width = int(height * ratio)
        return _rounded(height, self.factor), _rounded(width, self.factor)


def _largest_grid(resolution: int, factor: int, patch: int, ratio: float) -> tuple[int, int]:
    """Return a grid, (height, width) in patches of `patch` pixels, with at least as many patches as that of any crop
    whose sides have at most this ratio. resolution, factor: attributes of MiniCPMVProcessor.

    Before rounding to multiples of `factor`, a crop of some height has at most the width that makes `resolution`
    squared.
    """
    longest = math.sqrt(ratio * _SLACK)
    heights = np.arange(max(1, int(resolution / longest)), int(longest * resolution) + 1)
    sides = np.stack([heights, resolution**2 // heights])
    units = np.maximum(np.rint(sides / factor).astype(np.int64), 1)  # as _rounded
    high, wide = units[:, units.prod(axis=0).argmax()].tolist()
    return high * factor // patch, wide * factor // patch


def _rounded(length: float, divisor: int) -> int:
    """Return the multiple of divisor nearest to length, but at least divisor; of two equally near, the even
    multiple.
    """
    return max(round(length / divisor) * divisor, divisor)


def _slices(height: int, width: int, resolution: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of the slices of an image of height x width pixels, about `resolution` squared each; (0,
    0) for none.

    The number of slices is the needed one, or one less or more, at most `most`, whichever allows slices nearest to
    squares; of equal ones those with most rows, then with fewest slices.
    """
    needed = min(math.ceil(width * height / resolution**2), most)
    if needed <= 1:
        return 0, 0
    ratio, best, error = math.log(width / height), (1, 1), math.inf
    for count in (needed - 1, needed, needed + 1):
        if count == 1 or count > most:
            continue
        for rows in (each for each in range(1, count + 1) if count % each == 0):
            found = abs(ratio - math.log(count // rows / rows))
            if found < error or (found == error and rows > best[0]):
                best, error = (rows, count // rows), found
    return best


def _read_marks(folder: Path) -> dict[str, str]:
    """Return the texts named by _MARKS, from the tokenizer_config.json in a checkpoint's folder, its
    extra_special_tokens first, or else transformers'.
    Raises ModelFileError for a value that is not text.
    """
    found = read_object(folder, "tokenizer_config.json") or {}
    extra = found.get("extra_special_tokens")
    told = {**found, **(extra if isinstance(extra, Mapping) else {})}
    path = folder / "tokenizer_config.json"
    return {name: token_text(path, told, name, usual) for name, usual in _MARKS.items()}

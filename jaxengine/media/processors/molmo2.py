"""Processor of Molmo 2: images as a whole and in crops that overlap, frames of a video as a whole. Windows of
neighbouring patches become an embedding each; those of an image's crops are cut from all crops joined to one grid.

Tokens of images and of frames, those between lines and around them included, attend to each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.settings import (
    VIDEOS,
    WHOLE,
    Pixels,
    check_options,
    check_seconds,
    read_settings,
    shown_at,
    token_texts,
)
from jaxengine.media.processors.tiles import MAX_TILES
from jaxengine.media.processors.units import UnitProcessor, check_placeholders, integer_option
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.config.tower import SHARES
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError

_BILINEAR = 2
_PATCH, _COLUMN, _START, _END = "<im_patch>", "<im_col>", "<im_start>", "<im_end>"
_LOW_START, _FRAME_START, _FRAME_END, _LOW = "<low_res_im_start>", "<frame_start>", "<frame_end>", "<im_low>"


class _Form(NamedTuple):
    """Tokens around embeddings, from processor_config.json: whether a column token ends each line of an image's crops,
    of the whole image, and of a frame; the tokens before the whole image, before a frame and after it.
    """

    columns: bool
    whole_columns: bool
    frame_columns: bool
    whole_start: str
    frame_start: str
    frame_end: str


class CropsProcessor(UnitProcessor):
    """Base of the processors of Molmo: the crops of an image, and the windows of patches that become embeddings.

    Attributes:
      max_crops: most crops of an image, besides the whole.
      margins: patches of a crop's side, at the left or top and at the right or bottom, that other crops show in its
        place.
      pooling: (height, width) in patches of a window of an image.
    """

    max_crops: int
    margins: tuple[int, int]
    pooling: tuple[int, int]

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limit of crops (max_crops, 8 by default), their margins (overlap_margins, 4 and 4) and the
        windows of images (pooling_size, 2 by 2). Raises ModelConfigError for a size or a patch other than the tower's,
        a filter other than bilinear, and values out of range.
        """
        self._check_pixels(fields, self.pixels)
        self.max_crops = fields.integer("max_crops", 8)
        if self.max_crops > MAX_TILES:
            raise fields.fail("max_crops", f"from 1 to {MAX_TILES}")
        grid = self.tower.vit.grid
        self.margins = read_pair(fields, "overlap_margins", (4, 4), 0)
        if sum(self.margins) >= grid:
            raise fields.fail("overlap_margins", f"two numbers whose sum is less than a crop's {grid} patches")
        self.pooling = self._read_pooling(fields, (2, 2))

    def _check_pixels(self, fields: ConfigFields, pixels: Pixels) -> None:
        """Raise ModelConfigError for a size or a patch of other pixels than the tower's, and a filter other than
        bilinear.
        """
        self.check_square(fields)
        if fields.integer("patch_size") != self.patch:
            raise fields.fail("patch_size", f"{self.patch}, the tower's")
        if pixels.resample != _BILINEAR:
            raise fields.fail("resample", f"{_BILINEAR}, bilinear")

    def _read_pooling(self, fields: ConfigFields, default: tuple[int, int]) -> tuple[int, int]:
        """Return `pooling_size`, (height, width) of a window in patches. Raises ModelConfigError for windows of more
        patches than the tower takes, and for more windows than it has rows for.
        """
        height, width = found = read_pair(fields, "pooling_size", default, 1)
        grid, rows = self.tower.vit.grid, self.tower.unit // self.tower.merge
        most = len(self.tower.columns)
        if height * width > most or -(-grid // height) * -(-grid // width) > rows:
            allowed = f"two numbers whose product is at most {most}, with at most {rows} windows of a crop"
            raise fields.fail("pooling_size", allowed)
        return found

    def option_names(self) -> tuple[str, ...]:
        return ("max_crops",)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.max_crops = integer_option(options, "max_crops", self.max_crops, MAX_TILES)
        return found

    def num_units(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        rows, columns = self.tiling(height, width, options)
        return 1 + rows * columns

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's squares and (rows, columns) of its crops: first the whole image, stretched to a square,
        then the crops of the image stretched to their canvas.

        picture: uint8[H, W, 3]. options: mm_processor_kwargs. Raises RequestError for an invalid option.
        """
        rows, columns = self.tiling(picture.shape[0], picture.shape[1], options)
        side, step = self.side, self.step * self.patch
        canvas = stretched(picture, (rows - 1) * step + side, (columns - 1) * step + side)
        firsts = itertools.product(range(0, rows * step, step), range(0, columns * step, step))
        crops = [canvas[top : top + side, left : left + side] for top, left in firsts]
        return [stretched(picture, side, side), *crops], (rows, columns)

    @property
    def step(self) -> int:
        """Patches from one crop to the next."""
        return self.tower.vit.grid - sum(self.margins)

    def tiling(self, height: int, width: int, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the (rows, columns) of crops of an image of height x width pixels: the tiling that enlarges least what
        margins leave of it, or where all shrink it, that which shrinks it least; among equal ones the one with the
        fewest crops, then with the fewest rows. Raises RequestError for an invalid option.
        """
        most = integer_option(options, "max_crops", self.max_crops, MAX_TILES)
        found = sorted(tilings_of(most), key=lambda tiling: (tiling[0] * tiling[1], tiling[0]))
        # In float32, as in transformers, where ties are decided by it. Small images leave nothing, or less.
        left = np.asarray([height, width], np.float32) - np.float32(sum(self.margins) * self.patch)
        with np.errstate(divide="ignore"):
            scales = (np.asarray(found, np.float32) * np.float32(self.step * self.patch) / left).min(axis=1)
        if (scales < 1).all():
            return found[int(scales.argmax())]
        return found[int(np.where(scales < 1, np.float32(10e9), scales).argmin())]

    def _patches(self, count: int) -> np.ndarray:
        """Return the numbers of the patches of `count` units, i64[count, grid, grid]."""
        grid = self.tower.vit.grid
        return np.arange(count * grid * grid).reshape(count, grid, grid)

    def _canvas(self, rows: int, columns: int) -> np.ndarray:
        """Return the numbers of the patches of rows x columns crops after one unit, joined to one grid, i64[H, W].
        Where two crops overlap, each lacks the patches of its own margin.
        """
        (before, after), grid = self.margins, self.tower.vit.grid
        numbers = grid * grid + self._patches(rows * columns).reshape(rows, columns, grid, grid)
        numbers[1:, :, :before] = numbers[:, 1:, :, :before] = -1
        numbers[:-1, :, grid - after :] = numbers[:, :-1, :, grid - after :] = -1
        joined = numbers.transpose(0, 2, 1, 3).reshape(-1)
        margin = before + after
        return joined[joined >= 0].reshape(rows * self.step + margin, columns * self.step + margin)

    def _pooled(self, patches: np.ndarray, windows: np.ndarray, grid: tuple[int, int, int]) -> Processed:
        """Return the item of patches f32[P, F] with an embedding for each of the windows i64[n, C'], numbers of patches
        or -1.
        """
        count, merge = len(windows), self.tower.merge
        first = np.arange(count) * merge
        columns = np.full((len(self.tower.columns), len(patches)), -1, np.int32)
        columns[: windows.shape[1], first] = np.where(windows < 0, -1, windows - first[:, None] + SHARES).T
        rows = np.full(len(patches) // merge, -1, np.int32)
        rows[:count] = np.arange(count)
        return Processed(patches, columns, rows, count, grid)

    def largest_size(self) -> tuple[int, int]:
        full = [each for each in tilings_of(self.max_crops) if each[0] * each[1] == self.max_crops]
        rows, columns = max(full, key=self.num_windows)
        margin = sum(self.margins)
        return (rows * self.step + margin) * self.patch, (columns * self.step + margin) * self.patch

    def num_windows(self, tiling: tuple[int, int]) -> int:
        """Return the number of windows of the crops of a tiling, (rows, columns), those at the edges that are cut
        included.
        """
        sides = (count * self.step + sum(self.margins) for count in tiling)
        return math.prod(-(-side // size) for side, size in zip(sides, self.pooling, strict=True))

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return an item with the most crops and, in num_rows, the most embeddings of any image, or the image of
        `size`, (height, width) in pixels; for "video" one of num_frames (LARGEST_FRAMES if None) frames, whatever the
        size.
        """
        made = super().largest(modality, size, num_frames)
        if modality == "video" or size is not None:
            return made
        most = max(map(self.num_windows, tilings_of(self.max_crops)))
        return made._replace(num_rows=made.num_rows - made.grid[1] * made.grid[2] + most)

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return the grid (1, rows, columns) of the windows of an image's crops, which must be given, for num_rows
        embeddings of an image, those of the whole first. Raises RequestError for another number of these.
        """
        whole = math.prod(-(-self.tower.vit.grid // size) for size in self.pooling)
        if grid is None or grid[0] != 1 or whole + grid[1] * grid[2] != num_rows:
            form = f"[1, rows, columns] of its crops' embeddings, which with {whole} of the whole are {num_rows}"
            raise RequestError(f"embeddings of an image of this model need a grid {form}; got {grid}", param="image")
        return grid

    @property
    def first_tokens(self) -> list[int]:
        """Token before a prompt with items: the tokenizer's bos token, else its eos token; none if it has neither."""
        tokens = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return [token for token in tokens if token is not None][:1]


class Molmo2Processor(CropsProcessor):
    """Processor of Molmo2ForConditionalGeneration. A prompt has images, or one video.

    Attributes:
      video_pooling: (height, width) in patches of a window of a frame; None for a checkpoint whose videos are not
        supported.
      max_fps: frames per second of a video that does not say it.
    """

    defaults = {
        "resample": _BILINEAR,
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "size": {"height": 378, "width": 378},
        "patch_size": 14,
    }
    needs_tokenizer = True
    embedded_names = ("image_patch_id", "image_token_id")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings and look up the ids of its tokens. `modalities` has "video" only if
        `video_pooling` is not None. Raises ModelConfigError or ModelFileError for missing or invalid settings, for
        missing tokens, and for an image_patch_id that is not the tokenizer's.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        self.video_pooling, self.max_fps = self._read_videos(Path(folder))
        self.modalities = ("image",) if self.video_pooling is None else ("image", "video")
        self._form = _read_form(Path(folder))
        usual = {f"{modality}_token": f"<|{modality}|>" for modality in self.modalities}
        self._placeholders: dict[str, str] = dict(zip(self.modalities, token_texts(folder, **usual), strict=True))
        joint = _PATCH, _COLUMN, _START, _LOW_START, _FRAME_START, _END, _FRAME_END, _LOW
        found = {text: self.ids(text) for text in (*joint, *self._placeholders.values())}
        self._tokens = {text: ids[0] for text, ids in found.items() if len(ids) == 1}
        self._joint = [self._tokens[text] for text in joint if text in self._tokens]
        form, needed = self._form, [_PATCH, _START, _END, self._form.whole_start, *self._placeholders.values()]
        needed += [_COLUMN] * (form.columns or form.whole_columns or form.frame_columns)
        needed += [form.frame_start, form.frame_end] if "video" in self.modalities else []
        if missing := [text for text in needed if text not in self._tokens]:
            raise ModelConfigError(f"the tokenizer must have the token {missing[0]}")
        if self._tokens[_PATCH] != self.image_id:
            raise self.config_fields.fail("image_patch_id", f"{self._tokens[_PATCH]}, the tokenizer's {_PATCH}")
        self.settings = f"{self.settings} {self.video_pooling} {self._form}"

    def _read_videos(self, folder: Path) -> tuple[tuple[int, int] | None, float]:
        """Return video_pooling (pooling_size of the settings of videos, 3 by 3 by default) and max_fps (2 by default);
        (None, 0) if the checkpoint has no settings of videos, or invalid ones.
        """
        try:
            _, found = read_settings(folder, VIDEOS)
            fields = found.with_defaults(**self.defaults)
            pixels = Pixels.read(fields)
            self._check_pixels(fields, pixels)
            self.set_frames(copy(self), pixels)
            pooling = self._read_pooling(fields, (3, 3))
            return pooling, float(fields.number("max_fps", 2))
        except (ModelConfigError, ModelFileError):
            return None, 0.0

    def placeholder_id(self) -> int:
        return self._tokens[self._placeholders["image"]]

    def placeholder_id_of(self, modality: str) -> int:
        return self._tokens[self._placeholders[modality]]

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], or a frames.Video, one square for each frame, with their times.

        options: mm_processor_kwargs. most: limit of patches, if any. Raises RequestError for unknown options, other
        values, extreme aspect ratios, more patches, and too long a video.
        """
        if modality == "video" and modality in self.modalities:
            frames = self.checked_frames(modality, value, options, most)
            patches = self.of_frames._cut([stretched(frame, self.side, self.side) for frame in frames])
            assert self.video_pooling is not None
            windows, size = _windows(self._patches(len(frames)), self.video_pooling)
            return self._pooled(patches, windows.reshape(-1, windows.shape[-1]), (len(frames), *size))._replace(
                seconds=self._times(value, len(frames))
            )
        made = super().process(modality, value, options, most)
        side = self.tower.vit.grid
        rows, columns = made.grid[1] // side, made.grid[2] // side
        whole, low = _windows(self._patches(1), self.pooling)
        cropped, high = _windows(self._canvas(rows, columns)[None], self.pooling)
        windows = np.concatenate([whole[0], cropped[0]])
        return self._pooled(made.patches, windows, (1, *high))._replace(crops=(low, high))

    def _times(self, video: Any, count: int) -> tuple[float, ...]:
        """Return the seconds at which the `count` frames of a frames.Video are shown, at max_fps frames per second if
        it does not say how many. Raises RequestError for times that `check_seconds` refuses.
        """
        found = shown_at(video, count, self.max_fps).tolist()
        check_seconds(found)
        return tuple(found)

    def pieces(self, item: Processed) -> list[int]:
        form, token = self._form, self._tokens
        low = item.crops[0] if item.crops else _windows(self._patches(1), self.pooling)[1]
        return [
            token[form.whole_start],
            *self._lines(*low, form.whole_columns),
            *(token[_END], token[_START]),
            *self._lines(*item.grid[1:], form.columns),
            token[_END],
        ]

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`): lines of each frame, with its time before it except the first's, which
        `expand` writes.
        """
        form, token, found = self._form, self._tokens, list[int]()
        lines = self._lines(*item.grid[1:], form.frame_columns)
        for number, seconds in enumerate(item.seconds):
            found += self.ids(f" {seconds:.1f} ") if number else []
            found += [token[form.frame_start], *lines, token[form.frame_end]]
        return found

    def _lines(self, rows: int, columns: int, with_ends: bool) -> list[int]:
        """Return the placeholders of `rows` lines, with a token after each if `with_ends`."""
        return ([self.image_id] * columns + [self._tokens[_COLUMN]] * with_ends) * rows

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with its placeholders expanded for its items, given by modality in order, after the
        tokenizer's first token, which is added where it is missing. With a video the prompt's text is tokenized again,
        because the first frame's time belongs to the text before it. `joint` of the result are the positions of all
        tokens of items.

        Raises RequestError for another number of items than placeholders, for several videos, and for a video with
        images.
        """
        pictures, videos = items.get("image", ()), items.get("video", ())
        if len(videos) > (not pictures):
            what = f"{len(videos)} videos" + (f" and {len(pictures)} images" if pictures else "")
            raise RequestError(f"a prompt of this model has images or one video, got {what}", param="prompt")
        found = list(token_ids)
        if videos:
            text, video = self.tokenizer.decode(found, skip_special_tokens=False), self._placeholders["video"]
            check_placeholders("video", video, text.count(video), 1)
            found = self.ids(text.replace(video, f"{videos[0].seconds[0]:.1f} {video}"))
        if pictures or videos:
            first = self.first_tokens
            found = found if found[: len(first)] == first else [*first, *found]
        expanded = super().expand(found, items)
        joint = np.flatnonzero(np.isin(expanded.token_ids, self._joint)).astype(np.int32)
        return expanded._replace(joint=joint if pictures or videos else None)


def stretched(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return uint8[H, W, 3] resized to uint8[height, width, 3], linearly between the two by two pixels around a place,
    however many there are (torch's bilinear interpolation without antialiasing), rounded half to even. In integers:
    next to a half, the rounding of torch's float32 depends on the machine.
    """
    if picture.shape[:2] == (height, width):
        return picture
    (above, below, down), (left, right, across) = (
        _taps(*each) for each in zip(picture.shape[:2], (height, width), strict=True)
    )
    down, across = down[:, None, None], across[:, None]
    upper, lower = (
        picture[rows, left] * (2 * width - across) + picture[rows, right] * across
        for rows in (above[:, None], below[:, None])
    )
    unit = 4 * height * width
    whole, rest = np.divmod(upper * (2 * height - down) + lower * down, unit)
    return (whole + (2 * rest + whole % 2 > unit)).astype(np.uint8)


def _taps(size: int, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for `wanted` places spread evenly over `size` pixels, i64[wanted] each: the pixel before, the pixel after
    (the last one where there is none), and the distance from the former in units of 1 / (2 * wanted).
    """
    first, share = np.divmod(np.maximum((2 * np.arange(wanted) + 1) * size - wanted, 0), 2 * wanted)
    return first, np.minimum(first + 1, size - 1), share


def _windows(patches: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, tuple[int, int]]:
    """Cut grids of patches [N, H, W] into windows of `size`, (height, width): return the patches of each window, row by
    row, [N, rows * columns, height * width], and (rows, columns). Where windows reach beyond the grid, in equal parts
    on both sides but with the larger part at the end, there are -1.
    """
    counts = [-(-side // length) for side, length in zip(patches.shape[1:], size, strict=True)]
    missing = [count * length - side for count, length, side in zip(counts, size, patches.shape[1:], strict=True)]
    padded = np.pad(patches, ((0, 0), *((each // 2, each - each // 2) for each in missing)), constant_values=-1)
    cut = padded.reshape(-1, counts[0], size[0], counts[1], size[1]).swapaxes(2, 3)
    return cut.reshape(len(patches), counts[0] * counts[1], -1), (counts[0], counts[1])


def tilings_of(most: int) -> list[tuple[int, int]]:
    """Return all (rows, columns) of at most `most` crops."""
    sides = range(1, most + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= most]


def read_pair(fields: ConfigFields, name: str, default: tuple[int, int], least: int) -> tuple[int, int]:
    """Return the field `name`, two integers of at least `least`; `default` if it is absent. Raises ModelConfigError for
    other values.
    """
    found = fields.value(name, default)
    right = isinstance(found, (list, tuple)) and len(found) == 2
    if not right or any(type(each) is not int or each < least for each in found):
        raise fields.fail(name, f"two integers >= {least}")
    return found[0], found[1]


def _read_form(folder: Path) -> _Form:
    """Return the tokens around embeddings by the switches in WHOLE, where use_single_crop_col_tokens is by default as
    image_use_col_tokens. Raises ModelFileError for invalid settings.
    """
    fields = ConfigFields(read_object(folder, WHOLE) or {})
    with errors_of(folder / WHOLE):
        columns, frames, start, special = (
            fields.boolean(name, default, null_is_false=True)
            for name, default in (
                ("image_use_col_tokens", True),
                ("video_use_col_tokens", False),
                ("use_single_crop_start_token", True),
                ("use_frame_special_tokens", True),
            )
        )
        whole = (
            fields.boolean("use_single_crop_col_tokens", columns)
            if fields.has("use_single_crop_col_tokens")
            else columns
        )
    around = (_FRAME_START, _FRAME_END) if special else (_START, _END)
    return _Form(columns, whole, frames, _LOW_START if start else _START, *around)

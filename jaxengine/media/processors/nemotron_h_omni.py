"""Processor of Nemotron-H Omni: images and frames of any shape in whole squares of patches, resized without rounding to
bytes. Pairs of a video's frames are separate in the prompt, each with the numbers and times of its frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.radio import RadioProcessor, resized_floats, times_of
from jaxengine.media.processors.settings import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGES,
    VIDEOS,
    Pixels,
    check_options,
    frames_of,
    read_settings,
)
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

_MOST = 1 << 16
_LEAST, _LIMIT, _TARGET = "min_num_patches", "max_num_patches", "video_target_num_patches"
_BICUBIC = int(Image.Resampling.BICUBIC)
# Positions of a prompt that transformers leaves to text when it counts how many patches a context has room for.
_OTHERS = 4


@dataclass(frozen=True)
class Budget:
    """Numbers of patches of an image (least, most) and of a frame (target).

    square: whether frames are stretched to squares.
    """

    least: int
    most: int
    target: int
    square: bool


class NemotronHOmniProcessor(RadioProcessor):
    """Processor of NemotronH_Omni_Reasoning_V3.

    As in vLLM, a configuration's video_pruning_rate, a share of a video's embeddings that transformers leaves out, has
    no effect.

    Attributes:
      pixels: pixel transform of each modality.
      budget: numbers of patches.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the token of images, and set `pixels` and `budget` by the settings of images and of videos. Raises
        ModelConfigError for a missing or invalid token id, ModelFileError for missing or invalid settings.
        """
        super().__init__(config_json, model_config, tokenizer)
        self.pixels, budgets = dict[str, Pixels](), dict[str, Budget]()
        for kind, places in {"image": (IMAGES,), "video": (VIDEOS, IMAGES)}.items():
            path, found = read_settings(Path(folder), *places)
            with errors_of(path):
                self.pixels[kind], budgets[kind] = self._read(kind, found)
        images, frames = budgets["image"], budgets["video"]
        self.budget = Budget(images.least, images.most, frames.target, frames.square)
        self.settings = f"{type(self).__name__} {self.pixels!r} {self.budget!r} {self.tower!r}"

    def _read(self, modality: str, found: ConfigFields) -> tuple[Pixels, Budget]:
        """Return the pixel transform of a modality, and a Budget, from its settings `found`. As in transformers, frames
        are always resized by bicubic interpolation and scaled to 0 to 1, and have no default norm_mean and norm_std.
        The least are min_num_patches (1,024 by default). The most patches are those that max_model_len (16,384) has
        room for, or max_num_patches (13,312) unless 0, if fewer, but never less than the least. A frame has
        video_target_num_patches (1,024), in a square unless video_maintain_aspect_ratio, which is True by default.

        Raises ModelConfigError for invalid settings, and for those that do not fit the tower.
        """
        found.require(patch_size=self.tower.patch_size, downsample_ratio=1 / self.tower.spatial_merge_size)
        mean, std = found.value("norm_mean", None), found.value("norm_std", None)
        if modality == "video":
            if mean is None or std is None:
                raise found.fail("norm_mean" if mean is None else "norm_std", "three numbers, for frames of videos")
            fields = ConfigFields({"image_mean": mean, "image_std": std, "resample": _BICUBIC})
        else:
            usual = {"image_mean": mean or list(CLIP_MEAN), "image_std": std or list(CLIP_STD)}
            fields = ConfigFields({k: v for k, v in found.raw.items() if k != "do_resize"}).with_defaults(**usual)
        least, limit = self._number(found, _LEAST, 1024), self._number(found, _LIMIT, 13312, minimum=0)
        room = (found.integer("max_model_len", 16384, minimum=_OTHERS) - _OTHERS) * self.tower.merge
        most = max(min(max(room, least), limit or _MOST), least)
        square = not found.boolean("video_maintain_aspect_ratio", True)
        return Pixels.read(fields), Budget(least, min(most, _MOST), self._number(found, _TARGET, 1024), square)

    def _number(self, fields: ConfigFields, name: str, default: int, minimum: int = 1) -> int:
        """Return the field `name`, a number of patches, or `default`. Raises ModelConfigError unless it is from
        `minimum` to _MOST.
        """
        if (found := fields.integer(name, default, minimum=minimum)) > _MOST:
            raise fields.fail(name, f"{minimum} to {_MOST}")
        return found

    def option_names(self) -> tuple[str, ...]:
        return _LEAST, _LIMIT, _TARGET

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        asked, found = self._asked(options), copy(self)
        own = self.budget
        numbers = (max(asked.least, own.least), max(asked.most, own.most), max(asked.target, own.target))
        found.budget = Budget(*numbers, own.square)
        return found

    def _asked(self, options: Mapping[str, Any]) -> Budget:
        """Return the numbers of patches with these mm_processor_kwargs; the most is at least the least. Raises
        RequestError for an invalid one.
        """
        own = self.budget
        least, most, target = (
            integer_option(options, name, value, _MOST)
            for name, value in ((_LEAST, own.least), (_LIMIT, own.most), (_TARGET, own.target))
        )
        return Budget(least, max(least, most), target, own.square)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Resize and cut an image or a video's frames for the tower.

        value: uint8[H, W, 3] or frames.Video. options: numbers of patches. most: limit of patches, if any. Raises
        RequestError for other options and values, more patches, and images that are too narrow for theirs.
        """
        check_options(options, self.option_names())
        budget, depth = self._asked(options), self.tower.temporal_patch_size
        frames = frames_of(modality, value, self.modalities)
        times = () if modality == "image" else times_of(value)
        grid = self.image_grid if modality == "image" else self.frame_grid
        rows, columns = grid(frames.shape[1], frames.shape[2], budget)
        steps = -(-len(frames) // depth)
        check_room(modality, steps * (rows * columns + self.tower.rows_before * self.tower.merge), most)
        height, width = rows * self.tower.patch_size, columns * self.tower.patch_size
        pixels = self.pixels[modality]
        resized = np.stack([resized_floats(frame, height, width, pixels.resample) for frame in frames])
        return self.cut(pixels.normalized(resized), times)

    def image_grid(self, height: int, width: int, budget: Budget) -> tuple[int, int]:
        """Return (rows, columns) of patches of an image of this size in pixels, as by transformers'
        get_patch_grid_size: near those that it has, scaled to the numbers of patches, and multiples of 2.

        Raises RequestError for an image so narrow that it would have no patches.
        """
        merge, most = self.tower.spatial_merge_size, budget.most
        rows, columns = (round(side / self.tower.patch_size + 0.5) for side in (height, width))
        factor = min(math.sqrt(most / (rows * columns)), 1.0)
        rows, columns = math.floor(factor * rows), math.floor(factor * columns)
        if not rows or not columns:
            problem = f"an image of {width}x{height} pixels is too narrow to be shrunk to {most} patches"
            raise RequestError(f"{problem} of {self.tower.patch_size} pixels a side", param="image")
        if most > budget.least > rows * columns:
            factor = math.sqrt(budget.least / (rows * columns))
            rows, columns = math.ceil(factor * rows), math.ceil(factor * columns)
        rows = _even(rows, merge, columns, most)
        return rows, _even(columns, merge, rows, most)

    def frame_grid(self, height: int, width: int, budget: Budget) -> tuple[int, int]:
        """Return (rows, columns) of patches of a frame of this size in pixels: near the aspect ratio, or a square, with
        about the target's number of patches, and multiples of 2.
        """
        merge, target = self.tower.spatial_merge_size, budget.target
        if budget.square:
            side = max(merge, int(math.sqrt(target)) // merge * merge)
            return side, side
        ratio = width / height
        rows, columns = (max(round(math.sqrt(share)), 1) for share in (target / ratio, target * ratio))
        more = -(-rows // merge) * merge, -(-columns // merge) * merge
        if more[0] * more[1] <= target:
            return more
        return max(merge, rows // merge * merge), max(merge, columns // merge * merge)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest image, or for "video" one of num_frames (LARGEST_FRAMES if None) frames, with patches
        f32[P, 0]; strips that are larger are possible only as far as there is room for them.

        size: (height, width) in pixels before scaling; None for the largest.
        """
        budget, depth = self.budget, self.tower.temporal_patch_size
        frames = (num_frames or LARGEST_FRAMES) if modality == "video" else 1
        if size is not None:
            rows, columns = (self.image_grid if modality == "image" else self.frame_grid)(*size, budget)
        else:
            most = budget.most if modality == "image" else budget.target
            rows, columns = max(_grids(most), key=math.prod)
        steps = -(-frames // depth)
        times = (0.0,) * frames if modality == "video" else ()
        return self.processed(np.empty((steps * rows * columns, 0), np.float32), (steps, rows, columns), times)


def _even(side: int, merge: int, other: int, most: int) -> int:
    """Return a side in patches as a multiple of `merge`: rounded up if there are then at most `most` patches, otherwise
    down, but at least `merge`. other: the other side.
    """
    rest = side % merge
    if not rest:
        return side
    return side + merge - rest if (side + merge - rest) * other <= most else max(merge, side - rest)


def _grids(most: int) -> list[tuple[int, int]]:
    """Return grids (rows, columns) with even sides and rows <= columns: for each number of rows the one with the most
    columns of those with at most `most` patches, and (2, 2) alone if `most` is less than 4.
    """
    sides = range(max(2, math.isqrt(most) // 2 * 2), 0, -2)
    return [(side, max(2, most // side // 2 * 2)) for side in sides]

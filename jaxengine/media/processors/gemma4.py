"""Processor of Gemma 4: an image of any aspect ratio is resized until it fills a budget of embeddings; a video has such
a budget for each frame, with its time before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import GridProcessor, check_ratio
from jaxengine.media.processors.settings import (
    IMAGES,
    VIDEOS,
    Pixels,
    bad_option,
    check_options,
    frames_of,
    read_settings,
    shown_at,
)
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError

BUDGETS = (70, 140, 280, 560, 1120)
_BUDGET, _DEFAULTS = "max_soft_tokens", {"image": 280, "video": 70}
# transformers' ids of tokens that a configuration does not name.
_IDS = {"image": 258_880, "video": 258_884, "boi": 255_999, "eoi": 258_882}


class Settings(NamedTuple):
    """Preprocessing settings of one modality: its pixel transform, and the most embeddings of an image or frame."""

    pixels: Pixels
    budget: int


class Gemma4Processor(GridProcessor):
    """Processor of the images and videos of Gemma4ForConditionalGeneration.

    A model whose images attend to themselves in both directions takes no video.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with its tower's sizes.
      tokenizer: of the model; None without one, so that videos are refused.
    """

    needs_grid = False

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's token ids and, by modality, its `sizes`. `modalities` has "video" unless the tower's
        patches attend in both directions. Raises ModelConfigError for invalid token ids, ModelFileError for missing or
        invalid settings.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        self.modalities: tuple[str, ...] = ("image",) if self.tower.attends_both_ways else ("image", "video")
        fields = ConfigFields(config_json)
        ids = {name: fields.integer(f"{name}_token_id", default, minimum=0) for name, default in _IDS.items()}
        self.token_ids = {modality: ids[modality] for modality in self.modalities}
        self.around = ids["boi"], ids["eoi"]
        self.check_token_ids(model_config, *self.around)
        self.sizes = {modality: self._read_settings(Path(folder), modality) for modality in self.modalities}
        self.settings = f"{type(self).__name__} {self.sizes!r} {self.tower!r}"

    def _read_settings(self, folder: Path, modality: str) -> Settings:
        """Return a modality's settings from the checkpoint's folder. If it has none for videos that can be read, those
        of images are used with the videos' default budget.

        patch_size and pooling_kernel_size (16 and 3 by default) must be the tower's, and max_soft_tokens (280, or 70
        for videos) at most `_most`. Without do_normalize, image_mean and image_std, values are not normalised.

        Raises ModelFileError for a missing or invalid file, and for settings that do not fit the tower.
        """
        path, fields = _found(folder, modality)
        fields = fields.with_defaults(
            do_normalize=False,
            image_mean=[0.0] * 3,
            image_std=[1.0] * 3,
            patch_size=16,
            pooling_kernel_size=3,
            max_soft_tokens=_DEFAULTS[modality],
        )
        with errors_of(path):
            fields.require(patch_size=self.tower.patch_size, pooling_kernel_size=self.tower.spatial_merge_size)
            budget = fields.integer(_BUDGET)
            if budget > self._most:
                raise fields.fail(_BUDGET, f"1 to {self._most}, with which every patch has a learned position")
            return Settings(Pixels.read(fields), budget)

    @property
    def _most(self) -> int:
        """Largest budget with which a side has no more patches than the tower has positions."""
        return min(max(BUDGETS), self.tower.num_positions // self.tower.spatial_merge_size)

    def option_names(self) -> tuple[str, ...]:
        return (_BUDGET,)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Resize and cut an image or a video's frames for the tower.

        value: uint8[H, W, 3] or frames.Video. options: only max_soft_tokens. most: limit of patches, if any. Raises
        RequestError for other options and values, more patches, and extreme aspect ratios.
        """
        check_options(options, self.option_names())
        frames = frames_of(modality, value, self.modalities)
        seconds = () if modality == "image" else tuple(shown_at(value, len(frames)).tolist())
        settings = self.sizes[modality]
        height, width = self._resized_size(frames.shape[1], frames.shape[2], self._asked(options, settings.budget))
        self.check_room(modality, len(frames), height, width, most)
        resized = np.stack([settings.pixels.resized(frame, height, width) for frame in frames])
        return self.cut(settings.pixels.normalized(resized), seconds)

    def cut(self, frames: np.ndarray, seconds: tuple[float, ...] = ()) -> Processed:
        """Cut frames f32[N, H, W, 3] into patches of one frame, in which the three colours of a pixel are adjacent; the
        patches of each merged row are together.

        H and W must be multiples of `factor`. seconds: time of each frame of a video; () for an image.
        """
        patch, merge = self.tower.patch_size, self.tower.spatial_merge_size
        count, height, width, _ = frames.shape
        grid = count, height // patch, width // patch
        cut = frames.reshape(count, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, 3)
        patches = cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(math.prod(grid), self.tower.num_features)
        return self.processed(patches, grid, seconds)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest item, with patches f32[P, 0]: the budget's embeddings in one line, or an image of `size`,
        (height, width) in pixels, after resizing. A video has num_frames (LARGEST_FRAMES if None) such frames.

        Raises RequestError for an extreme aspect ratio.
        """
        budget, merge = self.sizes[modality].budget, self.tower.spatial_merge_size
        height, width = (merge, merge * budget) if size is None else self._in_patches(*size, budget)
        grid = (1 if modality == "image" else num_frames or LARGEST_FRAMES), height, width
        return self.processed(np.empty((math.prod(grid), 0), np.float32), grid)

    def with_options(self, options: Mapping[str, Any]) -> Gemma4Processor:
        """Return a copy with the budget that an engine's options set for all images and frames. Raises RequestError for
        unknown options and budgets that are not allowed.
        """
        check_options(options, self.option_names())
        found = copy(self)
        found.sizes = {
            modality: settings._replace(budget=self._asked(options, settings.budget))
            for modality, settings in self.sizes.items()
        }
        return found

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an item, with -1 for each of its embeddings: those of an image between start and end
        tokens, or so those of each frame of a video, after its time, MM:SS, rounded down.

        Raises RequestError for a video without a tokenizer.
        """
        begin, end = self.around
        frame = [begin, *[-1] * (item.num_rows // item.grid[0]), end]
        if modality == "image":
            return np.asarray(frame)
        if self.tokenizer is None:
            raise RequestError(
                "a video needs the model's tokenizer, for prompts say when frames are shown", param="video"
            )
        shown: list[int] = []
        for seconds in item.seconds:
            said = f"{int(seconds // 60):02d}:{int(seconds % 60):02d} "
            shown += [*self.tokenizer.encode(f" {said}" if shown else said, False), *frame]
        return np.asarray(shown)

    def _asked(self, options: Mapping[str, Any], budget: int) -> int:
        """Return the budget in options, or `budget` if there is none. Raises RequestError unless it is one of BUDGETS,
        or the processor's own budget for images or videos, and within the tower's limit.
        """
        asked = options.get(_BUDGET, budget)
        own = {settings.budget for settings in self.sizes.values()}
        allowed = [each for each in sorted({*own, *BUDGETS}) if each <= self._most]
        if type(asked) is not int or asked not in allowed:
            raise bad_option(_BUDGET, asked, f"one of {', '.join(map(str, allowed))}")
        return asked

    def _resized_size(self, height: int, width: int, budget: int) -> tuple[int, int]:
        """Return (height, width) in pixels of an image after resizing: the largest multiples of `factor` with about its
        aspect ratio that make at most `budget` embeddings, as by transformers' get_aspect_ratio_preserving_size.

        Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        scale = math.sqrt(budget * self.factor**2 / (height * width))
        high, wide = (math.floor(scale * side / self.factor) for side in (height, width))
        if not high:
            high, wide = 1, min(width // height, budget)
        elif not wide:
            high, wide = min(height // width, budget), 1
        return high * self.factor, wide * self.factor

    def _in_patches(self, height: int, width: int, budget: int) -> tuple[int, int]:
        """Return the size of an image of (height, width) pixels after resizing, as (rows, columns) of patches. budget:
        limit of embeddings.

        Raises RequestError for an extreme aspect ratio.
        """
        high, wide = self._resized_size(height, width, budget)
        return high // self.tower.patch_size, wide // self.tower.patch_size


def _found(folder: Path, modality: str) -> tuple[Path, ConfigFields]:
    """Return (file, settings) of a modality. Without readable settings for videos, they are those of images without
    their budget.

    folder: folder of the checkpoint. Raises ModelFileError for a missing or invalid file.
    """
    if modality == "video":
        try:
            return read_settings(folder, VIDEOS)
        except ModelFileError:
            path, fields = read_settings(folder, IMAGES)
            return path, ConfigFields({name: value for name, value in fields.raw.items() if name != _BUDGET})
    return read_settings(folder, IMAGES)

"""Processor of Kimi-VL: images keep their size unless they have too many patches, and are padded with black to whole
rows of the tower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import GridProcessor, check_ratio
from jaxengine.media.processors.settings import (
    IMAGES,
    Pixels,
    check_options,
    check_pictures,
    read_settings,
)
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

# Exclusive limit of patches along a side: the size of the tower's position table.
_SIDE = 512
MOST_PATCHES, _LIMIT = 1 << 18, "in_token_limit"


class KimiVLProcessor(GridProcessor):
    """Processor of KimiVLForConditionalGeneration, following the one that is published with the model.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with its tower's sizes.
      tokenizer: of the model.

    Attributes:
      pixels: pixel transform of images.
      limit: limit of an image's patches, to about which a larger image is scaled down.
      option: the settings' name of the limit.
      most_side: most patches along a side of a padded image.
    """

    option: str = _LIMIT
    most_side = _SIDE - 1
    needs_grid = False

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the placeholder token (`read_tokens`), and set `pixels` and `limit` (`read_images`). Raises
        ModelConfigError for an invalid placeholder token, ModelFileError for missing or invalid settings.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        self.read_tokens(ConfigFields(config_json), model_config)
        self.check_token_ids(model_config)
        path, found = read_settings(Path(folder), IMAGES)
        with errors_of(path):
            self.pixels, self.limit = self.read_images(found)
        self.settings = f"{type(self).__name__} {self.pixels!r} {self.limit} {self.most_side} {self.tower!r}"

    def read_tokens(self, fields: ConfigFields, model_config: ModelConfig) -> None:
        """Read the placeholder, media_placeholder_token_id (163605 by default), from a config.json (`fields`) and set
        token_ids. Raises ModelConfigError for an invalid token id.
        """
        self.token_ids = {"image": fields.integer("media_placeholder_token_id", 163605, minimum=0)}

    def read_images(self, found: ConfigFields) -> tuple[Pixels, int]:
        """Return the pixel transform and the limit of patches of an image, in_token_limit (4,096 by default), from the
        settings of images, `found`.

        patch_size and merge_kernel_size (2 by 2 by default) must be the tower's, and pad_input, False by default, true.
        Raises ModelConfigError for invalid settings and those that do not fit the tower.
        """
        fields = found.with_defaults(image_mean=[0.5] * 3, image_std=[0.5] * 3, pad_input=False)
        # Without pad_input the model's own processor may produce sizes that its tower cannot take.
        fields.require(patch_size=self.tower.patch_size, pad_input=True)
        merge = self.tower.spatial_merge_size
        if fields.value("merge_kernel_size", [2, 2]) != [merge, merge]:
            raise fields.fail("merge_kernel_size", f"{[merge, merge]}, that of the tower")
        return Pixels.read(fields), read_limit(fields, _LIMIT, 4096)

    def option_names(self) -> tuple[str, ...]:
        return (self.option,)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.raise_limits(integer_option(options, self.option, 1, MOST_PATCHES))
        return found

    def raise_limits(self, least: int) -> None:
        """Raise the limits of patches to `least` where they are lower."""
        self.limit = max(self.limit, least)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], for the tower.

        options: only the one named by `option`, the limit of patches to which the image is scaled. most: limit of
        patches above which it is refused; None for no limit. Raises RequestError for other options and values, more
        patches, and extreme sizes.
        """
        check_options(options, self.option_names())
        check_pictures(modality, value, self.modalities, 3)
        limit = integer_option(options, self.option, self.limit, MOST_PATCHES)
        return self.padded("image", value[None], self.pixels, limit, most)

    def padded(
        self,
        modality: str,
        frames: np.ndarray,
        pixels: Pixels,
        limit: int,
        most: int | None,
        seconds: tuple[float, ...] = (),
    ) -> Processed:
        """Scale frames uint8[N, H, W, 3] down to about `limit` patches each, pad them with black at the right and at
        the bottom, and cut them into patches.

        modality: kind of the item, for errors. pixels: the transform. most: limit of all patches; None for no limit.
        seconds: time of each chunk of a video; () for none. Raises RequestError for more patches, and for extreme
        sizes.
        """
        (height, width), (padded_height, padded_width) = self.scaled(frames.shape[1], frames.shape[2], limit)
        self.check_room(modality, len(frames), padded_height, padded_width, most)
        whole = np.zeros((len(frames), padded_height, padded_width, 3), np.uint8)
        for shown, frame in zip(whole, frames, strict=True):
            shown[:height, :width] = pixels.resized(frame, height, width)
        return self.cut(pixels.normalized(whole), seconds)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest image, or one of `size`, (height, width) in pixels, with patches f32[P, 0]."""
        return self.largest_of(1, self.limit, size)

    def largest_of(self, num_frames: int, limit: int, size: tuple[int, int] | None) -> Processed:
        """Return the largest item of num_frames frames, with patches f32[P, 0].

        limit: limit of patches of each frame. size: (height, width) in pixels before scaling; None for the largest.
        Raises RequestError for an extreme size.
        """
        if size is not None:
            _, (height, width) = self.scaled(*size, limit)
            grid = num_frames, height // self.tower.patch_size, width // self.tower.patch_size
        else:
            grid = num_frames, *self._largest_grid(limit)
        return self.processed(np.empty((math.prod(grid), 0), np.float32), grid)

    def scaled(self, height: int, width: int, limit: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return ((height, width) after scaling, (height, width) after padding to whole rows of the tower) of an image,
        in pixels.

        height, width: size of the image, which is scaled down to about `limit` patches if it has more. Raises
        RequestError for an extreme aspect ratio, and for a padded side of _SIDE patches or more.
        """
        check_ratio(height, width)
        patch = self.tower.patch_size
        found = (width // patch) * (height // patch)
        if found > limit:
            scale = math.sqrt(limit / found)
            height, width = max(1, int(height * scale)), max(1, int(width * scale))
        high, wide = (-(-side // self.factor) * self.factor for side in (height, width))
        if max(high, wide) >= _SIDE * patch:
            problem = f"an image must have less than {_SIDE} patches of {patch} pixels along a side"
            raise RequestError(f"{problem}, got {wide // patch}x{high // patch}", param="image")
        return (height, width), (high, wide)

    def _largest_grid(self, limit: int) -> tuple[int, int]:
        """Return a grid, (rows, columns) of patches, with at least as many patches as any image's. limit: limit of
        patches.

        An image whose grid begins another row of the tower after `rows` patches, and another column after `columns`, is
        larger than these. If it was scaled down, it has less than `limit` patches times the factor of the partial
        patches at its sides, which it had before scaling: limit * (1 + 1 / rows) * (1 + 1 / columns).
        """
        step = self.tower.spatial_merge_size
        ends = range(0, self.most_side // step * step, step)
        grids = []
        for rows in ends:
            fitting = (
                columns for columns in reversed(ends) if (rows * columns) ** 2 <= limit * (rows + 1) * (columns + 1)
            )
            grids.append((rows + step, next(fitting) + step))
        return max(grids, key=math.prod)


def read_limit(fields: ConfigFields, name: str, default: int) -> int:
    """Return the limit of patches `name` from a processor's settings; `default` if it is missing.

    Raises ModelConfigError unless it is from 1 to MOST_PATCHES.
    """
    limit = fields.integer(name, default)
    if limit > MOST_PATCHES:
        raise fields.fail(name, f"1 to {MOST_PATCHES}")
    return limit

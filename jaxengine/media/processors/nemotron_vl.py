"""Processors of NVIDIA's Nemotron Nano VL: images are resized to the best tiling, and the whole image, scaled down,
follows the tiles. Frames of videos become one tile each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.grids import check_ratio
from jaxengine.media.processors.radio import RadioProcessor, resized_floats, times_of
from jaxengine.media.processors.settings import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGES,
    Pixels,
    check_options,
    frames_of,
    read_settings,
    tiles_of,
)
from jaxengine.media.processors.tiles import MAX_TILES, largest_share, nearest_tiling, tilings
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

_IMAGE_TOKEN, _TILES = "<image>", "max_num_tiles"
# Fields of config.json that count before those of the image processor's file.
_OUTER = ("use_thumbnail", "norm_mean", "norm_std")


class TiledRadioProcessor(RadioProcessor):
    """Base class of a RadioProcessor that cuts images into tiles.

    Attributes:
      pixels: pixel transform.
      side: side of a tile in pixels.
      max_tiles: limit of an image's tiles, not counting the whole image.
      adds_whole: whether several tiles are followed by the whole image.
    """

    pixels: Pixels
    side: int
    max_tiles: int
    adds_whole: bool

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the token of images and set the attributes, `side` to force_image_size of config.json (512 by default).
        The token is that of config.json or else the tokenizer's <image>. Raises ModelConfigError for a missing or
        invalid token and an invalid config.json, ModelFileError for missing or invalid settings.
        """
        known = {} if tokenizer is None else {"img_context_token_id": _context_id(tokenizer)}
        super().__init__({**known, **config_json}, model_config, tokenizer)
        outer, (path, found) = ConfigFields(config_json), read_settings(Path(folder), IMAGES)
        self.side = outer.integer("force_image_size", 512)
        factor, most = self.factor, self.tower.side * self.tower.patch_size
        if self.side % factor or self.side > most:
            raise outer.fail("force_image_size", f"a multiple of {factor}, at most {most}")
        with errors_of(path):
            self._read(found, {name: outer.value(name) for name in _OUTER if outer.has(name)})
        about = self.pixels, self.side, self.max_tiles, self.adds_whole
        self.settings = f"{type(self).__name__} {about!r} {self.tower!r}"

    def _read(self, found: ConfigFields, outer: Mapping[str, Any]) -> None:
        """Read and set the pixel transform (norm_mean and norm_std, by default CLIP's; bicubic), the limit of tiles
        (max_num_tiles, 12 by default, at most MAX_TILES) and `adds_whole` (use_thumbnail, True). image_size, patch_size
        and downsample_ratio, if given, must be the tower's and 0.5. found: settings of the image processor.
        outer: those of config.json, which take precedence. Raises ModelConfigError for invalid settings, and for those
        that do not fit the tower.
        """
        found.require(image_size=self.side, patch_size=self.tower.patch_size, downsample_ratio=1 / 2)
        fields = ConfigFields({**found.raw, **outer})
        mean, std = fields.value("norm_mean", list(CLIP_MEAN)), fields.value("norm_std", list(CLIP_STD))
        usual = {"image_mean": mean, "image_std": std, "resample": int(Image.Resampling.BICUBIC)}
        self.pixels = Pixels.read(ConfigFields(usual))
        self.max_tiles, self.adds_whole = fields.integer(_TILES, 12), fields.boolean("use_thumbnail", True)
        if self.max_tiles > MAX_TILES:
            raise fields.fail(_TILES, f"from 1 to {MAX_TILES}")

    @abstractmethod
    def tiling(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of up to `most` tiles of an image of height x width pixels."""

    @abstractmethod
    def resized(self, picture: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return an image, uint8[H, W, 3], resized to [height, width, 3], with values of bytes."""

    def option_names(self) -> tuple[str, ...]:
        return (_TILES,)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.max_tiles = max(self.max_tiles, integer_option(options, _TILES, self.max_tiles, MAX_TILES))
        return found

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Cut an image into tiles, which the whole follows if `adds_whole`, or resize a video's frames to one each.

        value: uint8[H, W, 3] or frames.Video. options: max_num_tiles. most: limit of patches, if any. Raises
        RequestError for other options and values, more patches, and extreme aspect ratios.
        """
        check_options(options, self.option_names())
        limit = integer_option(options, _TILES, self.max_tiles, MAX_TILES)
        frames, side = frames_of(modality, value, self.modalities), self.side
        height, width = frames.shape[1:3]
        check_ratio(height, width)
        if modality == "video":
            check_room(modality, len(frames) * self._patches, most)
            tiles = np.stack([self.resized(frame, side, side) for frame in frames])
            return self.cut(self.pixels.normalized(tiles), times_of(value))
        rows, columns = self.tiling(height, width, limit)
        check_room(modality, self._count(rows, columns) * self._patches, most)
        whole = self.resized(frames[0], rows * side, columns * side)
        tiles = tiles_of(whole, rows, columns)
        if self._count(rows, columns) > len(tiles):
            tiles.append(self.resized(frames[0], side, side))
        return self.cut(self.pixels.normalized(np.stack(tiles)))

    def _count(self, rows: int, columns: int) -> int:
        """Return the number of tiles with the whole image, if it follows."""
        return rows * columns + (self.adds_whole and rows * columns > 1)

    @property
    def _patches(self) -> int:
        """Number of the tower's patches of a tile, with the room for learned tokens."""
        tower = self.tower
        return (self.side // tower.patch_size) ** 2 + tower.rows_before * tower.merge

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the image with the most tiles, or one of `size`, (height, width) in pixels; for "video" a video of
        num_frames (LARGEST_FRAMES if None) frames, whatever the size. Patches are f32[P, 0].
        """
        count, seconds = self._count(1, self.max_tiles), tuple[float, ...]()
        if modality == "video":
            count = num_frames or LARGEST_FRAMES
            seconds = (0.0,) * count
        elif size is not None:
            count = self._count(*self.tiling(*size, self.max_tiles))
        side = self.side // self.tower.patch_size
        return self.processed(np.empty((count * side * side, 0), np.float32), (count, side, side), seconds)

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        side = self.side // self.tower.patch_size
        each = side * side // self.tower.merge
        found = num_rows // each, side, side
        if num_rows % each or not num_rows or (grid or found) != found:
            problem = (
                f"embeddings of an image of this model must be a multiple of {each}, with no grid or that of tiles"
            )
            raise RequestError(f"{problem}; got {num_rows}" + (f" with grid {grid}" if grid else ""), param="image")
        return found


class NemotronNanoVLProcessor(TiledRadioProcessor):
    """Processor of NemotronH_Nano_VL_V2, which resizes without rounding to bytes."""

    def tiling(self, height: int, width: int, most: int) -> tuple[int, int]:
        return nearest_tiling(height, width, self.side, tilings(1, most))

    def resized(self, picture: np.ndarray, height: int, width: int) -> np.ndarray:
        return resized_floats(picture, height, width, self.pixels.resample)


class LlamaNemotronVLProcessor(TiledRadioProcessor):
    """Processor of Llama_Nemotron_Nano_VL, for images alone."""

    modalities: ClassVar[tuple[str, ...]] = ("image",)

    def tiling(self, height: int, width: int, most: int) -> tuple[int, int]:
        return largest_share(height, width, self.side, tilings(1, most))

    def resized(self, picture: np.ndarray, height: int, width: int) -> np.ndarray:
        return self.pixels.resized(picture, height, width)


def _context_id(tokenizer: Any) -> int | None:
    """Return the tokenizer's token <image>; None if that is not one token."""
    tokens = tokenizer.encode(_IMAGE_TOKEN, add_special_tokens=False)
    return tokens[0] if len(tokens) == 1 else None

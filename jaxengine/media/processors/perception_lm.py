"""Processor of PerceptionLM: an image as a whole, and in the tiles of the smallest canvas in which its shorter side is
longest. Frames of videos are resized to one tile each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import tiles_of
from jaxengine.media.processors.tiles import MAX_TILES, LimitedTiles
from jaxengine.media.processors.units import FrameUnits, integer_option
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig

_TILED = "thumb+tile"  # other values: the whole image alone


class PerceptionLMProcessor(FrameUnits, LimitedTiles):
    """Processor of PerceptionLMForConditionalGeneration. Its max_tiles is 0 if images are only taken as a whole."""

    limit_name: ClassVar[str] = "max_num_tiles"
    defaults: ClassVar[Mapping[str, Any]] = {
        "image_mean": (0.5, 0.5, 0.5),
        "image_std": (0.5, 0.5, 0.5),
        "max_num_tiles": 36,
        "tile_size": 448,
        "vision_input_type": _TILED,
        "size": {"height": 448, "width": 448},
    }
    config_defaults: ClassVar[Mapping[str, Any]] = {"image_token_id": 128002, "video_token_id": 128003}

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings. `modalities` becomes ("image",) unless frames of videos are squares of the
        tower. Raises ModelConfigError or ModelFileError for invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        if not self.reads_frames(Path(folder)):
            self.modalities = ("image",)

    def read_settings(self, fields: ConfigFields) -> None:
        if fields.integer("tile_size") != self.side:
            raise fields.fail("tile_size", f"{self.side}, the tower's img_size")
        self.read_limit(fields)
        if fields.text("vision_input_type") != _TILED:
            self.max_tiles = 0

    def placeholder_id_of(self, modality: str) -> int:
        """Return the token of config.json that stands for an image or a video."""
        return self.token_id(f"{modality}_token_id")

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        return tuple(map(self.placeholder_id_of, self.modalities))

    def limit(self, options: Mapping[str, Any]) -> int:
        if self.max_tiles:
            return super().limit(options)
        integer_option(options, self.limit_name, 1, MAX_TILES)  # refused although it changes nothing
        return 0

    def num_units(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        rows, columns = self._tiling(height, width, self.limit(options))
        return 1 + rows * columns

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return the whole image, resized to a square, and its tiles, line by line; and their number in one line.

        picture: uint8[H, W, 3]. options: mm_processor_kwargs. Raises RequestError for an invalid option.
        """
        side, resize = self.side, self.pixels.resized
        rows, columns = self._tiling(picture.shape[0], picture.shape[1], self.limit(options))
        found = [resize(picture, side, side)]
        if rows:
            whole = resize(picture, rows * side, columns * side)
            found += tiles_of(whole, rows, columns)
        return found, (1, len(found))

    def _tiling(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of tiles of an image of height x width pixels, at most `most`; (0, 0) for 0.

        Of the canvases that have room for it, that in which its shorter side is longest, the last of equal ones in the
        order of transformers; without any, the largest of the nearest aspect ratio that is not wider for a wide image,
        and not higher for a high one.
        """
        if not most:
            return 0, 0
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(most, 0, -1):
            for columns in (each for each in range(1, count + 1) if count % each == 0):
                by_ratio.setdefault(columns / (count // columns), []).append((columns, count // columns))
        found, longest = None, 0.0
        for columns, rows in (tiling for listed in by_ratio.values() for tiling in listed):
            if columns * self.side >= width and rows * self.side >= height:
                short = _short_side(height, width, rows * self.side, columns * self.side)
                if short >= longest:
                    found, longest = (rows, columns), short
        if found is not None:
            return found
        ratio = width / height
        if ratio >= 1:
            near = min((each for each in by_ratio if each <= ratio), key=lambda each: abs(each - ratio))
        else:
            near = min((each for each in by_ratio if each > ratio), key=lambda each: abs(1 / each - 1 / ratio))
        columns, rows = max(by_ratio[near])
        return rows, columns

    def largest_size(self) -> tuple[int, int]:
        return self.side * max(self.max_tiles, 1), self.side

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`), one for each embedding."""
        return [self.placeholder_id_of("video")] * item.num_rows


def _short_side(height: int, width: int, canvas_height: int, canvas_width: int) -> float:
    """Return the pixels of the shorter side of an image of height x width pixels in a canvas, as transformers computes
    them: rounded down, but of a square not rounded.
    """
    factor, ratio = min(canvas_width / width, canvas_height / height), width / height
    if ratio == 1:
        return factor * height
    return np.floor(factor * width / ratio if ratio > 1 else factor * height * ratio)

"""Processor of Muse Glimmer: images and frames keep their aspect ratio as far as whole squares of patches allow. Frames
of a video are separate in the prompt, a few at a time, each few with their time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import MAX_ASPECT_RATIO, GridProcessor, check_ratio
from jaxengine.media.processors.settings import (
    IMAGES,
    VIDEOS,
    Pixels,
    check_options,
    frames_of,
    read_settings,
    shown_at,
)
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of

_MOST, _LANCZOS = 1 << 16, 1
# Modality -> setting that limits an image's or a frame's embeddings, and its default.
_LIMITS = {"image": ("max_image_tokens", 4096), "video": ("max_video_frame_tokens", 144)}
_TIME = "Time: {timestamp:.1f}s"
_IMAGE_START, _IMAGE_END = "<|image_start|>", "<|image_end|>"
_VIDEO_START, _BETWEEN, _VIDEO_END = "<|vid_start|>", "<|vid_frame_separator|>", "<|vid_end|>"


class MuseGlimmerProcessor(GridProcessor):
    """Processor of MuseGlimmerForConditionalGeneration.

    Args:
      folder: of the checkpoint. config_json: content of its config.json. model_config: of the model, with its tower's
        sizes. tokenizer: of the model.

    Attributes:
      pixels: pixel transform of each modality.
      limits: the most embeddings of an image, and of a frame.
    """

    modalities = ("image", "video")
    frames_first = True
    windowed = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's token ids, and the pixel transform and limit of each modality. Raises ModelConfigError
        for invalid or equal token ids, ModelFileError for missing or invalid settings.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        fields, defaults = ConfigFields(config_json), {"image": 200092, "video": 200091}
        self.token_ids = {
            kind: fields.integer(f"{kind}_token_id", token, minimum=0) for kind, token in defaults.items()
        }
        self.check_token_ids(model_config)
        if len(set(self.token_ids.values())) < len(self.token_ids):
            raise fields.fail("video_token_id", f"another token than that of images, {self.token_ids['image']}")
        self.pixels: dict[str, Pixels] = {}
        self.limits: dict[str, int] = {}
        for kind, places in {"image": (IMAGES,), "video": (VIDEOS, IMAGES)}.items():
            path, found = read_settings(Path(folder), *places)
            with errors_of(path):
                self.pixels[kind], self.limits[kind] = self._read(kind, found)
        self.settings = f"{type(self).__name__} {self.pixels!r} {self.limits!r} {self.tower!r}"

    def _read(self, modality: str, found: ConfigFields) -> tuple[Pixels, int]:
        """Return the pixel transform and the limit of embeddings of a modality from its settings `found`. Raises
        ModelConfigError for invalid settings, and for those that do not fit the tower.
        """
        fields = found.with_defaults(image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=_LANCZOS)
        fields.require(
            patch_size=self.tower.patch_size,
            merge_size=self.tower.spatial_merge_size,
            temporal_patch_size=self.tower.temporal_patch_size,
            frame_timestamp_format=_TIME,
        )
        limit = fields.integer(*_LIMITS[modality])
        if limit > _MOST:
            raise fields.fail(_LIMITS[modality][0], f"1 to {_MOST}")
        return Pixels.read(fields), limit

    def option_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in _LIMITS.values())

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.limits = {kind: max(limit, self._limit(kind, options)) for kind, limit in self.limits.items()}
        return found

    def _limit(self, modality: str, options: Mapping[str, Any]) -> int:
        """Return the most embeddings of an image, or of a frame, with these mm_processor_kwargs. Raises RequestError
        for an invalid one.
        """
        return integer_option(options, _LIMITS[modality][0], self.limits[modality], _MOST)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Resize and cut an image or a video's frames for the tower.

        value: uint8[H, W, 3] or frames.Video. options: max_image_tokens and max_video_frame_tokens, limits of
        embeddings. most: limit of patches, if any. Raises RequestError for other options and values, more patches, and
        extreme aspect ratios.
        """
        check_options(options, self.option_names())
        frames = frames_of(modality, value, self.modalities)
        first = () if modality == "image" else shown_at(value, len(frames))[:: self.tower.temporal_patch_size]
        height, width = self.scaled(frames.shape[1], frames.shape[2], self._limit(modality, options))
        self.check_room(modality, len(frames), height, width, most)
        pixels = self.pixels[modality]
        resized = np.stack([pixels.resized(frame, height, width) for frame in frames])
        return self.cut(pixels.normalized(resized), tuple(map(float, first)))

    def scaled(self, height: int, width: int, limit: int) -> tuple[int, int]:
        """Return (height, width) in pixels of an image after resizing, as by transformers' smart_resize of this model.

        An image of more than `limit` squares of `factor` pixels is shrunk to that many. Each side then becomes a whole
        number of squares, at least one, rounded up or down: of those pairs that keep the limit, the one nearest to the
        aspect ratio, and where none does, each rounded to the nearest. Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        high, wide = height / self.factor, width / self.factor
        if high * wide > limit:
            ratio = wide / high
            high = (limit / ratio) ** 0.5
            wide = high * ratio
        # Squares of two sizes are equally near: the order of a set decides, as in transformers.
        rounded = set(itertools.product(*((math.floor(side), math.ceil(side)) for side in (high, wide))))
        fitting = [pair for pair in rounded if min(pair) >= 1 and pair[0] * pair[1] <= limit]
        nearest = max(1, round(high)), max(1, round(wide))
        rows, columns = min(fitting or [nearest], key=lambda pair: abs(pair[0] / pair[1] - height / width))
        return rows * self.factor, columns * self.factor

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest image, or for "video" one of num_frames (LARGEST_FRAMES if None) frames, with patches
        f32[P, 0].

        size: (height, width) in pixels before scaling; None for the largest. Raises RequestError for an extreme aspect
        ratio.
        """
        limit, merge = self.limits[modality], self.tower.spatial_merge_size
        if size is not None:
            height, width = self.scaled(*size, limit)
            rows, columns = height // self.factor, width // self.factor
        else:
            rows, columns = max(_grids(limit), key=math.prod)
        frames = (num_frames or LARGEST_FRAMES) if modality == "video" else 1
        steps = -(-frames // self.tower.temporal_patch_size)
        grid = steps, rows * merge, columns * merge
        seconds = tuple(map(float, range(steps))) if modality == "video" else ()
        return self.processed(np.empty((math.prod(grid), 0), np.float32), grid, seconds)

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an item, with -1 for each of its embeddings: an image between its start and end, or each
        temporal step of a video after its time, with the video's start before the first, its end after the last, and a
        separator between them. Raises RequestError without a tokenizer.
        """
        self.check_tokenizer(modality)
        if modality == "image":
            return self.between(_IMAGE_START, item.num_rows, _IMAGE_END)
        count, last = item.num_rows // len(item.seconds), len(item.seconds) - 1
        steps = [
            self.between(
                ("" if step else _VIDEO_START) + _TIME.format(timestamp=seconds),
                count,
                _VIDEO_END if step == last else _BETWEEN,
            )
            for step, seconds in enumerate(item.seconds)
        ]
        return np.concatenate(steps)


def _grids(limit: int) -> list[tuple[int, int]]:
    """Return grids (rows, columns) of squares, the squarest first, of which one has as many as any image that is shrunk
    to `limit` squares: those within the limit and the aspect ratio, and, for a limit below the aspect ratio, a line of
    one square's height, which may exceed the limit.
    """
    sides = range(math.isqrt(limit), 0, -1)
    within = [(side, min(limit // side, MAX_ASPECT_RATIO * side)) for side in sides]
    return [*within, (1, round(math.sqrt(MAX_ASPECT_RATIO * limit)))] if limit < MAX_ASPECT_RATIO else within

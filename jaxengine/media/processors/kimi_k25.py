"""Processor of Kimi K2.5: Kimi-VL's, and videos in chunks of a few frames, each chunk with its time in the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.grids import check_ratio
from jaxengine.media.processors.kimi_vl import MOST_PATCHES, KimiVLProcessor, read_limit
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
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

# Default limits of patches of an image, of a frame, and along a side.
_IMAGE, _FRAME, _SIDE = 16384, 4096, 512
_DAY = 24 * 60 * 60


class KimiMediaProcessor(KimiVLProcessor):
    """Processor whose settings are those of the published processors of Kimi K2.5 and K3, `media_proc_cfg`, or of
    transformers', and that scales images with a side that is too long down.
    """

    option = "max_patches"
    most_side = _SIDE

    def read_images(self, found: ConfigFields) -> tuple[Pixels, int]:
        """Return the pixel transform and the limit of patches of an image, in_patch_limit or else max_patches (16,384
        by default), from the settings `found`, and set most_side.

        Raises ModelConfigError for invalid settings and those that do not fit the tower.
        """
        fields, side = self._settings(found)
        self.most_side = side
        name = "in_patch_limit" if fields.has("in_patch_limit") else self.option
        return Pixels.read(fields), read_limit(fields, name, _IMAGE)

    def _settings(self, found: ConfigFields) -> tuple[ConfigFields, int]:
        """Return (settings, limit of patches along a side): the settings `found`, or their media_proc_cfg, with
        defaults; and patch_limit_on_one_side, else max_height of `size`, else 512. That is a multiple of the tower's
        merge, up to 2,048, and max_width equals it; patch_size, merge_size and merge_kernel_size are the tower's, and
        fixed_output_tokens, in_patch_limit_video and timestamp_mode the usual ones, if given.

        Raises ModelConfigError for settings that do not fit the tower.
        """
        fields = ConfigFields(found.mapping("media_proc_cfg") or found.raw)
        fields = fields.with_defaults(image_mean=[0.5] * 3, image_std=[0.5] * 3)
        merge = self.tower.spatial_merge_size
        fields.require(
            patch_size=self.tower.patch_size,
            merge_size=merge,
            merge_kernel_size=merge,
            fixed_output_tokens=None,
            in_patch_limit_video=None,
            timestamp_mode="hh:mm:ss.fff",
        )
        sides = ConfigFields(fields.mapping("size") or {})
        side = fields.integer("patch_limit_on_one_side", sides.integer("max_height", _SIDE))
        if sides.integer("max_width", side) != side or side % merge or not merge <= side <= 4 * _SIDE:
            raise fields.fail("size", f"equal max_height and max_width, a multiple of {merge} up to {4 * _SIDE}")
        return fields, side

    def scaled(self, height: int, width: int, limit: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return ((height, width) after scaling, (height, width) after padding to multiples of `factor`) of an image,
        in pixels.

        height, width: size of the image. limit: limit of patches, to about which it is scaled down if it has more. An
        image with a side that is too long is scaled down, not refused. Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        patch, most = self.tower.patch_size, self.most_side * self.tower.patch_size
        found = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(limit / found), most / height, most / width)
        height, width = (min(max(1, int(side * scale)), most) for side in (height, width))
        high, wide = (-(-side // self.factor) * self.factor for side in (height, width))
        return (height, width), (high, wide)


class KimiK25Processor(KimiMediaProcessor):
    """Processor of KimiK25ForConditionalGeneration.

    A video's placeholder is text of which most tokenizers make several tokens, so `encode` replaces it by one token,
    video_token_id, which need not be in the vocabulary: then it does not occur in the expanded prompt.

    Attributes:
      video: text of a video's placeholder.
      frame_pixels, frame_limit: pixel transform and limit of patches of a video's frames.
      embedded_ids: the token of each modality at whose positions embeddings go.
    """

    modalities = ("image", "video")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings of images, and set frame_pixels and frame_limit by those of videos or else of
        images. Raises ModelConfigError for invalid token ids, ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        path, found = read_settings(Path(folder), VIDEOS, IMAGES)
        with errors_of(path):
            self.frame_pixels, self.frame_limit = self.read_frames(found)
        self.settings += f" {self.frame_pixels!r} {self.frame_limit}"

    def read_tokens(self, fields: ConfigFields, model_config: ModelConfig) -> None:
        """Read the placeholders from config.json (media_placeholder_token_id or else image_token_id, video_placeholder,
        and video_token_id, by default vocab_size), and set `video`, `token_ids` and `embedded_ids`, in which a video's
        token that is not in the vocabulary gives way to that of images.

        Raises ModelConfigError for invalid token ids, for an empty text in place of a video, and if images and videos
        have the same id.
        """
        image = fields.integer("media_placeholder_token_id", fields.integer("image_token_id", 163605, minimum=0))
        self.video = fields.text("video_placeholder", "<|kimi_k25_video_placeholder|>")
        if not self.video:
            raise fields.fail("video_placeholder", "text")
        video, known = fields.integer("video_token_id", model_config.vocab_size, minimum=0), model_config.vocab_size
        if video == image:
            raise fields.fail("video_token_id", f"another token than that of images, {image}")
        self.token_ids = {"image": image, "video": video}
        self.embedded_ids = {"image": image, "video": video if video < known else image}

    def check_token_ids(self, model_config: ModelConfig, *others: int) -> None:
        """Raise ModelConfigError if the placeholder of images is not below vocab_size; that of videos and `others` are
        not checked.
        """
        if self.token_ids["image"] >= model_config.vocab_size:
            problem = f"image_token_id must be below vocab_size {model_config.vocab_size}"
            raise ModelConfigError(f"{problem}, got {self.token_ids['image']}")

    def read_frames(self, found: ConfigFields) -> tuple[Pixels, int]:
        """Return the pixel transform and the limit of patches of a frame from the settings of videos, `found`:
        in_patch_limit_each_frame, else max_patches, else in_patch_limit of media_proc_cfg, else 4,096.

        Raises ModelConfigError for invalid settings, those that do not fit the tower, and another limit of a side than
        that of images.
        """
        fields, side = self._settings(found)
        if side != self.most_side:
            raise fields.fail("size", f"that of images, {self.most_side}")
        fields.require(temporal_patch_size=self.tower.most_frames, temporal_merge_kernel_size=self.tower.most_frames)
        name = "in_patch_limit_each_frame"
        default = fields.integer("in_patch_limit", _FRAME) if found.has("media_proc_cfg") else _FRAME
        return Pixels.read(fields), read_limit(fields, name if fields.has(name) else self.option, default)

    def encode(self, text: str, token_ids: Sequence[int] = ()) -> list[int]:
        """Return the token ids of a prompt, with video_token_id for each placeholder of a video in the text. token_ids:
        not used.
        """
        del token_ids
        first, *others = text.split(self.video)
        ids = list(self.tokenizer.encode(first)) if first else []
        for each in others:
            ids += [self.token_ids["video"], *(self.tokenizer.encode(each, add_special_tokens=False) if each else ())]
        return ids

    def placeholder(self, modality: str) -> str:
        return self.video if modality == "video" else super().placeholder(modality)

    def raise_limits(self, least: int) -> None:
        super().raise_limits(least)
        self.frame_limit = max(self.frame_limit, least)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, or a video's frames with the time of each chunk.

        value: uint8[H, W, 3] or frames.Video. options: only max_patches. most: limit of patches, if any. Raises
        RequestError for other options and values, more patches, extreme aspect ratios, and a video of a day or more.
        """
        if modality != "video":
            return super().process(modality, value, options, most)
        check_options(options, self.option_names())
        frames = frames_of(modality, value, self.modalities)
        seconds = shown_at(value, len(frames))[:: self.tower.most_frames]
        if not seconds.max() < _DAY:
            raise RequestError(f"a video must be shorter than a day, got {seconds.max():.3g} seconds", param=modality)
        limit = integer_option(options, self.option, self.frame_limit, MOST_PATCHES)
        return self.padded(modality, frames, self.frame_pixels, limit, most, tuple(seconds.tolist()))

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest image, or for "video" one of num_frames (LARGEST_FRAMES if None) frames, with patches
        f32[P, 0].

        size: (height, width) in pixels before scaling; None for the largest.
        """
        if modality != "video":
            return super().largest(modality, size, num_frames)
        return self.largest_of(num_frames or LARGEST_FRAMES, self.frame_limit, size)

    def order(self, grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (order, windows), both int [rows]: the tower's rows as indices into the item's rows line by line, and
        the window of each, 0.

        grid: (time, height, width) in patches. Within a chunk, the rows at one position of all of its frames follow
        each other.
        """
        time, cells, most = grid[0], grid[1] * grid[2] // self.tower.merge, self.tower.most_frames
        rows = np.arange(time * cells).reshape(time, cells)
        order = np.concatenate([rows[first : first + most].T.reshape(-1) for first in range(0, time, most)])
        return order, np.zeros(len(order), np.int64)

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor._coordinates by name, with the chunk's number as "segment", and two more:
        "frame", the frame's number in its chunk from 1 (0 in a chunk of one), and "frames", the chunk's number of
        frames.
        """
        found, most = super()._coordinates(grid, order), self.tower.most_frames
        chunk, frame = np.divmod(found["segment"], most)
        frames = np.minimum(most, grid[0] - chunk * most)
        return {**found, "segment": chunk, "frame": np.where(frames > 1, frame + 1, 0), "frames": frames}

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of a grid's patches, f32[P, features], reordered for the tower. The frames of a
        chunk share embeddings, whose rows are those of its first frame.

        grid: (time, height, width) in patches. seconds: time of each chunk of a video.
        """
        found = super().processed(patches, grid, seconds)
        cells = grid[1] * grid[2] // self.tower.merge
        frame, cell = np.divmod(found.rows, cells)
        chunk, further = np.divmod(frame, self.tower.most_frames)
        rows = np.where(further == 0, chunk * cells + cell, -1).astype(np.int32)
        return found._replace(rows=rows, num_rows=-(-grid[0] // self.tower.most_frames) * cells)

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an item, with -1 for each of its embeddings: those of each chunk of a video after its
        time, those of an image alone. Raises RequestError for a video without a tokenizer.
        """
        if modality == "image":
            return super().item_tokens(modality, item)
        if self.tokenizer is None:
            problem = "a video needs the model's tokenizer, for prompts say when frames are shown"
            raise RequestError(problem, param=modality)
        count = item.num_rows // len(item.seconds)
        before = (f"{_clock(seconds)}<|media_begin|>video<|media_content|>" for seconds in item.seconds)
        return np.concatenate([self.between(text, count, "<|media_end|>") for text in before])

    def embedded_id(self, modality: str) -> int:
        return self.embedded_ids[modality]


def _clock(seconds: float) -> str:
    """Return a time in seconds as text, HH:MM:SS and thousandths, rounded down."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours:02}:{minutes:02}:{whole % 60:02}.{int(seconds % 1 * 1000):03}"

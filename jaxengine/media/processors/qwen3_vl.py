"""Processor of Qwen3-VL: Qwen2-VL's, but frames of a video are separate in the prompt, each with its time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import check_ratio
from jaxengine.media.processors.mrope import EmbeddingRun, mrope_positions
from jaxengine.media.processors.qwen2_vl import (
    LEAST,
    PIXEL_OPTIONS,
    Bounds,
    Qwen2VLProcessor,
    Sizes,
    grown,
    shrunk,
)
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD, shown_at
from jaxengine.models.config.fields import ConfigFields
from jaxengine.scheduler.base.errors import RequestError


class Qwen3VLProcessor(Qwen2VLProcessor):
    """Processor of Qwen3VLForConditionalGeneration, whose pixel bounds of a video apply to all of its frames
    together.
    """

    video_tokens: ClassVar[int | None] = 768
    defaults: ClassVar[Mapping[str, Any]] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16}
    # Images have Qwen2-VL's class.
    image_defaults: ClassVar[Mapping[str, Any]] = {"image_mean": list(CLIP_MEAN), "image_std": list(CLIP_STD)}
    default_bounds: ClassVar[Mapping[str, Bounds]] = {
        "image": Bounds(56 * 56, 28 * 28 * 1280),
        "video": Bounds(128 * 32 * 32, 32 * 32 * 768),
    }

    def read_sizes(self, modality: str, found: ConfigFields) -> Sizes:
        """Return a modality's settings from those that were found. As in transformers, the bounds of a video are those
        in `size`, and min_pixels and max_pixels next to it are not read. Raises ModelConfigError for settings that are
        invalid or do not fit the tower.
        """
        if modality == "video":
            found = ConfigFields({name: value for name, value in found.raw.items() if name not in PIXEL_OPTIONS})
        return super().read_sizes(modality, found)

    def seconds(self, video: Any) -> tuple[float, ...]:
        """Return the midpoint between the first and last frame of each temporal step of a frames.Video, in seconds, at
        UNKNOWN_FPS frames per second if its rate is unknown.
        """
        depth = self.tower.temporal_patch_size
        shown = shown_at(video, len(video.frames))
        shown = np.concatenate([shown, np.repeat(shown[-1:], -len(shown) % depth)]).reshape(-1, depth)
        return tuple(((shown[:, 0] + shown[:, -1]) / 2).tolist())

    def resized_size(self, modality: str, num_frames: int, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels after resizing. bounds: bounds of an image's pixels, or of those of all
        num_frames of a video together.

        Raises RequestError for an extreme aspect ratio.
        """
        if modality == "image":
            return super().resized_size(modality, num_frames, height, width, bounds)
        bounds = self.capped(modality, num_frames, bounds)
        return resized_frames(num_frames, height, width, bounds, self.factor, self.tower.temporal_patch_size)

    def capped(self, modality: str, num_frames: int, bounds: Bounds) -> Bounds:
        """Return bounds of the pixels of all frames, of which each has at most `video_tokens` embeddings; `bounds`
        without such a limit.
        """
        if (limit := self.sizes[modality].video_tokens) is None:
            return bounds
        each = max(min(limit * self.factor**2, bounds.most // num_frames), int(bounds.least * LEAST))
        return Bounds(bounds.least, each * num_frames)

    def largest_size(self, modality: str, num_frames: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels of the largest frames, of which each of a video's num_frames has an equal
        share of the bounds.
        """
        bounds = self.capped(modality, num_frames, bounds)
        return self.widest(bounds, 1 if modality == "image" else num_frames)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder replaced by the tokens of its item's steps, and with M-RoPE
        positions. Of a video, tokens around the placeholder are replaced with it (see `_replaced`). items: by modality,
        in the order of the prompt.

        Raises RequestError for another number of items than placeholders, and for a video without a tokenizer.
        """
        ids = np.asarray(token_ids, np.int64)
        at, order = self.placeholders(ids, items)
        parts: list[np.ndarray] = []
        runs: list[EmbeddingRun] = []
        positions: list[np.ndarray] = []
        copied = end = 0
        for place, (modality, number) in zip(at.tolist(), order, strict=True):
            item = items[modality][number]
            first, behind = self._replaced(ids, place) if modality == "video" else (place, place + 1)
            steps = self._steps(modality, item)
            time, height, width = self.merged(item)
            per_step = (time if modality == "image" else 1), height, width
            end += first - copied
            parts.append(ids[copied:first])
            starts = []
            for step in steps:
                starts.append(end + int(np.argmax(step == self.seen_id(modality))))
                parts.append(step)
                end += len(step)
            runs += [EmbeddingRun(start, per_step, np.arange(per_step[0])) for start in starts]
            spans = [np.arange(start, start + int(np.prod(per_step)), dtype=np.int32) for start in starts]
            positions.append(np.concatenate(spans))
            copied = behind
        ids = np.concatenate([*parts, ids[copied:]])
        places, delta = mrope_positions(len(ids), runs)
        return Expanded(ids.tolist(), positions, order, places, delta)

    def _replaced(self, ids: np.ndarray, place: int) -> tuple[int, int]:
        """Return the span [start, end) of the prompt to replace for a video: its placeholder at `place` in the token
        ids, with the start and end tokens around it if they are there, as each step has its own.
        """
        before, after = self.around
        whole = 0 < place < len(ids) - 1 and ids[place - 1] == before and ids[place + 1] == after
        return (place - 1, place + 2) if whole else (place, place + 1)

    def _steps(self, modality: str, item: Processed) -> list[np.ndarray]:
        """Return the tokens, i64, of each step of an item of this modality: placeholders for an image, which is one
        step; a time and placeholders for each temporal step of a video.

        Raises RequestError for a video without a tokenizer.
        """
        token = self.token_ids[modality]
        if modality == "image":
            return [np.full(item.num_rows, token, np.int64)]
        if self.tokenizer is None:
            raise RequestError(
                "a video needs the model's tokenizer, for prompts say when frames are shown", param="video"
            )
        return [np.asarray(self.step_tokens(item, seconds), np.int64) for seconds in item.seconds]

    def seen_id(self, modality: str) -> int:
        """Return the placeholder token at whose positions embeddings of the modality go."""
        return self.token_ids[modality]

    def step_tokens(self, item: Processed, seconds: float) -> list[int]:
        """Return the tokens of a temporal step of a video (`item`) that is shown at `seconds`: the time, with one
        decimal, and its placeholders between the start and end tokens.
        """
        before, after = self.around
        each = item.num_rows // item.grid[0]
        said = self.tokenizer.encode(f"<{seconds:.1f} seconds>", False)
        return [*said, before, *[self.token_ids["video"]] * each, after]


def resized_frames(
    num_frames: int, height: int, width: int, bounds: Bounds, factor: int, depth: int
) -> tuple[int, int]:
    """Return (height, width) in pixels of frames after resizing, as by transformers' smart_resize of Qwen3-VL: a side
    below `factor` is first enlarged to it, the other in proportion, and then sides become the nearest multiples of
    `factor`, or those of the size that is shrunk or enlarged to the bounds (`shrunk`, `grown`). For the bounds there
    are at least `depth` frames, and the number is rounded to a multiple of it.

    bounds: bounds of the pixels of all frames together. factor: side in pixels of one row of the tower. depth: frames
    of a patch. Raises RequestError if one side is more than MAX_ASPECT_RATIO times the other.
    """
    # Fewer frames are repeated to fill a patch.
    num_frames = max(num_frames, depth)
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    total = round(num_frames / depth) * depth * high * wide
    if total > bounds.most:
        return shrunk(height, width, math.sqrt(num_frames * height * width / bounds.most), factor)
    if total < bounds.least:
        return grown(height, width, math.sqrt(bounds.least / (num_frames * height * width)), factor)
    return high, wide

"""Processor of Qwen2-VL and Qwen2.5-VL, and base of Qwen3-VL's.

An image keeps its aspect ratio: it is resized to the nearest multiple of `factor` within bounds of its pixels. Videos
are resized frame by frame, and two frames make a patch; an image counts as two equal frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import MAX_ASPECT_RATIO, GridProcessor, check_ratio
from jaxengine.media.processors.mrope import EmbeddingRun, mrope_positions, repeated, whole_times
from jaxengine.media.processors.settings import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGES,
    MAX_PIXELS,
    UNKNOWN_FPS,
    VIDEOS,
    Pixels,
    bad_option,
    check_options,
    frames_of,
    read_settings,
)
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.media import AUDIO

PIXEL_OPTIONS = ("min_pixels", "max_pixels")
_OPTIONS = (*PIXEL_OPTIONS, "size")
# A limit of a video's pixels is at least so many times the least ones of a frame.
LEAST = 1.05


class Bounds(NamedTuple):
    """Limits (least, most), both included, of the number of pixels of a resized image or frame."""

    least: int
    most: int


@dataclass(frozen=True)
class Sizes:
    """Preprocessing settings of one modality, image or video: its pixel transform, the bounds of its sizes, and a limit
    of a video's embeddings, by which frames are bounded too; None for no such limit.
    """

    pixels: Pixels
    bounds: Bounds
    video_tokens: int | None = None


class Qwen2VLProcessor(GridProcessor):
    """Processor of Qwen2VLForConditionalGeneration.

    Args:
      folder: of the checkpoint. config_json: content of its config.json. model_config: of the model, with its tower's
        sizes. tokenizer: of the model.

    Attributes:
      around_name: prefix of the config fields of tokens around a placeholder; None for a configuration without them.
      video_tokens: transformers' default of max_video_tokens; None for a class without cap_pixels_per_frame.
      defaults, image_defaults, default_bounds: transformers' defaults of missing settings, of those in which images
        differ from videos, and of the bounds of images and frames.
    """

    modalities: tuple[str, ...] = ("image", "video")
    around_name: ClassVar[str | None] = "vision"
    video_tokens: ClassVar[int | None] = 128_000
    image_defaults: ClassVar[Mapping[str, Any]] = {}
    defaults: ClassVar[Mapping[str, Any]] = {
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
        "patch_size": 14,
    }
    default_bounds: ClassVar[Mapping[str, Bounds]] = {
        "image": Bounds(56 * 56, 28 * 28 * 1280),
        "video": Bounds(128 * 28 * 28, 28 * 28 * 768),
    }

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's token ids and, by modality, its `sizes`. `modalities` loses "video" if the settings of
        videos do not fit the tower. Raises ModelConfigError for token ids that are missing or invalid, ModelFileError
        for missing or invalid settings.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        fields = ConfigFields(config_json)
        self.token_ids = {kind: fields.integer(f"{kind}_token_id", minimum=0) for kind in self.modalities}
        names = [f"{self.around_name}_{side}_token_id" for side in ("start", "end") if self.around_name]
        self.around = tuple(fields.integer(name, minimum=0) for name in names)
        self.check_token_ids(model_config, *self.around)
        if not self._has_frames(Path(folder)):
            self.modalities = tuple(kind for kind in self.modalities if kind != "video")
        # Early versions of transformers 4 wrote no separate file for videos.
        places = {"image": (IMAGES,), "video": (VIDEOS, IMAGES)}
        self.sizes = {kind: self._read_sizes(Path(folder), kind, *places[kind]) for kind in self.modalities}
        self.settings = f"{type(self).__name__} {self.sizes!r} {self.tower!r}"

    def _has_frames(self, folder: Path) -> bool:
        """Return whether the settings of videos cut frames into the tower's patches: patch_size, temporal_patch_size
        and merge_size are the tower's, or missing without a default. Raises ModelFileError if there are none.

        transformers writes its class's defaults where only images have settings, as for a tower with other patches than
        published ones; such a model takes images alone.
        """
        _, found = read_settings(folder, VIDEOS, IMAGES)
        fields = self._with_defaults("video", found)
        return all(fields.value(name, size) == size for name, size in self._cuts.items())

    @property
    def _cuts(self) -> dict[str, int]:
        """Settings by name that must be the tower's."""
        return {
            "patch_size": self.tower.patch_size,
            "temporal_patch_size": self.tower.temporal_patch_size,
            "merge_size": self.tower.spatial_merge_size,
        }

    def _with_defaults(self, modality: str, found: ConfigFields) -> ConfigFields:
        """Return a modality's settings with transformers' defaults for what they lack."""
        own = self.image_defaults if modality == "image" else {}
        return found.with_defaults(**{"temporal_patch_size": 2, "merge_size": 2, **self.defaults, **own})

    def _read_sizes(self, folder: Path, modality: str, *places: tuple[str, str]) -> Sizes:
        """Return a modality's settings from the first of `places` (as in read_settings) that the checkpoint's folder
        has.

        Raises ModelFileError if it has none, and for settings that are invalid or do not fit the tower.
        """
        path, found = read_settings(folder, *places)
        with errors_of(path):
            return self.read_sizes(modality, found)

    def read_sizes(self, modality: str, found: ConfigFields) -> Sizes:
        """Return a modality's settings from those that were found. Videos have a limit of embeddings, max_video_tokens,
        if cap_pixels_per_frame is true, which is refused for images and for a class without `video_tokens`. Raises
        ModelConfigError for settings that are invalid or do not fit the tower.
        """
        fields = self._with_defaults(modality, found)
        fields.require(**self._cuts)
        limit = None
        if modality == "image" or self.video_tokens is None:
            fields.require(cap_pixels_per_frame=False)
        elif fields.boolean("cap_pixels_per_frame", False):
            limit = fields.integer("max_video_tokens", self.video_tokens)
        return Sizes(Pixels.read(fields), _read_bounds(fields, self.default_bounds[modality]), limit)

    def placeholder(self, modality: str) -> str:
        """Return the text of a placeholder between its start and end tokens. Needs the tokenizer."""
        before, after = self.around
        ids = before, self.token_ids[modality], after
        return "".join(str(token) for token in self.tokenizer.convert_ids_to_tokens(ids))

    def option_names(self) -> tuple[str, ...]:
        return _OPTIONS

    def with_options(self, options: Mapping[str, Any]) -> Any:
        """Return a copy whose least and most pixels are each the larger of its own and the engine's option; this
        processor if nothing changes.

        Raises RequestError for unknown options, and for invalid bounds.
        """
        check_options(options, self.option_names())
        # Bounds that fit images need not fit videos; requests are refused then.
        least, bounds = _asked_bounds(options, Bounds(1, MAX_PIXELS)).least, dict[str, Bounds]()
        for kind, sizes in self.sizes.items():
            most = max(least, sizes.bounds.most)
            most = max(most, _asked_bounds(options, Bounds(1, most)).most)
            bounds[kind] = Bounds(max(least, sizes.bounds.least), most)
        if all(bounds[kind] == sizes.bounds for kind, sizes in self.sizes.items()):
            return self
        found = copy(self)
        found.sizes = {kind: replace(sizes, bounds=bounds[kind]) for kind, sizes in self.sizes.items()}
        return found

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Resize and cut an image or a video's frames for the tower.

        value: uint8[H, W, 3] or frames.Video. options: bounds of their pixels, min_pixels, max_pixels or size. most:
        limit of patches, if any. Raises RequestError for other options and values, more patches, and extreme aspect
        ratios.
        """
        check_options(options, self.option_names())
        frames = frames_of(modality, value, self.modalities)
        seconds = () if modality == "image" else self.seconds(value)
        sizes = self.sizes[modality]
        bounds = _asked_bounds(options, sizes.bounds)
        height, width = self.resized_size(modality, len(frames), frames.shape[1], frames.shape[2], bounds)
        self.check_room(modality, len(frames), height, width, most)
        resized = np.stack([sizes.pixels.resized(frame, height, width) for frame in frames])
        return self.cut(sizes.pixels.normalized(resized), seconds)

    def seconds(self, video: Any) -> tuple[float, ...]:
        """Return the start of each temporal step of a frames.Video, in seconds after its first frame; steps have equal
        duration. The source is assumed to have UNKNOWN_FPS sampled frames per second if its rate is unknown.
        """
        steps = -(-len(video.frames) // self.tower.temporal_patch_size)
        fps = video.fps
        shown = UNKNOWN_FPS if fps is None else len(video.frames) / video.total_num_frames * fps
        return tuple(step * (self.tower.temporal_patch_size / shown) for step in range(steps))

    def resized_size(self, modality: str, num_frames: int, height: int, width: int, bounds: Bounds) -> tuple[int, int]:
        """Return (height, width) in pixels of an image or a video's frames after resizing, as by transformers'
        smart_resize: the nearest multiples of `factor`; or, if these have a number of pixels outside of the `capped`
        bounds, those of the size that is shrunk or enlarged to the bound (`shrunk`, `grown`).

        bounds: bounds of the pixels of an image or frame. Raises RequestError if one side is more than MAX_ASPECT_RATIO
        times the other.
        """
        bounds = self.capped(modality, num_frames, bounds)
        check_ratio(height, width)
        factor = self.factor
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if high * wide > bounds.most:
            return shrunk(height, width, math.sqrt(height * width / bounds.most), factor)
        if high * wide < bounds.least:
            return grown(height, width, math.sqrt(bounds.least / (height * width)), factor)
        return high, wide

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest item, or one of `size`, (height, width) in pixels, with patches f32[P, 0]; a video has
        num_frames (LARGEST_FRAMES if None) frames.

        Raises RequestError for an extreme aspect ratio.
        """
        frames = (num_frames or LARGEST_FRAMES) if modality == "video" else 1
        bounds = self.sizes[modality].bounds
        if size is not None:
            height, width = self.resized_size(modality, frames, size[0], size[1], bounds)
        else:
            height, width = self.largest_size(modality, frames, bounds)
        steps = -(-frames // self.tower.temporal_patch_size)
        grid = steps, height // self.tower.patch_size, width // self.tower.patch_size
        patches = np.empty((int(np.prod(grid)), 0), np.float32)
        seconds = tuple(map(float, range(steps))) if modality == "video" else ()
        return self.processed(patches, grid, seconds)

    def largest_size(self, modality: str, num_frames: int, bounds: Bounds) -> tuple[int, int]:
        return self.widest(self.capped(modality, num_frames, bounds))

    def capped(self, modality: str, num_frames: int, bounds: Bounds) -> Bounds:
        """Return bounds of pixels of which none are above a frame's share of nine tenths of `video_tokens` embeddings,
        or above 1.05 times the least ones if that is more; `bounds` without such a limit. num_frames: of the video.
        """
        if (limit := self.sizes[modality].video_tokens) is None:
            return bounds
        total = int(limit * self.factor**2 * 0.9) * self.tower.temporal_patch_size
        return Bounds(bounds.least, max(min(bounds.most, total // num_frames), int(bounds.least * LEAST)))

    def widest(self, bounds: Bounds, num_frames: int = 1) -> tuple[int, int]:
        """Return (height, width) in pixels of the frame with the most patches; of equal ones the squarest. The width is
        the longer side. bounds: bounds of the pixels of num_frames frames together.
        """
        high, wide = max(self.sides(bounds, num_frames), key=lambda sides: sides[0] * sides[1])
        return high * self.factor, wide * self.factor

    def sides(self, bounds: Bounds, num_frames: int = 1) -> list[tuple[int, int]]:
        """Return (shorter side, longest other side with it), in squares of `factor` pixels, for each shorter side that
        a frame may have after resizing; the squarest first.

        bounds: bounds of the pixels of num_frames frames together.
        """
        ratio, share = MAX_ASPECT_RATIO, num_frames * self.factor**2
        units = max(1, bounds.most // share)
        # Sides are rounded, so that a frame's ratio may exceed the limit by less than one square of the shorter one.
        found = [(side, min(units // side, ratio * (side + 1))) for side in range(math.isqrt(units), 0, -1)]
        # A side is at least one square, which makes strips larger than the bound if that is small.
        found.append((1, math.isqrt(ratio * bounds.most // share)))
        # Sides of frames that are too small are rounded up, which may exceed the bound if `least` is near it.
        least = bounds.least / share
        shortest = math.sqrt(least / ratio)
        for side in range(math.ceil(math.sqrt(least)), max(0, math.ceil(shortest) - 1), -1):
            found.append((side, math.ceil(least / max(side - 1, shortest))))
        return found

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder repeated as often as its item has embeddings, and with M-RoPE
        positions. items: by modality, in the order of the prompt.

        Raises RequestError for another number of items than placeholders, and for a video that lasts too long.
        """
        ids = np.asarray(token_ids, np.int64)
        at, order = self.placeholders(ids, items)
        chosen = [items[modality][number] for modality, number in order]
        ids, starts = repeated(ids, at, [item.num_rows for item in chosen])
        positions = [
            np.arange(start, start + item.num_rows, dtype=np.int32) for start, item in zip(starts, chosen, strict=True)
        ]
        runs = [
            EmbeddingRun(int(start), self.merged(item), self.times(item))
            for start, item, (modality, _) in zip(starts, chosen, order, strict=True)
            if modality != AUDIO  # sounds, in models that also take them, have the positions of text tokens
        ]
        places, delta = mrope_positions(len(ids), runs)
        return Expanded(ids.tolist(), positions, order, places, delta)

    def times(self, item: Processed) -> np.ndarray:
        """Return the temporal M-RoPE positions of an item's steps relative to the first, i64[grid[0]]; in this class 0,
        1, 2, ...
        """
        return np.arange(item.grid[0])


class Qwen2_5VLProcessor(Qwen2VLProcessor):
    """Processor of Qwen2_5_VLForConditionalGeneration: patches sorted by window, temporal positions proportional to
    seconds.
    """

    windowed = True

    def times(self, item: Processed) -> np.ndarray:
        """Return the temporal M-RoPE positions of an item's steps relative to the first, i64[grid[0]], in proportion to
        seconds; 0 for an image.

        Raises RequestError for a video so long that its positions exceed float32's whole numbers.
        """
        if len(item.seconds) < 2:
            return np.zeros(item.grid[0], np.int64)
        # In float32, as transformers counts them.
        step = np.float32(item.seconds[1]) * np.float32(self.tower.tokens_per_second)
        return whole_times(np.arange(item.grid[0], dtype=np.float32) * step)


def shrunk(height: int, width: int, ratio: float, factor: int) -> tuple[int, int]:
    """Return (height, width) in pixels, divided by `ratio` and rounded down to multiples of `factor`, at least
    `factor`.
    """
    high, wide = (max(factor, math.floor(side / ratio / factor) * factor) for side in (height, width))
    return high, wide


def grown(height: int, width: int, ratio: float, factor: int) -> tuple[int, int]:
    """Return (height, width) in pixels, multiplied by `ratio` and rounded up to multiples of `factor`."""
    return math.ceil(height * ratio / factor) * factor, math.ceil(width * ratio / factor) * factor


def _read_bounds(fields: ConfigFields, default: Bounds) -> Bounds:
    """Return the pixel bounds in `fields`: min_pixels and max_pixels, or else those in `size`, where shortest_edge and
    longest_edge, which are numbers of pixels here, come before min_pixels and max_pixels.

    default: bounds for values that are missing. Raises ModelConfigError unless 1 <= least <= most <= MAX_PIXELS.
    """
    size = ConfigFields(fields.mapping("size") or {})
    least = size.integer("shortest_edge", None) or size.integer("min_pixels", default.least)
    most = size.integer("longest_edge", None) or size.integer("max_pixels", default.most)
    least, most = fields.integer("min_pixels", least), fields.integer("max_pixels", most)
    if not 1 <= least <= most <= MAX_PIXELS:
        raise ModelConfigError(
            f"min_pixels and max_pixels must be 1 <= min <= max <= {MAX_PIXELS}, got {least}, {most}"
        )
    return Bounds(least, most)


def _asked_bounds(options: Mapping[str, Any], given: Bounds) -> Bounds:
    """Return the pixel bounds in a request's mm_processor_kwargs (size, min_pixels, max_pixels).

    given: bounds for values that are missing. Raises RequestError for bounds that are not integers, exceed MAX_PIXELS,
    or whose least exceeds the most.
    """
    if not options:
        return given
    try:
        return _read_bounds(ConfigFields(dict(options)), given)
    except ModelConfigError as error:
        raise bad_option("min_pixels, max_pixels or size", dict(options), str(error)) from None

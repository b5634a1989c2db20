"""Processor of Nemotron-H Omni: images and frames of any shape in whole squares of patches, resized without rounding to
bytes. Pairs of a video's frames are separate in the prompt, each with the numbers and times of its frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.grids import Chunk, GridProcessor
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
from jaxengine.media.processors.text_placeholder import with_one_token
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError

# Values of the column "kind", as jaxengine.models.vision.radio has them.
_IMAGE, _VIDEO, _FIRST_TOKEN = 0, 1, 2
_MOST = 1 << 16
_LEAST, _LIMIT, _TARGET = "min_num_patches", "max_num_patches", "video_target_num_patches"
_START, _END = "<img>", "</img>"
_PLACEHOLDER = "<video>"
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


class NemotronHOmniProcessor(GridProcessor):
    """Processor of NemotronH_Omni_Reasoning_V3.

    A video's placeholder is a text of which tokenizers make several tokens, so `encode` replaces it by one token, which
    is not in the vocabulary and does not occur in the expanded prompt: vocab_size.

    As in vLLM, a configuration's video_pruning_rate, a share of a video's embeddings that transformers leaves out, has
    no effect.

    Attributes:
      pixels: pixel transform of each modality.
      budget: numbers of patches.
    """

    modalities = ("image", "video")
    frames_first = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings. Raises ModelConfigError for a missing or invalid token id, ModelFileError for
        missing or invalid settings.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        fields = ConfigFields(config_json)
        name = "image_token_id" if fields.has("image_token_id") else "img_context_token_id"
        image = fields.integer(name, minimum=0)
        self.token_ids = {"image": image}
        self.check_token_ids(model_config)
        self.token_ids = {"image": image, "video": model_config.vocab_size}
        self.pixels, budgets = dict[str, Pixels](), dict[str, Budget]()
        for kind, places in {"image": (IMAGES,), "video": (VIDEOS, IMAGES)}.items():
            path, found = read_settings(Path(folder), *places)
            try:
                self.pixels[kind], budgets[kind] = self._read(kind, found)
            except ModelConfigError as error:
                raise ModelFileError(path, str(error)) from None
        images, frames = budgets["image"], budgets["video"]
        self.budget = Budget(images.least, images.most, frames.target, frames.square)
        self.settings = f"{type(self).__name__} {self.pixels!r} {self.budget!r} {self.tower!r}"

    def _read(self, modality: str, found: ConfigFields) -> tuple[Pixels, Budget]:
        """Return the pixel transform of a modality, and a Budget, from its settings `found`. As in transformers, frames
        are always resized by bicubic interpolation and scaled to 0 to 1, and have no default mean.

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
        """Return a number of patches. Raises ModelConfigError unless it is from `minimum` to _MOST."""
        if (found := fields.integer(name, default, minimum=minimum)) > _MOST:
            raise fields.fail(name, f"{minimum} to {_MOST}")
        return found

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an item of the modality in a prompt. That of images needs the tokenizer."""
        if modality == "video":
            return _PLACEHOLDER
        return str(self.tokenizer.convert_ids_to_tokens([self.token_ids["image"]])[0])

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with one token for each placeholder of a video. token_ids: token ids
        of the whole text.
        """
        return with_one_token(text, token_ids, _PLACEHOLDER, self.token_ids["video"], self.tokenizer)

    def option_names(self) -> tuple[str, ...]:
        return _LEAST, _LIMIT, _TARGET

    def with_options(self, options: Mapping[str, Any]) -> Any:
        """Return a copy with the larger of its own and the engine's numbers of patches. Raises RequestError for unknown
        options, and for an invalid one.
        """
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

        value: uint8[H, W, 3] or frames.Video. options: numbers of patches. most: limit of patches; None for no limit.
        Raises RequestError for other options and values, more patches, and images that are too narrow for theirs.
        """
        check_options(options, self.option_names())
        budget, depth = self._asked(options), self.tower.temporal_patch_size
        frames = frames_of(modality, value, self.modalities)
        times = () if modality == "image" else _times(value)
        grid = self.image_grid if modality == "image" else self.frame_grid
        rows, columns = grid(frames.shape[1], frames.shape[2], budget)
        steps = -(-len(frames) // depth)
        check_room(modality, steps * (rows * columns + self.tower.rows_before * self.tower.merge), most)
        height, width = rows * self.tower.patch_size, columns * self.tower.patch_size
        pixels = self.pixels[modality]
        resized = np.stack([_resized(frame, height, width, pixels.resample) for frame in frames])
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

    def processed(self, patches: np.ndarray, grid: tuple[int, int, int], seconds: tuple[float, ...] = ()) -> Processed:
        """Return the Processed item of a grid's patches, with the rows of learned tokens before those of each step.

        patches: f32 [number of patches, features]. grid: (time, height, width) in patches. seconds: time of each frame
        of a video, NaN if it is unknown; () for an image.
        """
        found, tower = super().processed(patches, grid, seconds), self.tower
        before, cells = tower.rows_before, found.num_rows // grid[0]
        count, unused = before * tower.merge, before * tower.merge - tower.num_tokens
        tokens = np.zeros((len(tower.columns), count), np.int32)
        tokens[0, :unused] = -1
        tokens[tower.columns.index("kind")] = np.arange(count) - unused + _FIRST_TOKEN
        tokens[tower.columns.index("kind"), :unused] = -1
        named = found.columns.reshape(len(tower.columns), grid[0], -1)
        named[tower.columns.index("kind")] = _VIDEO if seconds else _IMAGE
        tokens = np.repeat(tokens[:, None], grid[0], axis=1)
        tokens[0] = np.where(tokens[0] < 0, -1, np.arange(grid[0])[:, None])
        rows = np.pad(found.rows.reshape(grid[0], cells), ((0, 0), (before, 0)), constant_values=-1)
        cut = found.patches.reshape(grid[0], cells * tower.merge, patches.shape[1])
        cut = np.pad(cut, ((0, 0), (count, 0), (0, 0)))
        return found._replace(
            patches=cut.reshape(grid[0] * cut.shape[1], cut.shape[2]),
            columns=np.concatenate([tokens, named], axis=2).reshape(len(tower.columns), -1),
            rows=rows.reshape(-1),
        )

    def _coordinates(self, grid: tuple[int, int, int], order: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of GridProcessor._coordinates by name, with "longer", the longer side in patches, and
        "kind", that of images.
        """
        found = super()._coordinates(grid, order)
        longer = np.maximum(found["height"], found["width"])
        return {**found, "longer": longer, "kind": np.full_like(longer, _IMAGE)}

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder replaced by the tokens of its item. items: by modality, in the order
        of the prompt.

        Raises RequestError for another number of items than placeholders, and for an item without a tokenizer.
        """
        embedded = dict.fromkeys(self.modalities, self.token_ids["image"])
        return self.expand_chunks(token_ids, items, self._chunks, embedded)

    def _chunks(self, modality: str, item: Processed) -> list[Chunk]:
        """Return the chunks of an item: an image between its start and end, or so each step of a video, after the
        numbers and times of its frames. Raises RequestError without a tokenizer.
        """
        self.check_tokenizer(modality)
        after, steps = self.encoded(_END), item.grid[0]
        if modality == "image":
            return [(self.encoded(_START), item.num_rows, after)]
        depth, chunks = self.tower.temporal_patch_size, list[Chunk]()
        for step in range(steps):
            shown = [_named(n, item.seconds[n], n % depth) for n in range(len(item.seconds)) if n // depth == step]
            before = ("\n" if step else "") + " and ".join(shown) + f": {_START}"
            chunks.append((self.encoded(before), item.num_rows // steps, after))
        return chunks


def _named(number: int, seconds: float, place: int) -> str:
    """Return the text of a frame: its number, counted from 1 in the prompt, and its time, if that is not NaN. place:
    number of the frame among those that share embeddings.
    """
    name = f"{'frame' if place else 'Frame'} {number + 1}"
    return name if math.isnan(seconds) else f"{name} sampled at {seconds:.2f} seconds"


def _times(video: Any) -> tuple[float, ...]:
    """Return the time of each frame of a frames.Video in seconds, NaN if its rate is unknown. As in transformers, the
    duration of a frame is rounded down to milliseconds.
    """
    if not getattr(video, "fps", None):
        return (math.nan,) * len(getattr(video, "frames", video))
    duration = int(1000.0 / video.fps)
    return tuple(int(index) * duration / 1000.0 for index in video.frames_indices)


def _even(side: int, merge: int, other: int, most: int) -> int:
    """Return a side in patches as a multiple of `merge`: rounded up if there are then at most `most` patches, otherwise
    down, but at least `merge`. other: the other side.
    """
    rest = side % merge
    if not rest:
        return side
    return side + merge - rest if (side + merge - rest) * other <= most else max(merge, side - rest)


def _grids(most: int) -> list[tuple[int, int]]:
    """Return grids (rows, columns) of at most `most` patches, of even sides, of which one has the most; at least one of
    2 x 2.
    """
    sides = range(max(2, math.isqrt(most) // 2 * 2), 0, -2)
    return [(side, max(2, most // side // 2 * 2)) for side in sides]


def _resized(picture: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Return uint8[H, W, 3] resized to [height, width, 3], f32, without rounding and with values beyond those of bytes;
    the array itself if it has that size.
    """
    if picture.shape[:2] == (height, width):
        return picture
    colours = (Image.fromarray(picture[..., colour].astype(np.float32)) for colour in range(3))
    made = [np.asarray(each.resize((width, height), Image.Resampling(resample))) for each in colours]
    return np.stack(made, axis=-1)

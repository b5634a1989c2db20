"""InternVL's processor: images are resized to the tiling of the nearest shape, and added as a whole. Frames of videos
are resized to one tile each, and numbered in the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.frames import LARGEST_FRAMES
from jaxengine.media.processor import Processed
from jaxengine.media.processors.llava import CLIP_MEAN, CLIP_STD
from jaxengine.media.processors.settings import IMAGES, VIDEOS, Pixels, read_settings
from jaxengine.media.processors.units import UnitProcessor, boolean_option, integer_option, read_size
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.params.files import read_object

_BICUBIC = 3
_MAX_TILES = 64


class InternVLProcessor(UnitProcessor):
    """Processor of InternVLForConditionalGeneration.

    Attributes:
      min_tiles, max_tiles: limits of an image's tiles, without the whole.
      crops: whether images are cut into tiles where a request does not say.
    """

    defaults = {
        "resample": _BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"height": 384, "width": 384},
        "min_patches": 1,
        "max_patches": 12,
    }
    modalities: tuple[str, ...] = ("image", "video")
    needs_tokenizer = True
    crops = True
    min_tiles: int
    max_tiles: int

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        named = read_object(folder, "tokenizer_config.json") or {}
        names = [str(named.get(f"{end}_image_token") or text) for end, text in (("start", "<img>"), ("end", "</img>"))]
        self.start, self.end = (tokenizer.encode(name, add_special_tokens=False) for name in names)
        video = tokenizer.encode(str(named.get("video_token") or "<video>"), add_special_tokens=False)
        self.video_id = video[0]
        if len(video) != 1 or not self._makes_videos_alike(Path(folder)):
            self.modalities = ("image",)

    def _makes_videos_alike(self, folder: Path) -> bool:
        """Whether the checkpoint preprocesses video frames like images; other videos are not supported. folder: of the
        checkpoint. Raises ModelFileError for a missing or invalid file.
        """
        _, found = read_settings(folder, VIDEOS, IMAGES)
        fields = found.with_defaults(**self.defaults)
        try:
            size = read_size(fields, "size", ("height", "width"))
            return Pixels.read(fields) == self.pixels and set(size.values()) == {self.side}
        except ModelConfigError:
            return False

    def read_settings(self, fields: ConfigFields) -> None:
        """Read the limits of tiles. Raises ModelConfigError for a size other than the tower's, and for limits out of
        range.
        """
        size = read_size(fields, "size", ("height", "width"))
        if set(size.values()) != {self.side}:
            raise fields.fail("size", f"{self.side} by {self.side}, the tower's image_size")
        # transformers' InternVL ignores crop_to_patches in the file.
        self.min_tiles, self.max_tiles = fields.integer("min_patches"), fields.integer("max_patches")
        if self.max_tiles > _MAX_TILES or self.min_tiles > self.max_tiles:
            raise fields.fail("max_patches", f"from min_patches {self.min_tiles} to {_MAX_TILES}")

    def option_names(self) -> tuple[str, ...]:
        return ("crop_to_patches", "min_patches", "max_patches")

    def placeholder_id(self) -> int:
        """Return image_token_id of config.json. Raises ModelConfigError as `token_id`."""
        return self.token_id("image_token_id")

    def placeholder_id_of(self, modality: str) -> int:
        """Return the token that stands for an image or, by the tokenizer, a video."""
        return self.video_id if modality == "video" else self.placeholder_id()

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in tiles, or a frames.Video, one tile a frame. options:
        mm_processor_kwargs; most: limit of patches. Raises RequestError for unknown options, other values, strips, and
        more patches.
        """
        if modality == "image":
            return super().process(modality, value, options, most)
        frames = self.checked_frames(modality, value, options, most)
        units = [self.pixels.resized(frame, self.side, self.side) for frame in frames]
        return self._processed(self._cut(units), 1, len(units))

    def largest(self, modality: str, size: tuple[int, int] | None = None) -> Processed:
        """Return the image with the most tiles, or one of `size`, (height, width) in pixels; of videos one of
        LARGEST_FRAMES frames, whatever the size.
        """
        if modality == "image":
            return super().largest(modality, size)
        return self.process(modality, np.zeros((LARGEST_FRAMES, self.side, self.side, 3), np.uint8), {})

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video (`item`): each frame's number and its embeddings between marks."""
        each = self.tower.unit // self.tower.merge
        pieces = []
        for frame in range(item.num_rows // each):
            text = f"\nFrame{frame + 1}: " if frame else "Frame1: "
            number = self.tokenizer.encode(text, add_special_tokens=False)
            pieces += [*number, *self.start, *[self.image_id] * each, *self.end]
        return pieces

    def largest_size(self) -> tuple[int, int]:
        """Return the height and width in pixels of an image that gets the most tiles."""
        rows, columns = max(_tilings(self.min_tiles, self.max_tiles), key=lambda tiling: tiling[0] * tiling[1])
        return rows * self.side, columns * self.side

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Resize an image, `picture` uint8[H, W, 3], to the nearest tiling; return its tiles, then the whole if there
        are several, and (rows, columns). The whole is resized to a square.

        options: mm_processor_kwargs, of which `min_patches` and `max_patches` replace the limits of tiles; with
        `crop_to_patches` False the whole alone is returned, and (1, 1). Raises RequestError for an invalid one.
        """
        side, resize = self.side, self.pixels.resized
        most = integer_option(options, "max_patches", self.max_tiles, _MAX_TILES)
        least = integer_option(options, "min_patches", min(self.min_tiles, most), most)
        if not boolean_option(options, "crop_to_patches", self.crops) or most == 1:
            return [resize(picture, side, side)], (1, 1)
        rows, columns = _tiling(picture.shape[0], picture.shape[1], side, least, most)
        whole = resize(picture, rows * side, columns * side)
        tiles = list(whole.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3))
        return tiles if len(tiles) == 1 else [*tiles, resize(picture, side, side)], (rows, columns)

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): its embeddings between two marks."""
        return [*self.start, *[self.image_id] * item.num_rows, *self.end]


def _tilings(least: int, most: int) -> list[tuple[int, int]]:
    """Return all (rows, columns) with `least` to `most` tiles, sorted by number of tiles, then by columns."""
    sides = range(1, most + 1)
    found = [(rows, columns) for columns in sides for rows in sides if least <= rows * columns <= most]
    return sorted(found, key=lambda tiling: tiling[0] * tiling[1])


def _tiling(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Return the (rows, columns) whose shape is nearest to the image's; (1, 1) if the limits allow no tiling.

    height, width: of the image in pixels; side: of a tile; least, most: limits of the number of tiles. Among equals it
    is the one with the most tiles, as long as they have less than twice the image's area.
    """
    best, nearest = (1, 1), float("inf")
    for rows, columns in _tilings(least, most):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and width * height > 0.5 * side * side * rows * columns):
            best, nearest = (rows, columns), distance
    return best

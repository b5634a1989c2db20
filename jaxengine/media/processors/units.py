"""Base of processors that cut images into units: squares with equal numbers of patches. NumPy only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxengine.media.base.frames import LARGEST_FRAMES
from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.grids import check_ratio, learned_places
from jaxengine.media.processors.settings import (
    IMAGES,
    MAX_SIDE,
    VIDEOS,
    Pixels,
    bad_option,
    check_options,
    check_pictures,
    frames_of,
    read_settings,
)
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError


def read_size(fields: ConfigFields, name: str, *allowed: tuple[str, ...]) -> dict[str, int]:
    """Return the mapping `name` of sides to pixels, whose keys are exactly those of one of `allowed`.

    A plain number stands for all sides of the first of these; not for a longest edge, as transformers would stretch
    images to a square. Sides that are None are ignored. Raises ModelConfigError for other keys, and for pixels outside
    1 to MAX_SIDE.
    """
    value = fields.value(name)
    if type(value) is int and allowed[0] != ("longest_edge",):
        value = dict.fromkeys(allowed[0], value)
    found = {key: side for key, side in value.items() if side is not None} if isinstance(value, Mapping) else {}
    right = any(set(found) == set(keys) for keys in allowed)
    if not right or any(type(side) is not int or not 1 <= side <= MAX_SIDE for side in found.values()):
        choices = " or ".join("{" + ", ".join(keys) + "}" for keys in allowed)
        raise fields.fail(name, f"a mapping {choices} to pixels from 1 to {MAX_SIDE}")
    return found


def check_placeholders(modality: str, shown: str | int, found: int, given: int) -> None:
    """Raise RequestError unless the prompt has one placeholder per item.

    modality: kind of the items, for the message. shown: the placeholder. found: number of placeholders in the prompt.
    given: number of items.
    """
    if found != given:
        problem = f"the prompt has {found} of the placeholder {shown!r}, and {given} {modality}s are given"
        raise RequestError(f"{problem}: there must be one for each", param="prompt")


def gridless(num_rows: int, grid: tuple[int, int, int] | None, right: bool, allowed: str) -> tuple[int, int, int]:
    """Return (1, 1, num_rows), for a model whose prompts do not depend on an image's grid. Raises RequestError if a
    grid is given, and unless the number of embeddings is `right`. allowed: text of those that are.
    """
    if grid is not None or not right:
        problem = f"embeddings of an image of this model must be {allowed}; they have no grid; got {num_rows}"
        raise RequestError(problem + (f" with grid {grid}" if grid else ""), param="image")
    return 1, 1, num_rows


class UnitProcessor:
    """Base class of a MediaProcessor that cuts images into units.

    A subclass implements `units`, the squares of an image, and may override `pieces`, its tokens in the prompt.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with a tower whose configuration has the `vit` (jaxengine.models.vision.base.vit) that
        encodes units.
      tokenizer: of the model; None without one.

    Attributes:
      modalities: kinds of items that are taken.
      needs_tokenizer: whether images are represented by text that must be tokenized.
      most_given: limit of units in embeddings that are passed instead of an image.
      defaults, config_defaults: transformers' defaults of missing settings, and of missing fields of config.json.
      token_names: fields of config.json with the token of images, of which the first counts that it has.
      embedded_names: the same for the token at whose positions embeddings go; () for the token of images.
      start, end: tokens before and after the embeddings of an image.
      of_frames: copy of the processor with the pixel transform of videos' frames, of families that take videos.
      places: where settings are, as read_settings takes them.
      needs_settings: whether the checkpoint must have some.
      tower, side, patch: the tower's configuration, and the sides in pixels of a unit and of a patch.
      tokenizer, vocab_size: the model's.
      config_fields: of config.json, with `config_defaults`.
      pixels: pixel transform of images.
      settings: text of everything that affects the results of `process`.
    """

    modalities: tuple[str, ...] = ("image",)
    needs_tokenizer = False
    most_given: float = np.inf
    defaults: Mapping[str, Any] = {}
    config_defaults: Mapping[str, Any] = {}
    token_names: tuple[str, ...] = ("image_token_id",)
    embedded_names: tuple[str, ...] = ()
    start: Sequence[int] = ()
    end: Sequence[int] = ()
    of_frames: Any = None
    places: tuple[tuple[str, str], ...] = (IMAGES,)
    needs_settings = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's pixel transform and, with `read_settings`, the family's settings, over `defaults_of`
        them. Raises ModelConfigError without a tokenizer if it is needed, ModelFileError for missing or invalid
        settings.
        """
        if self.needs_tokenizer and tokenizer is None:
            raise ModelConfigError("this model's images need its tokenizer: leave skip_tokenizer_init False")
        self.tower: Any = model_config.tower
        self.side, self.patch = self.tower.vit.image_size, self.tower.vit.patch_size
        self.tokenizer = tokenizer
        self.vocab_size = model_config.vocab_size
        self.config_fields = ConfigFields(config_json).with_defaults(**self.config_defaults)
        path, found = read_settings(Path(folder), *self.places, needed=self.needs_settings)
        settings = found.with_defaults(**self.defaults_of(found))
        with errors_of(path):
            self.pixels = self.read_pixels(settings)
            self.read_settings(settings)
        self.settings = f"{type(self).__name__} {sorted(settings.raw.items(), key=str)} {self.tower!r}"

    def defaults_of(self, fields: ConfigFields) -> Mapping[str, Any]:
        """Return transformers' defaults of settings that `fields` lack: `defaults`, unless they depend on other
        settings. An override may raise ModelConfigError.
        """
        del fields
        return self.defaults

    def read_pixels(self, fields: ConfigFields) -> Pixels:
        """Return the pixel transform in a processor's settings. Raises ModelConfigError for invalid ones."""
        return Pixels.read(fields)

    def read_settings(self, fields: ConfigFields) -> None:
        """Read the family's settings, other than those of Pixels, from `fields` and set them. Raises ModelConfigError
        for invalid ones.
        """

    def check_square(self, fields: ConfigFields) -> None:
        """Raise ModelConfigError unless the setting `size` is the tower's square."""
        if set(read_size(fields, "size", ("height", "width")).values()) != {self.side}:
            raise fields.fail("size", f"{self.side} by {self.side}, the tower's image_size")

    def reads_frames(self, folder: Path) -> bool:
        """Read the settings of videos, set `of_frames`, and return True; return False for settings that are invalid, or
        with which a frame is no square of the tower: such videos are not supported.

        folder: folder of the checkpoint. Raises ModelFileError for a missing or invalid file.
        """
        _, found = read_settings(folder, VIDEOS, IMAGES)
        fields = found.with_defaults(**self.defaults)
        try:
            size, pixels = read_size(fields, "size", ("height", "width")), Pixels.read(fields)
        except ModelConfigError:
            return False
        self.set_frames(copy(self), pixels)
        return set(size.values()) == {self.side}

    def set_frames(self, of_frames: Self, pixels: Pixels) -> None:
        """Set `of_frames`, a copy of this processor with the settings of frames, and its pixel transform."""
        of_frames.pixels = pixels
        self.of_frames, self.settings = of_frames, f"{self.settings} {pixels!r}"

    def placeholder_id(self) -> int:
        """Return the id of the token that stands for one image in a prompt; in this class that of `token_names`. Raises
        ModelConfigError if it is missing or invalid.
        """
        return self.token_id(*self.token_names)

    @abstractmethod
    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image, uint8[H, W, 3], cut into squares of `side` pixels, uint8[side, side, 3], and (rows, columns)
        of these.

        options: mm_processor_kwargs, of which it uses `option_names`. Raises RequestError for an invalid option.
        """

    def num_units(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """Return how many units an image of height x width pixels has; 0 if the family only makes few.

        options: mm_processor_kwargs. Raises RequestError for an invalid option.
        """
        del height, width, options
        return 0

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`) in the prompt; in this class `image_id` for each of its embeddings,
        between `start` and `end`.
        """
        return [*self.start, *[self.image_id] * item.num_rows, *self.end]

    def pieces_of(self, modality: str, item: Processed, number: int) -> list[int]:
        """Return the tokens of an image or a video in the prompt. number: that of the item among those of its modality,
        from 0; not used in this class.
        """
        del number
        return self.pieces(item) if modality == "image" else self.video_pieces(item)

    @abstractmethod
    def largest_size(self) -> tuple[int, int]:
        """Return (height, width) in pixels of an image with the most units."""

    def option_names(self) -> tuple[str, ...]:
        """Return the names of mm_processor_kwargs that `units` uses, here ()."""
        return ()

    def with_options(self, options: Mapping[str, Any]) -> Any:
        """Return a copy with the largest image of an engine's options; this processor if, as here, they change none.
        Raises RequestError for unknown or invalid options.
        """
        check_options(options, self.option_names())
        return self

    @property
    def in_tokens(self) -> tuple[str, ...]:
        """Modalities whose items are a single token in a prompt before expansion."""
        return self.modalities

    @property
    def image_id(self) -> int:
        """Token at whose positions embeddings go: that of `embedded_names`, or else the placeholder. Raises
        ModelConfigError if it is missing or invalid.
        """
        return self.token_id(*self.embedded_names) if self.embedded_names else self.placeholder_id()

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        """Tokens at whose positions embeddings go; in this class image_id for all modalities."""
        return (self.image_id,)

    @property
    def rows_of_unit(self) -> int:
        """Number of embeddings of a unit in a prompt."""
        return self.tower.unit // self.tower.merge

    def token_id(self, *names: str) -> int:
        """Return a token id from the first of the fields `names` that config.json has.

        Raises ModelConfigError if it has none of them, or the id is not below vocab_size.
        """
        name = next((name for name in names if self.config_fields.has(name)), names[0])
        found = self.config_fields.integer(name, minimum=0)
        if found >= self.vocab_size:
            raise self.config_fields.fail(name, f"a token id below vocab_size {self.vocab_size}")
        return found

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it. Needs the tokenizer."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def placeholder(self, modality: str) -> str:
        """Return the text of the modality's placeholder token. Needs the tokenizer."""
        return str(self.tokenizer.convert_ids_to_tokens([self.placeholder_id_of(modality)])[0])

    def placeholder_id_of(self, modality: str) -> int:
        """Return the id of the token that stands for one item of a modality in a prompt; in this class that of
        images.
        """
        del modality
        return self.placeholder_id()

    def video_pieces(self, item: Processed) -> list[int]:
        """Return the tokens of a video in the prompt. This raises RequestError; families that take videos override
        it.
        """
        raise RequestError(
            f"video is not supported by this model; it takes {', '.join(self.modalities)}", param="video"
        )

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Cut an image, uint8[H, W, 3], into units and these into patches.

        options: names of option_names. most: limit of patches, if any. Raises RequestError for other options and
        values, extreme aspect ratios, and more patches.
        """
        height, width = self.checked_size(modality, value, options)
        # Checked before units are made: a small image may become many units.
        count = self.num_units(height, width, options)
        check_room(modality, count * self.tower.unit, most)
        units, (rows, columns) = self.units(value, options)
        check_room(modality, len(units) * self.tower.unit, most)
        return self._processed(self._cut(units), rows, columns)

    def checked_size(self, modality: str, value: Any, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return (height, width) in pixels of an image, uint8[H, W, 3]. Raises RequestError for another value, unknown
        options, and an extreme aspect ratio.
        """
        check_options(options, self.option_names())
        check_pictures(modality, value, self.modalities, 3)
        check_ratio(*value.shape[:2])
        return value.shape[:2]

    def checked_frames(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None) -> np.ndarray:
        """Check a video and return its frames, uint8 [N, H, W, 3], each of which becomes one unit.

        value: frames.Video, or only the frames. options: mm_processor_kwargs. most: limit of patches, if any. Raises
        RequestError for unknown options, a value without frames, extreme aspect ratios, and more patches.
        """
        check_options(options, self.option_names())
        frames = frames_of(modality, value, self.modalities)
        check_ratio(*frames.shape[1:3])
        check_room(modality, len(frames) * self.tower.unit, most)
        return frames

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the item of a black image of the largest size, or of `size`, (height, width) in pixels; for "video" of
        one of num_frames (LARGEST_FRAMES if None) frames, whatever the size.
        """
        shape = size or self.largest_size()
        if modality == "video":
            shape = num_frames or LARGEST_FRAMES, self.side, self.side
        return self.process(modality, np.zeros((*shape, 3), np.uint8), {})

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Return the grid (1, height, width) in patches of an image given as num_rows embeddings: its units in one
        line.

        Raises RequestError if a grid is given, for partial units, and for more units than most_given.
        """
        rows, side = self.rows_of_unit, self.side // self.patch
        tiles = f"{rows}, those of one tile: positions of more than one are undefined"
        allowed = f"a multiple of {rows}" if self.most_given == np.inf else tiles
        gridless(num_rows, grid, num_rows % rows == 0 and num_rows // rows <= self.most_given, allowed)
        return 1, side, side * (num_rows // rows)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder replaced by the pieces of its item, and then adjusted by `joined`.
        items: by modality, in the order of the prompt.

        Raises RequestError for another number of items than placeholders.
        """
        wanted = {self.placeholder_id_of(modality): modality for modality in self.in_tokens}
        for token, modality in wanted.items():
            shown = token if self.tokenizer is None else self.placeholder(modality)
            check_placeholders(modality, shown, sum(each == token for each in token_ids), len(items.get(modality, ())))
        out: list[int] = []
        owners: list[int] = []  # index in `order` of each token's item; -1 for the prompt's own tokens
        order: list[tuple[str, int]] = []
        for token in token_ids:
            modality, pieces = wanted.get(token), [token]
            if modality is not None:
                number = sum(kind == modality for kind, _ in order)
                pieces = self.pieces_of(modality, items[modality][number], number)
                order.append((modality, number))
            out += pieces
            owners += [-1 if modality is None else len(order) - 1] * len(pieces)
        out, owners = self.joined(out, owners)
        embedded, owner = np.isin(out, self.embedded_ids), np.asarray(owners)
        positions = [np.flatnonzero(embedded & (owner == each)).astype(np.int32) for each in range(len(order))]
        return Expanded(out, positions, order)

    def joined(self, token_ids: list[int], owners: list[int]) -> tuple[list[int], list[int]]:
        """Return (token_ids, owners) of an expanded prompt, adjusted to the tokenization of the expanded text; in this
        class unchanged.

        owners: for each token the number of its image or video in the prompt; -1 for the prompt's own tokens.
        """
        return token_ids, owners

    def normalized(self, units: np.ndarray) -> np.ndarray:
        """Return units uint8[..., 3] normalised to f32[..., 3] by `pixels`."""
        return self.pixels.normalized(units)

    def _processed(self, patches: np.ndarray, rows: int, columns: int) -> Processed:
        """Return the Processed item of these patches, unchanged and without columns. All embeddings are in the prompt,
        in the order in which the tower returns them.

        patches: f32 [number of patches, features]. rows, columns: units of the item, from which its grid in patches
        follows.
        """
        count = len(patches) // self.tower.merge
        side = self.side // self.patch
        no_columns = np.zeros((0, len(patches)), np.int32)
        return Processed(patches, no_columns, np.arange(count, dtype=np.int32), count, (1, rows * side, columns * side))

    def _cut(self, units: Sequence[np.ndarray]) -> np.ndarray:
        """Return units uint8[side, side, 3] cut into patches, f32[all patches, 3 * patch * patch], colour by colour and
        row by row. Pixels at the right and at the bottom that fill no patch are left out.
        """
        values, patch = self.normalized(np.stack(units)), self.patch
        count, side = len(values), values.shape[1] // patch
        cut = values[:, : side * patch, : side * patch].reshape(count, side, patch, side, patch, 3)
        return np.ascontiguousarray(cut.transpose(0, 1, 3, 5, 2, 4)).reshape(count * side * side, -1)

    def _placed(self, units: Iterable[np.ndarray], count: int, across: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the patches, f32[P, F], and learned positions, i32[1, P], of `count` units of any shape, f32[H, W, 3],
        each in the upper left corner of a square of `across` patches a side, line by line. Where a unit has no patch
        there are zeros, and -1. Pixels at the right and at the bottom that fill no patch are left out.
        """
        patch, side = self.patch, self.tower.vit.grid
        patches = np.zeros((count, self.tower.unit, self.tower.num_features), np.float32)
        places = np.full((count, self.tower.unit), -1, np.int32)
        for number, unit in enumerate(units):
            high, wide = unit.shape[0] // patch, unit.shape[1] // patch
            cut = unit[: high * patch, : wide * patch].reshape(high, patch, wide, patch, 3).transpose(0, 2, 4, 1, 3)
            at = (np.arange(high)[:, None] * across + np.arange(wide)).ravel()
            patches[number, at] = cut.reshape(high * wide, -1)
            places[number, at] = (learned_places(high, side)[:, None] * side + learned_places(wide, side)).ravel()
        return patches.reshape(-1, patches.shape[2]), places.reshape(1, -1)


class FrameUnits(UnitProcessor):
    """Base class of a UnitProcessor that also takes videos, each frame of which is resized to one unit."""

    modalities: tuple[str, ...] = ("image", "video")

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], in units, or a frames.Video, each of whose frames is stretched to one.

        options: mm_processor_kwargs. most: limit of patches, if any. Raises RequestError for unknown options, other
        values, extreme aspect ratios, and more patches.
        """
        if modality == "image":
            return super().process(modality, value, options, most)
        frames = self.checked_frames(modality, value, options, most)
        units = [self.of_frames.pixels.resized(frame, self.side, self.side) for frame in frames]
        return self._processed(self.of_frames._cut(units), 1, len(units))


def integer_option(options: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """Return the option `name` of mm_processor_kwargs, an integer from 1 to `most`; `default` if it is missing.

    Raises RequestError for other values.
    """
    value = options.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise bad_option(name, value, f"an integer from 1 to {most}")
    return value


def boolean_option(options: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the option `name` of mm_processor_kwargs, a boolean; `default` if it is missing. Raises RequestError for
    other values.
    """
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise bad_option(name, value, "true or false")
    return value

"""Processor of Pixtral and of Mistral Small 3.1 and later: in the prompt, a break token follows each line
of an image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import MediaProcessor, Processed
from jaxengine.media.processors.grids import GridProcessor, check_ratio
from jaxengine.media.processors.llava import SelectingProcessor
from jaxengine.media.processors.settings import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGES,
    MAX_SIDE,
    WHOLE,
    Pixels,
    bad_option,
    check_options,
    check_pictures,
    read_settings,
)
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.config.readers.mistral import PARAMS_FILE
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor(GridProcessor):
    """Processor of Pixtral's towers: scales an image down until its longer side fits, and up to whole rows of the
    tower.

    Args:
      folder: of the checkpoint. config_json: content of its config.json. model_config: of the model, with its tower's
        sizes. tokenizer: of the model.

    Attributes:
      pixels: pixel transform.
      longest: most pixels of the longer side, before sides are rounded up to multiples of `factor`.
      rounds: whether settings are in params.json: sides are then rounded to the nearest pixel, else down.
      marks: texts that end a line and an image.
    """

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's placeholder token (image_token_id, else image_token_index, 10 by default), pixel
        transform, longest edge (`size`, 1,024 by default) and texts that end lines and images (image_break_token and
        image_end_token of processor_config.json). Raises ModelConfigError for an invalid config.json, ModelFileError
        for missing or invalid settings.
        """
        super().__init__(model_config)
        self.tokenizer = tokenizer
        fields = ConfigFields(config_json)
        name = "image_token_id" if fields.has("image_token_id") else "image_token_index"
        self.token_ids = {"image": fields.integer(name, 10, minimum=0)}
        self.check_token_ids(model_config)
        path, found = _settings(Path(folder), fields)
        settings = found.with_defaults(
            image_mean=list(CLIP_MEAN), image_std=list(CLIP_STD), size={"longest_edge": 1024}
        )
        with errors_of(path):
            self.pixels, self.longest = Pixels.read(settings), _read_longest(settings)
            self.rounds = path.name == PARAMS_FILE
        whole = ConfigFields(read_object(Path(folder), "processor_config.json") or {})
        self.marks = whole.text("image_break_token", BREAK), whole.text("image_end_token", END)
        resizing = f"{self.pixels!r} {self.longest} {self.rounds}"
        self.settings = f"{type(self).__name__} {resizing} {self.marks} {self.tower!r}"

    def option_names(self) -> tuple[str, ...]:
        return ("size",)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found, longest = copy(self), self._asked_longest(options)
        found.longest = max(longest, self.longest)
        return found

    def _asked_longest(self, options: Mapping[str, Any]) -> int:
        """Return the longest edge in pixels from `options`, or this processor's. Raises RequestError for an invalid
        option.
        """
        if not options:
            return self.longest
        try:
            return _read_longest(ConfigFields(dict(options)))
        except ModelConfigError as error:
            raise bad_option("size", options["size"], str(error)) from None

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Resize an image, uint8[H, W, 3], and cut it into patches for the tower.

        options: only `size`, its longest edge. most: limit of patches, if any. Raises RequestError for other options
        and values, more patches, and extreme aspect ratios.
        """
        check_options(options, self.option_names())
        check_pictures(modality, value, self.modalities, 3)
        height, width = self._resized_size(value.shape[0], value.shape[1], self._asked_longest(options))
        self.check_room("image", 1, height, width, most)
        return self.cut(self.pixels.normalized(self.pixels.resized(value, height, width)[None]))

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return a square of the longest edge, or an image of `size`, (height, width) in pixels, with patches f32[P,
        0].

        Raises RequestError for an extreme aspect ratio.
        """
        height, width = self._resized_size(*(size or (self.longest, self.longest)), self.longest)
        grid = 1, height // self.tower.patch_size, width // self.tower.patch_size
        return self.processed(np.empty((int(np.prod(grid)), 0), np.float32), grid)

    def item_tokens(self, modality: str, item: Processed) -> np.ndarray:
        """Return the tokens of an image (`item`), with -1 for each of its embeddings: lines of these, each ended by the
        break token, the last by the end token. Raises RequestError without a tokenizer.
        """
        _, rows, columns = self.merged(item)
        lines = np.full((rows, columns + 1), -1)
        lines[:, -1], lines[-1, -1] = self._mark_ids()
        return lines.reshape(-1)

    def _resized_size(self, height: int, width: int, longest: int) -> tuple[int, int]:
        """Return (height, width) in pixels of an image after resizing, as by transformers'
        get_resize_output_image_size, or by Mistral AI's own library, which rounds to the nearest number of pixels.

        longest: limit of its longer side in pixels, before both sides are rounded up to multiples of `factor`. Raises
        RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        ratio = max(height, width) / longest
        if ratio > 1:
            whole = round if self.rounds else math.floor
            height, width = max(1, whole(height / ratio)), max(1, whole(width / ratio))
        high, wide = (max(1, -(-side // self.factor)) * self.factor for side in (height, width))
        return high, wide

    def _mark_ids(self) -> tuple[int, int]:
        """Return the ids of (the break token, the end token), which end lines of an image.

        Raises RequestError without a tokenizer, and if a mark is not one of its tokens.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"an image needs the model's tokenizer, for lines of it end with {' and '.join(self.marks)}",
                param="image",
            )
        between, last = (self.tokenizer.encode(mark, False) for mark in self.marks)
        if len(between) != 1 or len(last) != 1:
            raise RequestError(f"the tokenizer has no {' or no '.join(self.marks)}, with which lines of images end")
        return between[0], last[0]


def _settings(folder: Path, fields: ConfigFields) -> tuple[Path, ConfigFields]:
    """Return (file, settings) of a checkpoint's images: in Mistral AI's format, without a file of such settings, the
    vision_config.image_size as longest edge. fields: content of config.json. Raises ModelFileError and ModelConfigError
    for missing or invalid settings.
    """
    if (folder / PARAMS_FILE).exists() and not any((folder / name).exists() for name in (WHOLE, IMAGES[1])):
        size = fields.part("vision_config").integer("image_size")
        return folder / PARAMS_FILE, ConfigFields({"size": {"longest_edge": size}})
    return read_settings(folder, IMAGES)


def _read_longest(fields: ConfigFields) -> int:
    """Return the longest edge in pixels from the field `size`, a number or a mapping with longest_edge.

    Raises ModelConfigError unless it is an integer from 1 to MAX_SIDE.
    """
    size = fields.value("size")
    longest = size.get("longest_edge") if isinstance(size, Mapping) else size
    if type(longest) is not int or not 1 <= longest <= MAX_SIDE:
        raise fields.fail("size", f"a mapping with longest_edge, 1 to {MAX_SIDE} pixels")
    return longest


class LightOnOcrProcessor(PixtralProcessor):
    """Processor of LightOnOcrForConditionalGeneration: Pixtral's, without tokens between the lines of an image."""

    item_tokens = GridProcessor.item_tokens


def llava_or_pixtral(
    folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor:
    """Return the processor of a LLaVA checkpoint: a PixtralProcessor if its vision tower is Pixtral's, which takes
    images of any aspect ratio, else a SelectingProcessor.

    Arguments and errors are those of jaxengine.media.registry.processor_for.
    """
    pixtral = model_config.tower is not None and model_config.tower.columns
    kind = PixtralProcessor if pixtral else SelectingProcessor
    return kind(folder, config_json, model_config, tokenizer)

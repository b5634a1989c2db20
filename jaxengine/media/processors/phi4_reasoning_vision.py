"""Processor of Phi-4-reasoning-vision: an image keeps about its size, in whole patches, unless it has too many or
too few of them. A text that need not be a token stands for an image in prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.grids import GridProcessor, check_ratio
from jaxengine.media.processors.settings import (
    IMAGES,
    Pixels,
    bad_option,
    check_options,
    check_pictures,
    read_settings,
)
from jaxengine.media.processors.text_placeholder import TextPlaceholder
from jaxengine.media.processors.units import integer_option
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of

_MOST, _BILINEAR = 1 << 16, 2
_LEAST_NAME, _MOST_NAME = "min_num_patches", "max_num_patches"
# Bounds of the scale of an image, and the difference at which the search for it ends, as in transformers' SigLIP 2.
_SCALES, _NEAR = (1e-6, 100.0), 1e-5
# A token that the tokenizer reserves, <|dummy_0|>.
_IMAGE = 100256


class Phi4ReasoningVisionProcessor(TextPlaceholder, GridProcessor):
    """Processor of Phi4ForCausalLMV.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with its tower's sizes.
      tokenizer: of the model; None raises ModelConfigError.

    Attributes:
      pixels: pixel transform.
      limits: least and most patches of an image.
    """

    colours_last = True
    needs_grid = False

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the pixel transform and the limits of patches, of which config_json has those that the settings lack.
        Raises ModelConfigError without a tokenizer and for an image_token_id that is no token, ModelFileError for
        missing or invalid settings.
        """
        if tokenizer is None:
            raise ModelConfigError("this model's images need its tokenizer: leave skip_tokenizer_init False")
        super().__init__(model_config)
        self.tokenizer, fields = tokenizer, ConfigFields(config_json)
        self.image_id = fields.integer("image_token_id", _IMAGE, minimum=0)
        self.token_ids = {"image": self.image_id}
        self.check_token_ids(model_config)
        path, found = read_settings(Path(folder), IMAGES)
        self.place_text(path, "placeholder", "<image>")
        with errors_of(path):
            usual = {name: fields.value(name, count) for name, count in ((_LEAST_NAME, 256), (_MOST_NAME, 3600))}
            found = found.with_defaults(
                image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=_BILINEAR, patch_size=16, **usual
            )
            found.require(patch_size=self.tower.patch_size)
            self.pixels = Pixels.read(found)
            self.limits = found.integer(_LEAST_NAME), found.integer(_MOST_NAME)
            if self.limits[1] > _MOST:
                raise found.fail(_MOST_NAME, f"1 to {_MOST}")
            if self.limits[0] > self.limits[1]:
                raise found.fail(_LEAST_NAME, f"at most {_MOST_NAME}, {self.limits[1]}")
        self.settings = f"{type(self).__name__} {self.pixels!r} {self.limits} {self.tower!r}"

    def option_names(self) -> tuple[str, ...]:
        return _LEAST_NAME, _MOST_NAME

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.limits = self._limits(options)
        return found

    def _limits(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return `limits` overridden by `options`; a minimum that is not in options is lowered to the maximum. Raises
        RequestError for an invalid option, and for a minimum in options above the maximum.
        """
        names = self.option_names()
        least, most = (integer_option(options, name, n, _MOST) for name, n in zip(names, self.limits, strict=True))
        if least > most and _LEAST_NAME in options:
            raise bad_option(_LEAST_NAME, least, f"at most {_MOST_NAME}, {most}")
        return min(least, most), most

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Resize an image, uint8[H, W, 3], and cut it into patches.

        options: values by name (see option_names). most: largest number of patches; None for no limit. Raises
        RequestError for unknown options, invalid values, extreme aspect ratios, and images of more than `most` patches.
        """
        check_options(options, self.option_names())
        check_pictures(modality, value, self.modalities, 3)
        height, width = self.resized_size(value.shape[0], value.shape[1], self._limits(options))
        self.check_room(modality, 1, height, width, most)
        return self.cut(self.pixels.normalized(self.pixels.resized(value, height, width)[None]))

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the image with the most patches, or one of `size`, (height, width) in pixels, with patches f32[P, 0].

        Raises RequestError for an extreme aspect ratio.
        """
        height, width = (1, self.limits[1])
        if size is not None:
            height, width = (side // self.tower.patch_size for side in self.resized_size(*size, self.limits))
        return self.processed(np.empty((height * width, 0), np.float32), (1, height, width))

    def resized_size(self, height: int, width: int, limits: tuple[int, int]) -> tuple[int, int]:
        """Return (height, width) in pixels, whole patches, of an image after resizing: the largest scale with which its
        sides, rounded up, have no more patches than the image's own whole ones, brought within `limits`.

        Raises RequestError for an extreme aspect ratio.
        """
        check_ratio(height, width)
        patch, (least, most) = self.tower.patch_size, limits
        count = min(max((height // patch) * (width // patch), least), most)

        def scaled(scale: float) -> tuple[int, int]:
            high, wide = (max(1, math.ceil(side * scale / patch)) for side in (height, width))
            return high, wide

        low, high = _SCALES
        while high - low >= _NEAR:
            middle = (low + high) / 2
            low, high = (middle, high) if math.prod(scaled(middle)) <= count else (low, middle)
        rows, columns = scaled(low)
        return rows * patch, columns * patch

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt of GridProcessor.expand, after replacing the tokens of each placeholder text by
        image_id. Raises RequestError for another number of items than placeholders.
        """
        return super().expand(self.with_tokens(token_ids), items)

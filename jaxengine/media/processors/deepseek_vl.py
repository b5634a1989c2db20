"""Processors of DeepSeek-VL and Janus: images keep their shape, in a square that is filled with the mean colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.processors.llava import padded
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD, Pixels, switch, token_texts
from jaxengine.media.processors.units import UnitProcessor
from jaxengine.models.config.fields import ConfigFields


class DeepseekVLProcessor(UnitProcessor):
    """Processor of DeepseekVLForConditionalGeneration.

    Attributes:
      least: pixels of a scaled image's shorter side, at least.
      colour: red, green and blue around an image.
    """

    defaults = {
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"height": 384, "width": 384},
        "min_size": 14,
    }
    config_defaults = {"image_token_id": 100015}
    least: int
    colour: list[int]

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the least side, min_size, and the colour, image_mean times 255 rounded down, even if images are
        not normalised by it. Raises ModelConfigError for a square other than the tower's, a least side above it, a mean
        that is no colour, and unless do_pad is true or absent.
        """
        if not switch(fields, "do_pad"):
            raise fields.fail("do_pad", "true or absent")
        self.check_square(fields)
        self.least = fields.integer("min_size")
        if self.least > self.side:
            raise fields.fail("min_size", f"at most the tower's image_size, {self.side}")
        mean = Pixels.read(ConfigFields({**fields.raw, "do_normalize": True})).mean
        if not all(0 <= one <= 1 for one in mean):
            raise fields.fail("image_mean", "numbers from 0 to 1, the colour around images")
        self.colour = [int(one * 255) for one in mean]

    def largest_size(self) -> tuple[int, int]:
        return self.side, self.side

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return ([the image in the middle of one square], (1, 1)). Its longer side is scaled to that of the square,
        and the shorter in proportion, rounded, to at least `least`. picture: uint8[H, W, 3]. options: ignored.
        """
        del options
        height, width = picture.shape[:2]
        scale = self.side / max(height, width)
        height, width = (max(round(length * scale), self.least) for length in (height, width))
        return [padded(self.pixels.resized(picture, height, width), self.colour)], (1, 1)


class JanusProcessor(DeepseekVLProcessor):
    """Processor of JanusForConditionalGeneration: an image's placeholders stand between two tokens."""

    config_defaults = {"image_token_id": 100581}
    needs_tokenizer = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and tokenize the texts around an image: boi_token and eoi_token of
        tokenizer_config.json. Raises ModelConfigError or ModelFileError for missing or invalid settings.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        texts = token_texts(folder, boi_token="<begin_of_image>", eoi_token="<end_of_image>")
        self.start, self.end = map(self.ids, texts)

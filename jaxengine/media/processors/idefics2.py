"""Processor of Idefics2: an image of any shape within the tower's square, and if images are split, its four quarters
before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.settings import bad_option, check_options, switch
from jaxengine.media.processors.units import UnitProcessor, boolean_option, read_size
from jaxengine.models.config.fields import ConfigFields
from jaxengine.scheduler.base.errors import RequestError

_SPLIT, _SIZE = "do_image_splitting", "size"
_QUARTERS = 4
# The token around an image, and what may follow an image without a space in between.
_AROUND = "<fake_token_around_image>"
_ATTACHED = r"(?=[^\s<])"


class Idefics2Processor(UnitProcessor):
    """Processor of Idefics2ForConditionalGeneration. A unit is a whole image, or a quarter of one.

    Attributes:
      shortest, longest: limits of the pixels of a unit's sides. A longer side is scaled to `longest`, then a shorter
        one than `shortest` is stretched to it.
      splits: whether four quarters precede an image.
    """

    defaults = {
        "resample": int(Image.Resampling.BILINEAR),
        "image_mean": (0.5,) * 3,
        "image_std": (0.5,) * 3,
        _SIZE: {"shortest_edge": 378, "longest_edge": 980},
    }
    config_defaults = {"image_token_id": 32001}
    needs_tokenizer = True
    most_given = 1
    shortest: int
    longest: int
    splits: bool

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of sides, `size` with shortest_edge and longest_edge, and whether images are split,
        do_image_splitting, by default False. Raises ModelConfigError for limits that are not in order, from a patch to
        the tower's image_size.
        """
        size = read_size(fields, _SIZE, ("shortest_edge", "longest_edge"))
        self.shortest, self.longest = size["shortest_edge"], size["longest_edge"]
        if not self.patch <= self.shortest <= self.longest <= self.side:
            raise fields.fail(_SIZE, f"from {self.patch} to {self.side} pixels, the tower's image_size")
        self.splits = switch(fields, _SPLIT, False)

    def option_names(self) -> tuple[str, ...]:
        return (_SPLIT,)

    def with_options(self, options: Mapping[str, Any]) -> Any:
        check_options(options, self.option_names())
        found = copy(self)
        found.splits = boolean_option(options, _SPLIT, self.splits)
        return found

    def largest_size(self) -> tuple[int, int]:
        return self.longest, self.longest

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], for the tower, after its four quarters if it is split.

        options: mm_processor_kwargs, of which `do_image_splitting` overrides `splits`. most: limit of patches, if any.
        Raises RequestError for other options and values, extreme aspect ratios, more patches, and for an image with a
        side of one pixel that is to be split.
        """
        height, width = self.checked_size(modality, value, options)
        splits, parts, unit = boolean_option(options, _SPLIT, self.splits), [value], self.tower.unit
        check_room(modality, (1 + _QUARTERS * splits) * unit, most)
        if splits:
            if min(height, width) < 2:
                raise bad_option(_SPLIT, True, f"false for an image of {width}x{height} pixels")
            lines = value[: height // 2], value[height // 2 :]
            parts = [*(part for line in lines for part in (line[:, : width // 2], line[:, width // 2 :])), value]
        units = (self.normalized(self.pixels.resized(part, *self._fitted(*part.shape[:2]))) for part in parts)
        side = self.tower.vit.grid
        rows = np.arange(len(parts) * self.tower.num_latents, dtype=np.int32)
        return Processed(*self._placed(units, len(parts), side), rows, len(rows), (1, side, side * len(parts)))

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the placeholders of each unit, with the token around images before,
        between and after them.
        """
        around, latents = self._around, self.tower.num_latents
        return [*([around] + [self.image_id] * latents) * (item.num_rows // latents), around]

    def joined(self, token_ids: list[int], owners: list[int]) -> tuple[list[int], list[int]]:
        """Return (token_ids, owners) of an expanded prompt, with one token between images that follow each other.
        owners: as in UnitProcessor.joined.
        """
        around = self._around
        kept = [
            index
            for index, token in enumerate(token_ids)
            if not index or (token, token_ids[index - 1]) != (around, around) or min(owners[index - 1 : index + 1]) < 0
        ]
        return [token_ids[index] for index in kept], [owners[index] for index in kept]

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text` in which, as in transformers, a space stands between an image and
        text that is attached to its end.

        token_ids: token ids of the whole text, with or without special tokens at its beginning, which are kept; those
        that are not of `text` are returned unchanged.
        """
        image = re.escape(self.placeholder("image"))
        spaced = re.sub(f"({image}|{re.escape(_AROUND)}){_ATTACHED}", r"\1 ", text)
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        before = len(token_ids) - len(plain)
        if spaced == text or before < 0 or list(token_ids[before:]) != plain:
            return list(token_ids)
        return [*token_ids[:before], *self.tokenizer.encode(spaced, add_special_tokens=False)]

    @property
    def _around(self) -> int:
        """Token around images. Raises RequestError if the tokenizer has none."""
        found = self.tokenizer.encode(_AROUND, add_special_tokens=False)
        if len(found) != 1:
            raise RequestError(
                f"images of this model need the token {_AROUND}, which its tokenizer lacks", param="image"
            )
        return found[0]

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels of a unit of height x width pixels after resizing: scaled down to a longer
        side of `longest`, the other rounded down, then each side stretched to at least `shortest`.
        """
        ratio = width / height
        if width >= height and width > self.longest:
            height, width = int(self.longest / ratio), self.longest
        elif height > width and height > self.longest:
            height, width = self.longest, int(self.longest * ratio)
        return max(height, self.shortest), max(width, self.shortest)

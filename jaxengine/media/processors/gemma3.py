"""Gemma 3's processor: images are resized to one square; with pan and scan, crops of elongated ones are added."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import bad_option
from jaxengine.media.processors.units import UnitProcessor, boolean_option, integer_option
from jaxengine.models.config.fields import ConfigFields

_STANDARD, _BILINEAR = (0.5, 0.5, 0.5), 2
_MAX_CROPS = 16
_CROPS, _CROP_SIZE, _RATIO = (
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate",
)


class Gemma3Processor(UnitProcessor):
    """Processor of Gemma3ForConditionalGeneration.

    Attributes:
      scans: whether pan and scan adds crops by default.
      crops, crop_size, ratio: limits of pan and scan: the maximum number of crops, the minimum of a crop's side in
        pixels, and the minimum of the longer side of an image over its shorter one.
    """

    defaults = {
        "resample": _BILINEAR,
        "image_mean": _STANDARD,
        "image_std": _STANDARD,
        "size": {"height": 224, "width": 224},
    }
    needs_tokenizer = True
    token_names = ("boi_token_index", "boi_token_id")  # which also comes before the embeddings
    embedded_names = ("image_token_index", "image_token_id")
    scans: bool
    crops: int
    crop_size: int
    ratio: float

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set whether and how pan and scan adds crops: do_pan_and_scan, by default False, and
        pan_and_scan_max_num_crops (4), pan_and_scan_min_crop_size (256) and pan_and_scan_min_ratio_to_activate (1.2).

        Raises ModelConfigError for a size other than the tower's, and more than _MAX_CROPS crops.
        """
        self.check_square(fields)
        self.scans = fields.boolean("do_pan_and_scan", False)
        self.crops, self.crop_size = fields.integer(_CROPS, 4), fields.integer(_CROP_SIZE, 256)
        self.ratio = fields.number(_RATIO, 1.2)
        if self.crops > _MAX_CROPS:
            raise fields.fail(_CROPS, f"at most {_MAX_CROPS}")

    def option_names(self) -> tuple[str, ...]:
        return ("do_pan_and_scan", _CROPS, _CROP_SIZE, _RATIO)

    def largest_size(self) -> tuple[int, int]:
        return (self.crop_size, self.crop_size * self.crops) if self.scans else (self.side, self.side)

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's parts, stretched to the tower's square: the image itself and, with pan and scan, its crops;
        and (1, number of parts).

        picture: uint8[H, W, 3]. options: mm_processor_kwargs, of which those of `option_names` override the settings.
        Raises RequestError for an invalid option.
        """
        parts = [picture]
        if boolean_option(options, "do_pan_and_scan", self.scans):
            parts += self._parts(picture, options)
        return [self.pixels.resized(part, self.side, self.side) for part in parts], (1, len(parts))

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): its placeholders between start and end tokens and blank lines. With
        crops, one fixed English phrase stands before the image and another before the crops, which have spaces between
        them.
        """
        rows = self.tower.unit // self.tower.merge
        end = self.token_id("eoi_token_index", "eoi_token_id")
        blank = self.ids("\n\n")
        whole = [*blank, self.placeholder_id(), *[self.image_id] * rows, end, *blank]
        num_parts = item.num_rows // rows - 1
        if not num_parts:
            return whole
        pieces = [*self.ids("Here is the original image "), *whole]
        for part in range(num_parts):
            pieces += self.ids(" " if part else " and here are some crops to help you see better ")
            pieces += whole
        return pieces

    def joined(self, token_ids: list[int], owners: list[int]) -> tuple[list[int], list[int]]:
        """Return (token ids, owners) with newlines around images merged with those next to them in the prompt."""
        return merged_newlines(token_ids, owners, self.tokenizer)

    def _parts(self, picture: np.ndarray, options: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the crops of an elongated image, uint8 [H, W, 3], in a row or column: as many as the rounded ratio of
        its sides or as have the least size, whichever are fewer; at least two, but no more than the options allow. The
        last may be smaller than the others.

        [] for an image whose sides' ratio is below the limit, or whose crops would be too small. options:
        mm_processor_kwargs. Raises RequestError for an invalid option.
        """
        most = integer_option(options, _CROPS, self.crops, _MAX_CROPS)
        least_side = integer_option(options, _CROP_SIZE, self.crop_size, 1 << 14)
        ratio = options.get(_RATIO, self.ratio)
        if type(ratio) not in (int, float) or not 0 < ratio < math.inf:
            raise bad_option(_RATIO, ratio, "a finite number > 0")
        height, width = picture.shape[:2]
        wide = width >= height
        long, short = (width, height) if wide else (height, width)
        if long / short < ratio:
            return []
        count = min(most, max(2, min(long // least_side, math.floor(long / short + 0.5))))
        step = math.ceil(long / count)
        if min(step, short) < least_side:
            return []
        spans = [slice(step * index, step * (index + 1)) for index in range(count)]
        return [picture[:, span] if wide else picture[span] for span in spans]


def merged_newlines(token_ids: list[int], owners: list[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return (token ids, owners) of an expanded prompt with newlines of images merged with those next to them, as the
    tokenizer would.

    owners: for each token the number of its image in the prompt, -1 for the prompt's own; a merged token belongs to the
    image.
    """
    out: list[int] = []
    out_owners: list[int] = []
    at = 0
    while at < len(token_ids):
        end, newlines = at, 0
        while end < len(token_ids) and (found := _newlines(token_ids[end], tokenizer)):
            end, newlines = end + 1, newlines + found
        owner = max(owners[at:end], default=-1)
        run = [token_ids[at]] if end == at else token_ids[at:end]
        if owner >= 0:
            run = tokenizer.encode("\n" * newlines, add_special_tokens=False)
        out += run
        out_owners += [owners[at] if end == at else owner] * len(run)
        at = max(end, at + 1)
    return out, out_owners


def _newlines(token: int, tokenizer: Any) -> int:
    """Return the number of newlines in a token (its id) that consists only of newlines; 0 for other tokens."""
    text = tokenizer.convert_ids_to_tokens([token])[0] or ""
    return len(text) if text and not text.strip("\n") else 0

"""Processor of LLaVA: images are resized and cropped to one square, or stretched to it; one embedding per patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD, switch
from jaxengine.media.processors.units import UnitProcessor, read_size
from jaxengine.models.config.fields import ConfigFields

_BICUBIC = 3
# transformers' defaults of SiglipImageProcessor.
SIGLIP: Mapping[str, Any] = {
    "resample": _BICUBIC,
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "size": {"height": 224, "width": 224},
}


class LlavaProcessor(UnitProcessor):
    """Processor of LlavaForConditionalGeneration: resizes and centre-crops for CLIP, stretches for SigLIP.

    Attributes:
      size: {"shortest_edge": n} or {"height": n, "width": n}, the size after resizing.
      crops: whether the centre is cropped after resizing.
      pads: whether an image is first padded to a square with the mean colour.
    """

    defaults = {"resample": _BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "size": {"shortest_edge": 224}}
    token_names = ("image_token_index", "image_token_id")
    size: dict[str, int]
    crops: bool
    pads: bool

    def defaults_of(self, fields: ConfigFields) -> Mapping[str, Any]:
        return SIGLIP if _kind(fields) == "Siglip" else super().defaults_of(fields)

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set size, crops (do_center_crop; by default whether the size is a shortest_edge) and pads (do_pad;
        False for other processors than LLaVA's, which pad batches). Raises ModelConfigError if the resulting square, of
        crop_size (224 by default) if it crops, is not of the tower's image_size.
        """
        kinds = ("shortest_edge",), ("height", "width")
        self.size = read_size(fields, "size", *(kinds[::-1] if _kind(fields) == "Siglip" else kinds))
        self.pads = _kind(fields) in ("Llava", "") and fields.boolean("do_pad", False)
        self.crops = switch(fields, "do_center_crop", "shortest_edge" in self.size)
        made = self.size
        if self.crops:
            crop = fields.with_defaults(crop_size={"height": 224, "width": 224}).value("crop_size")
            made = {"height": crop, "width": crop} if type(crop) is int else crop
        elif "shortest_edge" in made and self.pads:
            made = {"height": made["shortest_edge"], "width": made["shortest_edge"]}
        if made != {"height": self.side, "width": self.side}:
            raise fields.fail(
                "crop_size" if self.crops else "size", f"{self.side} by {self.side}, the tower's image_size"
            )

    def largest_size(self) -> tuple[int, int]:
        return self.side, self.side

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return ([the image as one square, padded, resized and cropped by the settings], (1, 1)). A longer side and
        the colour of padding are rounded down. picture: uint8[H, W, 3]. options: ignored.
        """
        del options
        if self.pads:
            picture = padded(picture, [int(colour * 255) for colour in self.pixels.mean])
        height, width = picture.shape[:2]
        if "shortest_edge" in self.size:
            short = self.size["shortest_edge"]
            long = int(short * max(height, width) / min(height, width))
            height, width = (long, short) if width <= height else (short, long)
        else:
            height, width = self.size["height"], self.size["width"]
        resized = self.pixels.resized(picture, height, width)
        return [middle(resized, self.side) if self.crops else resized], (1, 1)


class SelectingProcessor(LlavaProcessor):
    """LlavaProcessor of a model whose units may also have an embedding of the class token, or none of their first
    patch.
    """

    @property
    def rows_of_unit(self) -> int:
        return self.tower.unit - self.tower.drops_first

    def _processed(self, patches: np.ndarray, rows: int, columns: int) -> Processed:
        """Return the Processed item of these patches, with a position for the class token of each unit, or without the
        embedding of its first patch, if the tower says so.
        """
        made = super()._processed(patches, rows, columns)
        if len(patches) == made.num_rows == rows * columns * self.rows_of_unit:
            return made
        count, size = rows * columns, self.tower.vit.num_patches
        kept = np.full((count, self.tower.unit), -1, np.int32)
        kept[:, int(self.tower.drops_first) :] = np.arange(count * self.rows_of_unit).reshape(count, -1)
        room = np.zeros((count, self.tower.unit, patches.shape[1]), np.float32)
        room[:, :size] = patches.reshape(count, size, -1)
        no_columns = np.zeros((0, kept.size), np.int32)
        return Processed(room.reshape(kept.size, -1), no_columns, kept.ravel(), count * self.rows_of_unit, made.grid)


def _kind(fields: ConfigFields) -> str:
    """Return the text before "ImageProcessor" in a processor's image_processor_type, such as "CLIP"; "" without that
    field. Raises ModelConfigError unless it is a text.
    """
    return fields.text("image_processor_type", "").partition("ImageProcessor")[0]


def padded(picture: np.ndarray, colour: list[int]) -> np.ndarray:
    """Return an image, uint8 [H, W, 3], in the middle of a square of this colour (RGB), whose side is the image's
    longer one. Of an odd margin the greater part comes after the image.
    """
    height, width = picture.shape[:2]
    side = max(height, width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = colour
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = picture
    return square


def middle(picture: np.ndarray, side: int) -> np.ndarray:
    """Return the central square of `side` pixels of an image, uint8 [H, W, 3], perhaps as a view; a smaller image is
    padded with black. Of an odd margin the greater part is cut off after the square, but added before the image.
    """
    height, width = picture.shape[:2]
    if min(height, width) < side:
        larger = np.zeros((max(height, side), max(width, side), 3), np.uint8)
        top, left = -(-(len(larger) - height) // 2), -(-(larger.shape[1] - width) // 2)
        larger[top : top + height, left : left + width] = picture
        picture, (height, width) = larger, larger.shape[:2]
    top, left = (height - side) // 2, (width - side) // 2
    return picture[top : top + side, left : left + side]

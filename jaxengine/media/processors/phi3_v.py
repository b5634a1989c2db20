"""Processor of Phi-3-vision and Phi-3.5-vision: an image is scaled to whole tiles along its longer side, with white
margins along the other; the tiles, and the whole canvas scaled down.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image

from jaxengine.media.processors.phi4_multimodal import Phi4MultimodalProcessor, check_numbers
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD
from jaxengine.models.config.fields import ConfigFields
from jaxengine.scheduler.base.errors import RequestError

_WHITE = 255
# Texts that stand for the image of a number, from 1, as in check_numbers.
_NUMBERED = r"<\|image_\d{1,9}\|>"
# Of published models.
_IMAGE_TOKEN = 32044


class Phi3VisionProcessor(Phi4MultimodalProcessor):
    """Processor of Phi3VForCausalLM. In a prompt either the placeholder token stands for an image, or the text
    <|image_1|> for the first, <|image_2|> for the second, and so on.
    """

    limit_name: ClassVar[str] = "num_crops"
    defaults: ClassVar = {
        "resample": int(Image.Resampling.BILINEAR),
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "num_crops": 1,
    }
    config_defaults: ClassVar = {"image_token_id": _IMAGE_TOKEN}

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limit of tiles, `num_crops`. Raises ModelConfigError for one out of range, for another
        number of embeddings of a tile than the tower has, and for a filter other than bilinear.
        """
        fields.require(resample=int(Image.Resampling.BILINEAR), num_img_tokens=self.tower.lines**2)
        self.read_limit(fields)

    def placeholder_id(self) -> int:
        """Return `image_token_id` of config.json, or else the published models' token. Raises ModelConfigError if it is
        not below vocab_size.
        """
        return self.token_id("image_token_id")

    def tiling(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of tiles of an image of height x width pixels: as many along its longer side as
        `most` tiles allow that keep its aspect ratio, and those that the other side then begins.
        """
        along = _along(height, width, most)
        across = -(-self._across(height, width, along) // self.side)
        return (along, across) if width < height else (across, along)

    def canvas(self, picture: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Return an image, uint8[H, W, 3], fitted into rows and columns of tiles, uint8[rows * side, columns * side, 3]
        with half of the margin, rounded down, before it and the rest after it; and (lines, columns) of all patches.

        A tall image is transposed before it is scaled, which decides how pixels are rounded. Raises RequestError for an
        image that would have no pixels across.
        """
        height, width = picture.shape[:2]
        is_tall = width < height
        wide = np.ascontiguousarray(picture.swapaxes(0, 1)) if is_tall else picture
        along, across = (rows, columns) if is_tall else (columns, rows)
        size = self._across(height, width, along)
        canvas = np.full((across * self.side, along * self.side, 3), _WHITE, np.uint8)
        before = (len(canvas) - size) // 2
        canvas[before : before + size] = self.pixels.resized(wide, size, along * self.side)
        grid = self.tower.vit.grid
        return canvas.swapaxes(0, 1) if is_tall else canvas, (rows * grid, columns * grid)

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text` with the placeholder token for each image. As in the code that the
        model was published with, each text between them is tokenized by itself, with the special tokens that the
        tokenizer adds to a text.

        token_ids: token ids of the whole text, with or without special tokens at its beginning; those that are not of
        `text`, or of a text without images, are returned unchanged. Raises RequestError for numbers that do not count
        from 1.
        """
        check_numbers(text)
        pieces = re.split(f"{re.escape(self.placeholder('image'))}|{_NUMBERED}", text)
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        if len(pieces) == 1 or len(token_ids) < len(plain) or list(token_ids[len(token_ids) - len(plain) :]) != plain:
            return list(token_ids)
        found = list(self.tokenizer.encode(pieces[0]))
        for piece in pieces[1:]:
            found += [self.image_id, *self.tokenizer.encode(piece)]
        return found

    def _across(self, height: int, width: int, along: int) -> int:
        """Return the pixels, rounded down, of the shorter side of an image of height x width pixels whose longer side
        is scaled to `along` tiles of `side` pixels. Raises RequestError if that is none.
        """
        found = int(along * self.side / (max(height, width) / min(height, width)))
        if not found:
            raise RequestError(f"the image is too narrow: {width}x{height} pixels leave no side", param="image")
        return found


def _along(height: int, width: int, most: int) -> int:
    """Return the number of tiles along the longer side of an image of height x width pixels: the largest that, with the
    tiles across that it needs, is at most `most` tiles, as is each smaller number.
    """
    ratio, along = max(height, width) / min(height, width), 1
    while (along + 1) * np.ceil((along + 1) / ratio) <= most:
        along += 1
    return along

"""Processor of Molmo: images as a whole and in crops that overlap, both with margins; windows of two by two patches
become an embedding each. Images stand before the prompt's text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.processors.molmo2 import CropsProcessor, read_pair
from jaxengine.media.processors.settings import CLIP_MEAN, CLIP_STD
from jaxengine.media.processors.tiles import MAX_TILES
from jaxengine.media.processors.units import check_placeholders
from jaxengine.models.config.fields import ConfigFields, ModelConfigError

# Patches of a window's side, and values of the tower's column: all, no or some pixels of a patch are the image's.
_WINDOW, _FULL, _EMPTY, _PARTIAL = 2, 0, 1, 2
_PATCH, _COLUMN, _START, _END, _IMAGE = "<im_patch>", "<im_col>", "<im_start>", "<im_end>", "<|image|>"


class MolmoProcessor(CropsProcessor):
    """Processor of MolmoForCausalLM."""

    defaults = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    needs_tokenizer = True

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings and look up the ids of its tokens. Raises ModelConfigError or ModelFileError
        for invalid settings, and for missing tokens.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        found = {text: self.ids(text) for text in (_PATCH, _COLUMN, _START, _END, _IMAGE)}
        if missing := [text for text, ids in found.items() if len(ids) != 1]:
            raise ModelConfigError(f"the tokenizer must have the token {missing[0]}")
        self._tokens = {text: ids[0] for text, ids in found.items()}

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limit of crops, max_crops (12 by default), and their margins, overlap_margins (4 and 4); a
        window is 2 by 2. Raises ModelConfigError for sizes other than the tower's (base_image_input_size,
        image_patch_size, image_token_length_h and _w), a limit out of range, margins that cut windows, and images whose
        margins are not marked (image_padding_mask false).
        """
        fields.require(image_padding_mask=True)
        grid, self.pooling = self.tower.vit.grid, (_WINDOW, _WINDOW)
        whole = fields.value("base_image_input_size", [self.side] * 2)
        if (whole if isinstance(whole, list) else [whole] * 2) != [self.side] * 2:
            raise fields.fail("base_image_input_size", f"{self.side} by {self.side}, the tower's")
        lines = dict.fromkeys(("image_token_length_h", "image_token_length_w"), grid // _WINDOW)
        for name, wanted in {"image_patch_size": self.patch, **lines}.items():
            if fields.integer(name, wanted) != wanted:
                raise fields.fail(name, f"{wanted}, as the tower has it")
        self.max_crops = fields.integer("max_crops", 12)
        if self.max_crops > MAX_TILES:
            raise fields.fail("max_crops", f"from 1 to {MAX_TILES}")
        self.margins = read_pair(fields, "overlap_margins", (4, 4), 0)
        if sum(self.margins) >= grid or any(margin % _WINDOW for margin in self.margins):
            raise fields.fail("overlap_margins", f"two even numbers whose sum is less than a crop's {grid} patches")

    def placeholder_id(self) -> int:
        """Return the id of <|image|>."""
        return self._tokens[_IMAGE]

    @property
    def image_id(self) -> int:
        """Token at whose positions embeddings are added, <im_patch>."""
        return self._tokens[_PATCH]

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's squares, f32[side, side, 3] from 0 to 1, and (rows, columns) of its crops: first the whole
        image, then the crops, both fitted into their canvas with black margins.

        picture: uint8[H, W, 3]. options: mm_processor_kwargs. Raises RequestError for an invalid option.
        """
        rows, columns = self.tiling(picture.shape[0], picture.shape[1], options)
        side, canvas = self.side, _fitted(picture, self._canvas_size(rows, columns))
        corners = [(top * self.patch, left * self.patch) for top, left in self._corners(rows, columns)]
        crops = [canvas[top : top + side, left : left + side] for top, left in corners]
        return [_fitted(picture, (side, side)), *crops], (rows, columns)

    def _corners(self, rows: int, columns: int) -> list[tuple[int, int]]:
        """Return the (top, left) of each of rows x columns crops, in patches of the canvas."""
        return [(row * self.step, column * self.step) for row in range(rows) for column in range(columns)]

    def _canvas_size(self, rows: int, columns: int) -> tuple[int, int]:
        """Return (height, width) in pixels of what rows x columns crops are cut from."""
        margin = sum(self.margins)
        return (rows * self.step + margin) * self.patch, (columns * self.step + margin) * self.patch

    def normalized(self, units: np.ndarray) -> np.ndarray:
        """Return units f32[..., 3] from 0 to 1, normalised."""
        return (units - np.asarray(self.pixels.mean, np.float32)) / np.asarray(self.pixels.std, np.float32)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3]: the patches of its units, with the marks of `_padding` as their one
        column and the rows of `_order`.

        options: mm_processor_kwargs. most: limit of patches, if any. Raises RequestError for unknown options, other
        values, extreme aspect ratios, and more patches.
        """
        made = super().process(modality, value, options, most)
        grid = self.tower.vit.grid
        rows, columns = made.grid[1] // grid, made.grid[2] // grid
        order, (high, wide) = self._order(rows, columns)
        padding, lines = self._padding(value.shape[:2], rows, columns), grid // _WINDOW
        count, crops = lines**2 + high * wide, ((lines, lines), (high, wide))
        return Processed(made.patches, padding[None], order, count, (1, high, wide), crops=crops)

    def _order(self, rows: int, columns: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the place among an image's embeddings of each window of its units, i32, -1 for those that other crops
        show in its place; and (height, width) in windows of what rows x columns crops show.
        """
        lines, step = self.tower.vit.grid // _WINDOW, self.step // _WINDOW
        before, after = (margin // _WINDOW for margin in self.margins)
        high, wide = (count * step + before + after for count in (rows, columns))
        down, across = (np.arange(count)[:, None] * step + np.arange(lines) for count in (rows, columns))
        for lines_of in (down, across):
            lines_of[1:, :before] = lines_of[:-1, lines - after :] = -1
        down, across = down[:, None, :, None], across[None, :, None, :]
        found = np.where((down < 0) | (across < 0), -1, lines**2 + down * wide + across)
        return np.concatenate([np.arange(lines**2), found.reshape(-1)]).astype(np.int32), (high, wide)

    def _padding(self, size: tuple[int, int], rows: int, columns: int) -> np.ndarray:
        """Return _FULL, _EMPTY or _PARTIAL for each patch of an image of `size`, (height, width), i32[P].

        As the published code has it, and so in training, a unit's mask is that of the unit after it, and the last one's
        is _PARTIAL.
        """
        grid, patch = self.tower.vit.grid, self.patch
        canvas = self._canvas_size(rows, columns)
        filled = []
        for length, first, whole in zip(*_place(size, canvas), canvas, strict=True):
            pixels = np.zeros(whole, np.int64)
            pixels[first : first + length] = 1
            filled.append(pixels.reshape(-1, patch).sum(axis=1))
        counts = filled[0][:, None] * filled[1]
        kinds = np.where(counts == patch**2, _FULL, np.where(counts == 0, _EMPTY, _PARTIAL)).astype(np.int32)
        masks = [kinds[top : top + grid, left : left + grid].reshape(-1) for top, left in self._corners(rows, columns)]
        return np.concatenate([*masks, np.full(grid * grid, _PARTIAL, np.int32)])

    def pieces(self, item: Processed) -> list[int]:
        token, lines = self._tokens, self.tower.vit.grid // _WINDOW
        found = list[int]()
        for rows, columns in ((lines, lines), item.grid[1:]):
            found += [token[_START], *([token[_PATCH]] * columns + [token[_COLUMN]]) * rows, token[_END]]
        return found

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with its images, after the tokenizer's first token, and then its text after a space, which
        is tokenized again: the published processor, and vLLM, have no other prompts with images. <|image|> stands for
        an image, or nothing; it and a line's end after it are left out of the text.

        Raises RequestError for another number of items than placeholders, if there are some.
        """
        images = items.get("image", ())
        if not images:
            return super().expand(token_ids, items)
        first = self.first_tokens
        written = list(token_ids[1:] if list(token_ids[:1]) == first else token_ids)
        if found := written.count(self.placeholder_id()):
            check_placeholders("image", _IMAGE, found, len(images))
        text = self.tokenizer.decode(written, skip_special_tokens=False)
        text = re.sub(f"{re.escape(_IMAGE)}\n?", "", text)
        text = text if text.startswith(" ") else f" {text}"
        return super().expand([*first, *[self.placeholder_id()] * len(images), *self.ids(text)], items)


def _place(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (height, width) in pixels of an image of `size` as it is fitted in the middle of a canvas, and (top, left)
    of it there; at least one pixel.
    """
    # In float32, as the published code.
    scale = min(np.float32(whole) / np.float32(length) for whole, length in zip(canvas, size, strict=True))
    height, width = (max(int(np.float32(length) * scale), 1) for length in size)
    return (height, width), ((canvas[0] - height) // 2, (canvas[1] - width) // 2)


def _fitted(picture: np.ndarray, canvas: tuple[int, int]) -> np.ndarray:
    """Return uint8[H, W, 3] resized linearly, with antialiasing, to fit a canvas, f32[*canvas, 3] from 0 to 1, with
    zeros around it.
    """
    (height, width), (top, left) = _place(picture.shape[:2], canvas)
    found = np.zeros((*canvas, 3), np.float32)
    for colour in range(3):  # Pillow resizes floats of one colour
        shown = Image.fromarray(picture[..., colour].astype(np.float32) / 255)
        resized = np.asarray(shown.resize((width, height), Image.Resampling.BILINEAR))
        found[top : top + height, left : left + width, colour] = np.clip(resized, 0, 1)
    return found

"""Processor of Phi-4-multimodal: an image is fitted into a tiling with white margins; the tiles, and the whole canvas
scaled down.

An image is represented by the tiles' embeddings line by line, without those of the margins, one between, and the
whole's line by line; one for its end follows each line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from jaxengine.media.base.processor import Expanded, Processed, check_room
from jaxengine.media.processors.grids import learned_places
from jaxengine.media.processors.settings import tiles_of
from jaxengine.media.processors.text_placeholder import with_one_token
from jaxengine.media.processors.tiles import LimitedTiles, tilings
from jaxengine.media.processors.units import gridless
from jaxengine.models.config.fields import ConfigFields
from jaxengine.scheduler.base.errors import RequestError

# Pixels of a side of the fitted image that transformers requires.
_LEAST_SIDE = 10
_WHITE = 255
# Parameter of the cubic convolution that scales the canvas down (Keys 1981); torch has the same.
_KEYS = -0.75
# The text that stands for the image of this number, from 1, in the prompts of vLLM and of the model's own code.
# int() refuses numbers of thousands of digits.
_NUMBERED = re.compile(r"<\|image_(\d{1,9})\|>")


class Phi4MultimodalProcessor(LimitedTiles):
    """Processor of Phi4MultimodalForCausalLM, and base of Phi-3-vision's. In a prompt either the placeholder token
    stands for an image, or the text <|image_1|> for the first, <|image_2|> for the second, and so on.
    """

    limit_name: ClassVar[str] = "dynamic_hd"

    defaults = {
        "resample": int(Image.Resampling.BICUBIC),
        "image_mean": (0.5,) * 3,
        "image_std": (0.5,) * 3,
        "size": {"height": 448, "width": 448},
        "dynamic_hd": 36,
    }

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limit of tiles. Raises ModelConfigError for one out of range, for sizes other than the
        tower's, and for a filter of the whole image other than bicubic.
        """
        self.check_square(fields)
        fields.require(resample=int(Image.Resampling.BICUBIC), patch_size=self.patch)
        self.read_limit(fields)
        # Of the canvas; the whole is scaled down after normalisation.
        self.pixels = replace(self.pixels, resample=int(Image.Resampling.BILINEAR))

    def placeholder_id(self) -> int:
        """Return `image_token_id` of config.json's vision_config, or else the published models' token. Raises
        ModelConfigError if it is not below vocab_size.
        """
        vision = self.config_fields.part_or_empty("vision_config", image_token_id=200010)
        found = vision.integer("image_token_id", minimum=0)
        if found >= self.vocab_size:
            raise vision.fail("image_token_id", f"a token id below vocab_size {self.vocab_size}")
        return found

    def largest_size(self) -> tuple[int, int]:
        return self.max_tiles * self.side, self.side

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        return gridless(num_rows, grid, True, "any number")

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Preprocess an image, uint8[H, W, 3], for the tower: the whole, then its tiles line by line.

        options: mm_processor_kwargs, of which the one named limit_name overrides the limit of tiles. most: limit of
        patches, if any. Raises RequestError for other options and values, extreme aspect ratios, and more patches.
        """
        height, width = self.checked_size(modality, value, options)
        rows, columns = self.tiling(height, width, self.limit(options))
        check_room(modality, (1 + rows * columns) * self.tower.unit, most)
        side = self.side
        canvas, used = self.canvas(value, rows, columns)
        pixels = self.pixels.normalized(canvas)
        patches = self._cut_values(np.stack([_scaled(pixels, side), *tiles_of(pixels, rows, columns)]))
        return self._arranged(patches, (rows, columns), used)

    def canvas(self, picture: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, tuple[int, int]]:
        """Return an image, uint8[H, W, 3], fitted into rows and columns of tiles, uint8[rows * side, columns * side, 3]
        with white margins at the right and at the bottom; and (lines, columns) of patches that are not margin
        throughout.

        Raises RequestError for an image that would become too narrow.
        """
        side, patch = self.side, self.patch
        fitted = self._fitted(picture, rows * side, columns * side)
        canvas = np.full((rows * side, columns * side, 3), _WHITE, np.uint8)
        canvas[: len(fitted), : fitted.shape[1]] = fitted
        # A patch of the margin is one that is white throughout.
        lines, width = (
            total * (side // patch) - (total * side - used) // patch
            for total, used in zip((rows, columns), fitted.shape[:2], strict=True)
        )
        return canvas, (lines, width)

    def tiling(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of tiles that cover an image of height x width pixels as it is; if these are more
        than `most`, the ones whose aspect ratio is nearest to the image's.

        Among equally near ones it is the one with the most tiles whose area is less than twice the image's, else the
        one with the fewest tiles.
        """
        rows, columns = -(-height // self.side), -(-width // self.side)
        if rows * columns <= most:
            return rows, columns
        best, nearest = (1, 1), math.inf
        for rows, columns in tilings(1, most):
            distance = abs(width / height - columns / rows)
            if distance < nearest or (distance == nearest and width * height > 0.5 * self.side**2 * rows * columns):
                best, nearest = (rows, columns), distance
        return best

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with the placeholder token for each numbered placeholder text.

        token_ids: token ids of the whole text, with or without special tokens at its beginning, which are kept; those
        that are not of `text` are returned unchanged. Raises RequestError for numbers that do not count from 1.
        """
        if not check_numbers(text):
            return list(token_ids)
        return with_one_token(text, token_ids, _NUMBERED, self.image_id, self.tokenizer)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt of UnitProcessor.expand, after replacing the tokens of each numbered placeholder
        text by the placeholder token, unless the prompt already has that. Raises RequestError for another number of
        items than placeholders.
        """
        found, at, tokenizer = list(token_ids), 0, self.tokenizer
        numbered = () if self.image_id in found else items.get("image", ())
        for number in range(1, len(numbered) + 1):
            if tokenizer is None:
                break
            written = tokenizer.encode(f"<|image_{number}|>", add_special_tokens=False)
            last = len(found) - len(written)
            at = next((start for start in range(at, last + 1) if found[start : start + len(written)] == written), -1)
            if at < 0:
                break
            found[at : at + len(written)] = [self.image_id]
        return super().expand(found, items)

    def _fitted(self, picture: np.ndarray, height: int, width: int) -> np.ndarray:
        """Return uint8[H, W, 3] scaled to the largest size within height x width pixels, rounded down. Raises
        RequestError if a side would have less than _LEAST_SIDE pixels.
        """
        by_height, by_width = height / picture.shape[0], width / picture.shape[1]
        if by_width < by_height:
            height = int(picture.shape[0] * by_width)
        else:
            width = int(picture.shape[1] * by_height)
        if min(height, width) < _LEAST_SIDE:
            shown = f"{picture.shape[1]}x{picture.shape[0]}"
            problem = f"{shown} pixels become {width}x{height}, and a side must keep {_LEAST_SIDE}"
            raise RequestError(f"the image is too narrow: {problem}", param="image")
        return self.pixels.resized(picture, height, width)

    def _cut_values(self, units: np.ndarray) -> np.ndarray:
        """Return units f32[U, side, side, 3] cut into patches, f32[P, F], colour by colour and row by row, with zeros
        in the places that the tower has after each unit's patches.
        """
        grid, patch, unit = self.tower.vit.grid, self.patch, self.tower.unit
        units = units[:, : grid * patch, : grid * patch]
        cut = units.reshape(len(units), grid, patch, grid, patch, 3).transpose(0, 1, 3, 5, 2, 4)
        out = np.zeros((len(units), unit, self.tower.num_features), np.float32)
        out[:, : grid * grid] = cut.reshape(len(units), grid * grid, -1)
        return out.reshape(-1, out.shape[-1])

    def _arranged(self, patches: np.ndarray, tiles: tuple[int, int], used: tuple[int, int]) -> Processed:
        """Return the item of an image's patches, f32[P, F], those of the whole first. Its embeddings are the tiles'
        lines, each with its end, a separator, and the whole's lines.

        tiles: (rows, columns) of tiles. used: (lines, columns) of patches of all tiles together that are not margin.
        """
        (rows, columns), tower = tiles, self.tower
        grid, lines, unit = tower.vit.grid, tower.lines, tower.unit
        inside = [np.clip(total - np.arange(count) * grid, 0, grid) for total, count in zip(used, tiles, strict=True)]
        places = np.full((1 + rows * columns, unit), -1, np.int32)
        places[0, : grid * grid] = _places((grid, grid), grid)
        for number in range(rows * columns):
            part = inside[0][number // columns], inside[1][number % columns]
            places[1 + number, : grid * grid] = _places(part, grid)
        # Squares of patches that are used, each by its first patch.
        high, wide = (int((-(-each // 2)).sum()) for each in inside)
        numbers = np.arange(high * (wide + 1), dtype=np.int32).reshape(high, wide + 1)
        placed = np.full((rows * lines, columns * lines + 1), -1, np.int32)
        placed[:high, :wide], placed[:high, -1] = numbers[:, :wide], numbers[:, wide]
        squares = lines * lines
        out = np.full((1 + rows * columns, unit // tower.merge), -1, np.int32)
        by_tile = placed[:, :-1].reshape(rows, lines, columns, lines).swapaxes(1, 2)
        out[1:, :squares] = by_tile.reshape(rows * columns, squares)
        # A line's end is stored in the first tile of its row of tiles, and that between in the whole's unit.
        out[1::columns, squares : squares + lines] = placed[:, -1].reshape(rows, lines)
        whole = numbers.size + 1 + np.arange(lines * (lines + 1), dtype=np.int32).reshape(lines, lines + 1)
        out[0] = [*whole[:, :lines].ravel(), *whole[:, lines], numbers.size]
        count = numbers.size + 1 + whole.size
        placed_by = places.reshape(1, -1)[: len(tower.columns)]
        return Processed(patches, placed_by, out.ravel(), count, (1, rows * grid, columns * grid))


def check_numbers(text: str) -> int:
    """Return how many numbered placeholder texts a prompt has. Raises RequestError for numbers that do not count from
    1.
    """
    numbers = [int(number) for number in _NUMBERED.findall(text)]
    if numbers != list(range(1, len(numbers) + 1)):
        shown = ", ".join(map(str, numbers[:10]))
        problem = f"<|image_1|>, <|image_2|>, ... must count from 1 in a prompt, got {shown}"
        raise RequestError(problem, param="prompt")
    return len(numbers)


def _places(used: tuple[int, int], grid: int) -> np.ndarray:
    """Return the learned position of each patch of a unit, i32[grid * grid]; -1 for the margin.

    used: (lines, columns) of patches that are not margin, which are spread over the learned positions of the unit.
    """
    found = np.full((grid, grid), -1, np.int32)
    rows, columns = (learned_places(count, grid) for count in used)
    found[: used[0], : used[1]] = rows[:, None] * grid + columns
    return found.ravel()


def _scaled(values: np.ndarray, side: int) -> np.ndarray:
    """Return values f32[H, W, C] scaled to f32[side, side, C] by cubic convolution of 4 x 4 values, however many lie
    between them; values at an edge are repeated beyond it.
    """
    for axis in (0, 1):
        taps, shares = _taps(values.shape[axis], side)
        parts = np.take(values, taps.ravel(), axis=axis)
        shape = (*values.shape[:axis], 4, side, *values.shape[axis + 1 :])
        weights = shares.reshape((1,) * axis + (4, side) + (1,) * (values.ndim - axis - 1))
        values = (parts.reshape(shape) * weights).sum(axis=axis, dtype=np.float32)
    return values


def _taps(size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the four indices along an axis of `size` values that each of `side` new ones is made of, int[4, side], and
    their shares, f32[4, side] (Keys 1981, a = _KEYS). The first and the last index stand for those beyond them.
    """
    spot = (np.arange(side) + 0.5) * (size / side) - 0.5
    low = np.floor(spot)
    offsets = np.arange(-1, 3)[:, None]
    far = np.abs(spot - low - offsets)
    near_share = ((_KEYS + 2) * far - (_KEYS + 3)) * far * far + 1
    far_share = ((_KEYS * far - 5 * _KEYS) * far + 8 * _KEYS) * far - 4 * _KEYS
    taps = np.clip(low.astype(np.int64) + offsets, 0, size - 1)
    return taps, np.where(far <= 1, near_share, far_share).astype(np.float32)

"""Processor of DeepSeek-VL2: the whole image in a square with margins, and then the tiles of the best of some sizes,
into which it is fitted with margins, too. Line by line, each line with an end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed, check_room
from jaxengine.media.processors.llava_next import best_size
from jaxengine.media.processors.settings import (
    IMAGES,
    WHOLE,
    are_sizes,
    tiles_of,
    token_text,
)
from jaxengine.media.processors.units import UnitProcessor, boolean_option, gridless
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.params.files import read_object

_SIZES, _CROP = "candidate_resolutions", "crop_to_patches"
_MAX_SIZES, _MAX_TILES = 256, 64
# Images of a prompt up to which they are cut into tiles.
_CUT_IMAGES = 2


class DeepseekVL2Processor(UnitProcessor):
    """Processor of DeepseekVLV2ForCausalLM. As in the published code, images of a prompt with more than two have one
    tile each, unless crop_to_patches says otherwise.

    Attributes:
      sizes: (height, width) in pixels of images before they are cut.
      colour: red, green and blue of margins.
    """

    needs_tokenizer = True
    # The published file has settings of images where transformers' has those of all processors.
    places = (IMAGES, (IMAGES[0], WHOLE))
    sizes: list[tuple[int, int]]
    colour: list[int]

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings, and look up the token of images, image_token of processor_config.json. Raises
        ModelConfigError or ModelFileError for missing or invalid settings, and for a text that is not one token.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        path = Path(folder) / WHOLE
        text = token_text(path, read_object(folder, WHOLE) or {}, "image_token", "<image>")
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise ModelConfigError(f"the tokenizer must have the token {text[:100]!r} of images")
        self._image_id = found[0]

    def defaults_of(self, fields: ConfigFields) -> Mapping[str, Any]:
        half = [0.5] * 3
        return {"image_mean": half, "image_std": half, "do_normalize": fields.boolean("normalize", True)}

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the sizes of images, candidate_resolutions as [width, height] of the settings, else of
        config.json, by default one square, and the colour of margins, image_mean times 255 rounded down.

        Raises ModelConfigError for anything but a list of 1 to _MAX_SIZES pairs of sides, for sides that are not
        multiples of the tower's image_size, for sizes of more than _MAX_TILES tiles, and for a patch_size or
        downsample_ratio other than the tower's.
        """
        fields.require(patch_size=self.patch, downsample_ratio=self.tower.factor)
        listed = fields.value(_SIZES, self.config_fields.value(_SIZES, [[self.side, self.side]]))
        if not are_sizes(listed, _MAX_SIZES) or any(side % self.side for each in listed for side in each):
            raise fields.fail(_SIZES, f"a list of [width, height], all multiples of the tower's image_size {self.side}")
        self.sizes = [(height, width) for width, height in listed]
        if max(height * width for height, width in self.sizes) > _MAX_TILES * self.side**2:
            raise fields.fail(_SIZES, f"of at most {_MAX_TILES} tiles each")
        self.colour = [int(value * 255) for value in self.pixels.mean]

    def placeholder_id(self) -> int:
        return self._image_id

    def option_names(self) -> tuple[str, ...]:
        return (_CROP,)

    def among(self, options: Mapping[str, Any], counts: Mapping[str, int]) -> Mapping[str, Any]:
        """Return the options of a prompt's images: without tiles if there are more than two, unless `options` say
        otherwise. counts: number of the prompt's items by modality.
        """
        return options if counts.get("image", 0) <= _CUT_IMAGES else {_CROP: False, **options}

    def largest_size(self) -> tuple[int, int]:
        return max(self.sizes, key=lambda size: size[0] * size[1])

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        height, width = self.checked_size(modality, value, options)
        side, tower = self.side, self.tower
        cuts = boolean_option(options, _CROP, True)
        tall, wide = best_size(height, width, self.sizes) if cuts else (side, side)
        rows, columns = tall // side, wide // side
        check_room(modality, (1 + rows * columns) * tower.unit, most)
        canvas = self._fitted(value, tall, wide)
        tiles = tiles_of(canvas, rows, columns)
        units = [self._fitted(value, side, side), *tiles]
        patches = np.zeros((len(units), tower.unit, tower.num_features), np.float32)
        patches[:, : tower.vit.num_patches] = self._cut(units).reshape(len(units), -1, tower.num_features)
        numbers, count = self._numbered(rows, columns)
        flat = patches.reshape(-1, tower.num_features)
        return Processed(flat, np.zeros((0, len(flat)), np.int32), numbers.ravel(), count, (1, 1, count))

    def _fitted(self, picture: np.ndarray, tall: int, wide: int) -> np.ndarray:
        """Return an image, uint8[H, W, 3], scaled to fit into uint8[tall, wide, 3], in the middle of margins. Sizes and
        places are rounded as by Pillow's ImageOps.pad.
        """
        height, width = picture.shape[:2]
        fitted = (tall, max(1, round(width / height * tall)))
        if width / height > wide / tall:
            fitted = (max(1, round(height / width * wide)), wide)
        fitted = min(fitted[0], tall), min(fitted[1], wide)
        canvas = np.empty((tall, wide, 3), np.uint8)
        canvas[:] = self.colour
        top, left = round((tall - fitted[0]) * 0.5), round((wide - fitted[1]) * 0.5)
        canvas[top : top + fitted[0], left : left + fitted[1]] = self.pixels.resized(picture, *fitted)
        return canvas

    def _numbered(self, rows: int, columns: int) -> tuple[np.ndarray, int]:
        """Return the numbers of the tower's rows in the prompt, i32[1 + tiles, rows of a unit], -1 for those that are
        not in it, and how many are: the whole image, the separator, and the tiles as one grid. Each line ends with the
        row for its end, of tiles that of the last one.
        """
        lines = self.tower.lines
        out = np.full((1 + rows * columns, lines * (lines + 1) + 1), -1, np.int32)
        whole = np.arange(lines * (lines + 1), dtype=np.int32).reshape(lines, -1)
        out[0] = np.concatenate([whole[:, :-1].ravel(), whole[:, -1], [whole.size]])
        width, own = columns * lines + 1, np.arange(lines)
        for number in range(rows * columns):
            row, column = divmod(number, columns)
            firsts = whole.size + 1 + (row * lines + own) * width
            out[1 + number, : lines**2] = (firsts[:, None] + column * lines + own).ravel()
            if column == columns - 1:
                out[1 + number, lines**2 : -1] = firsts + width - 1
        return out, whole.size + 1 + rows * lines * width

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        tilings = {(1, 1), *((height // self.side, width // self.side) for height, width in self.sizes)}
        counts = sorted({self._numbered(*tiling)[1] for tiling in tilings})
        return gridless(num_rows, grid, num_rows in counts, f"one of {', '.join(map(str, counts))}")

"""Processor of Ovis2 as it was published first: an image and the tiles that it is cut into, of any shape, are fitted
into squares with margins.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.ovis2 import NUM_INDICATORS, Ovis2Processor, best_of, kept_share
from jaxengine.media.processors.text_placeholder import TextPlaceholderProcessor
from jaxengine.media.processors.tiles import MAX_TILES
from jaxengine.media.processors.units import gridless, read_size
from jaxengine.models.config.fields import ConfigFields, ModelConfigError

_IMAGE = "<image>"
# Model types of the text -> the token at whose positions embeddings go, as in vLLM.
_PADS = {"qwen2": "<|image_pad|>", "llama": "<|reserved_special_token_0|>"}
# In the published code: most tiles of an image besides the whole.
_TILES = 9


class OvisProcessor(Ovis2Processor):
    """Processor of Ovis. All embeddings, those around and between tiles included, are at the positions of one token."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    # The published file is of CLIP's processor, which cuts nothing.
    defaults: ClassVar[Mapping[str, Any]] = {**Ovis2Processor.defaults, "max_patches": _TILES}
    most_given = np.inf

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: Any, tokenizer: Any):
        """Read the checkpoint's settings; the placeholder is the tokenizer's token of images, and that also stands for
        indicators. Raises ModelConfigError for a tokenizer without the token of images, ModelFileError for missing or
        invalid settings.
        """
        TextPlaceholderProcessor.__init__(self, folder, config_json, model_config, tokenizer)
        self.place_text(Path(folder), "the tokenizer's <image>", _IMAGE)
        self.indicators = (self.placeholder_id(),) * NUM_INDICATORS
        self._places = list(range(NUM_INDICATORS))

    def read_settings(self, fields: ConfigFields) -> None:
        size = read_size(fields, "size", ("shortest_edge",), ("height", "width"))
        if set(size.values()) != {self.side}:
            raise fields.fail("size", f"{self.side}, the tower's image_size")
        self.min_tiles, self.max_tiles, self.crops = 1, fields.integer("max_patches"), True
        if self.max_tiles > MAX_TILES:
            raise fields.fail("max_patches", f"from 1 to {MAX_TILES}")

    def placeholder_id(self) -> int:
        text = (self.config_fields.mapping("llm_config") or {}).get("model_type", "qwen2")
        tokens = self.ids(_PADS.get(text, _PADS["qwen2"]))
        if len(tokens) != 1:
            raise ModelConfigError(f"the tokenizer must have the token {_PADS.get(text, _PADS['qwen2'])}")
        return tokens[0]

    @property
    def embedded_ids(self) -> tuple[int, ...]:
        return (self.image_id,)

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return the whole image and, if there are several, its tiles, line by line, each normalised and fitted into a
        square with margins of zeros, f32[side, side, 3], and (rows, columns) of tiles.

        picture: uint8[H, W, 3]. options: mm_processor_kwargs of TilesProcessor. Raises RequestError for an invalid
        option.
        """
        height, width = picture.shape[:2]
        rows, columns = self._tiling_for(height, width, options)
        tall, wide, parts = height // rows, width // columns, [picture]
        for row in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                lower = height if row == rows - 1 else (row + 1) * tall
                right = width if column == columns - 1 else (column + 1) * wide
                parts.append(picture[row * tall : lower, column * wide : right])
        return [self._fitted(part) for part in parts], (rows, columns)

    def tiling(self, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the (rows, columns) of the fewest tiles, `least` to `most`, that keep more than 0.9 of an image's area
        when each is reduced to the side of the tower's square, or of those that keep most of it; (1, 1) for an image of
        too few pixels. height, width: of the image in pixels.
        """
        listed = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
        listed = [(rows, columns) for rows, columns in listed if rows <= height and columns <= width] or [(1, 1)]
        kept = {tiling: kept_share(height, width, *tiling, self.side) for tiling in listed if np.prod(tiling) >= least}
        return best_of(kept) if kept else (1, 1)

    def pieces(self, item: Processed) -> list[int]:
        return [self.image_id] * item.num_rows

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        each = self.tower.vit.num_patches // self.tower.merge
        # Around and between n tiles, of which one is the whole itself, there are three and n - 1 embeddings.
        counts = [each + 3, *((1 + tiles) * each + 2 + tiles for tiles in range(2, self.max_tiles + 1))]
        return gridless(num_rows, grid, num_rows in counts, f"one of {', '.join(map(str, counts))}")

    def normalized(self, units: np.ndarray) -> np.ndarray:
        """Return units f32[..., 3] as they are: they were normalised before they got margins."""
        return units

    def _fitted(self, part: np.ndarray) -> np.ndarray:
        """Return a part of an image, uint8[h, w, 3], resized to the square's side along its longer side, normalised,
        and in the middle of zeros, f32[side, side, 3]. The shorter side is rounded down, and at least 1; of an odd
        margin the greater part comes after the image.
        """
        side, (height, width) = self.side, part.shape[:2]
        tall = side if height >= width else max(1, int(height / width * side))
        wide = side if width >= height else max(1, int(width / height * side))
        canvas = np.zeros((side, side, 3), np.float32)
        top, left = (side - tall) // 2, (side - wide) // 2
        resized = self.pixels.resized(np.ascontiguousarray(part), tall, wide)
        canvas[top : top + tall, left : left + wide] = self.pixels.normalized(resized)
        return canvas

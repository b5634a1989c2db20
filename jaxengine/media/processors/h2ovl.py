"""Processor of H2OVL: InternVL's for images alone, of which the only image of a prompt is cut twice, into tiles of two
tilings whose numbers of rows and columns do not divide each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.processors.internvl import InternVLChatProcessor
from jaxengine.media.processors.settings import IMAGENET_MEAN, IMAGENET_STD, tiles_of
from jaxengine.media.processors.tiles import nearest_tiling, tilings
from jaxengine.media.processors.units import boolean_option
from jaxengine.models.config.fields import ConfigFields

_TWICE = "use_msac"
# Fewest tiles of the second tiling.
_LEAST = 3


class H2OVLProcessor(InternVLChatProcessor):
    """Processor of H2OVLChatModel. As in the published code, the images of a prompt with several are cut once, unless
    use_msac ("multi-scale adaptive cropping") says otherwise.

    Attributes:
      twice: whether an image is cut into tiles of two tilings.
    """

    # The published code has them, and the checkpoints no file of settings.
    defaults: ClassVar[Mapping[str, Any]] = {
        **InternVLChatProcessor.defaults,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    }
    needs_settings = False
    twice: bool

    def reads_frames(self, folder: Path) -> bool:
        """Return False: videos are not supported. folder: not used."""
        del folder
        return False

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the limits of tiles from config.json, and whether images are cut twice: use_msac there, by
        default False. Raises the errors of InternVLChatProcessor.read_settings.
        """
        super().read_settings(fields)
        self.twice = self.config_fields.boolean(_TWICE, False)

    def option_names(self) -> tuple[str, ...]:
        return (*super().option_names(), _TWICE)

    def among(self, options: Mapping[str, Any], counts: Mapping[str, int]) -> Mapping[str, Any]:
        """Return the options of a prompt's images: cut once if there are several, unless `options` say otherwise.
        counts: number of the prompt's items by modality.
        """
        return options if counts.get("image", 0) <= 1 else {_TWICE: False, **options}

    def with_options(self, options: Mapping[str, Any]) -> Any:
        found = copy(super().with_options(options))
        found.twice = boolean_option(options, _TWICE, self.twice)
        return found

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's units as TilesProcessor does; if it is cut twice, the tiles of the second tiling, those of
        the first, and the whole image, resized to a square, and (number of these units, 1).

        picture: uint8[H, W, 3]. options: names of option_names. Raises RequestError for an invalid option.
        """
        height, width = picture.shape[:2]
        found = self._tilings(height, width, options)
        if found is None:
            return super().units(picture, options)
        side, tiles = self.side, list[np.ndarray]()
        for rows, columns in found:
            whole = self.pixels.resized(picture, rows * side, columns * side)
            tiles += tiles_of(whole, rows, columns)
        return [*tiles, self.pixels.resized(picture, side, side)], (len(tiles) + 1, 1)

    def num_units(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        found = self._tilings(height, width, options)
        return super().num_units(height, width, options) if found is None else 1 + sum(map(math.prod, found))

    def _tilings(self, height: int, width: int, options: Mapping[str, Any]) -> list[tuple[int, int]] | None:
        """Return the (rows, columns) of the tilings of an image of height x width pixels that is cut twice, the second
        tiling first, without those of one tile: the second is the nearest with _LEAST tiles or more whose rows and
        columns do not divide those of the first; None for one that is not. Raises RequestError for an invalid option.
        """
        _, most, crops = self._limits(options)
        if not boolean_option(options, _TWICE, self.twice) or not crops:
            return None
        rows, columns = self.tiling(height, width, 1, most)
        further = [each for each in tilings(_LEAST, most) if rows % each[0] and columns % each[1]]
        found = nearest_tiling(height, width, self.side, further), (rows, columns)
        return [each for each in found if each != (1, 1)]

    def largest_size(self) -> tuple[int, int]:
        """Return (height, width) in pixels of an image that gets the most tiles. Which tilings it has follows from its
        aspect ratio, and changes in the middle between the ratios of two tilings.
        """
        if not self.twice:
            return super().largest_size()
        ratios = sorted({columns / rows for rows, columns in tilings(1, self.max_tiles)})
        borders = sorted({(first + second) / 2 for first in ratios for second in ratios})
        between = [(first + second) / 2 for first, second in zip(borders, borders[1:], strict=False)]
        # As large as all tiles, so that of tilings of equal ratios that with the most tiles counts.
        scale = 2 * self.side * self.max_tiles**0.5
        sizes = [(round(scale / ratio**0.5), round(scale * ratio**0.5)) for ratio in (*ratios, *between)]
        return max(sizes, key=lambda size: self.num_units(*size, {}))

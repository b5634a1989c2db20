"""Processor of Idefics3 and base of SmolVLM's: images are scaled to a longest edge and cut into tiles, which the whole
image, scaled down, follows.

In the prompt each tile is preceded by its row and column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.processors.settings import bad_option, switch, tiles_of
from jaxengine.media.processors.units import UnitProcessor, boolean_option, read_size
from jaxengine.models.config.fields import ConfigFields

_STANDARD, _LANCZOS = (0.5, 0.5, 0.5), 1
_MAX_EDGE = 4096  # limit of a scaled image's longer side


class Idefics3Processor(UnitProcessor):
    """Processor of Idefics3ForConditionalGeneration.

    Attributes:
      longest_edge: pixels of an image's longer side after scaling, before it is cut.
      splits: whether images are cut into tiles.
    """

    defaults = {
        "resample": _LANCZOS,
        "image_mean": _STANDARD,
        "image_std": _STANDARD,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
    }
    needs_tokenizer = True
    most_given = 1  # the row and column of further tiles would be unknown
    longest_edge: int
    splits: bool

    def read_settings(self, fields: ConfigFields) -> None:
        """Read and set the longest edge, longest_edge of `size`, and whether images are cut, do_image_splitting. Raises
        ModelConfigError for a max_image_size, that of a tile, other than the tower's.
        """
        self.longest_edge = read_size(fields, "size", ("longest_edge",))["longest_edge"]
        self.splits = switch(fields, "do_image_splitting")
        if read_size(fields, "max_image_size", ("longest_edge",))["longest_edge"] != self.side:
            raise fields.fail("max_image_size", f"{{'longest_edge': {self.side}}}, the tower's image_size")

    def option_names(self) -> tuple[str, ...]:
        return ("size", "do_image_splitting")

    def largest_size(self) -> tuple[int, int]:
        edge = min(self.longest_edge, _MAX_EDGE)
        return (edge, edge) if self.splits else (self.side, self.side)

    def units(self, picture: np.ndarray, options: Mapping[str, Any]) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Return an image's tiles, line by line, and (rows, columns); if there are several tiles, the whole image,
        resized to a square, follows them.

        picture: uint8[H, W, 3], which is scaled to the longest edge and then up to whole tiles. If images are not to be
        cut, the result is only the whole image, and (1, 1). options: mm_processor_kwargs, of which `size`,
        {"longest_edge": n}, and `do_image_splitting` override longest_edge and splits. Raises RequestError for an
        invalid option.
        """
        edge, side, resize = self.edge(options, self.longest_edge), self.side, self.pixels.resized
        height, width = picture.shape[:2]
        picture = resize(picture, *_bounded(*with_longest_edge(height, width, edge)))
        if not boolean_option(options, "do_image_splitting", self.splits):
            return [resize(picture, side, side)], (1, 1)
        height, width = picture.shape[:2]
        ratio = width / height
        if width >= height:
            width = -(-width // side) * side
            height = -(-int(width / ratio) // side) * side
        else:
            height = -(-height // side) * side
            width = -(-int(height * ratio) // side) * side
        picture, rows, columns = resize(picture, height, width), height // side, width // side
        if rows == columns == 1:
            return [picture], (1, 1)
        by_tile = tiles_of(picture, rows, columns)
        return [*by_tile, resize(picture, side, side)], (rows, columns)

    def pieces(self, item: Processed) -> list[int]:
        """Return the tokens of an image (`item`): the placeholders of each tile after its row and column, with a line
        break after each line, then those of the whole image. An image of one tile has only the latter.
        """
        grid = self.side // self.patch
        rows, columns = item.grid[1] // grid, item.grid[2] // grid
        fake, whole = self.ids("<fake_token_around_image>"), self.ids("<global-img>")
        embeddings = [self.image_id] * (self.tower.unit // self.tower.merge)
        if rows == columns == 1:
            return [*fake, *whole, *embeddings, *fake]
        pieces = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [*fake, *self.ids(f"<row_{row}_col_{column}>"), *embeddings]
            # End of the line; an empty line follows the last row.
            pieces += self.ids("\n" if row < rows else "\n\n")
        return [*pieces, *fake, *whole, *embeddings, *fake]

    def edge(self, options: Mapping[str, Any], default: int) -> int:
        """Return the longest edge in pixels from `size` in `options`, or the default.

        Raises RequestError unless `size` is {"longest_edge": n} with n from 1 to _MAX_EDGE.
        """
        asked = options.get("size", {"longest_edge": default})
        edge = asked.get("longest_edge") if isinstance(asked, Mapping) and len(asked) == 1 else None
        if type(edge) is not int or not 1 <= edge <= _MAX_EDGE:
            raise bad_option("size", asked, f"{{'longest_edge': n}} with n from 1 to {_MAX_EDGE}")
        return edge


def with_longest_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return (height, width) in pixels, scaled so that the longer side is `edge`; the other is cut to an integer and
    then, if odd, made even by adding 1; 1 if it would be 0.
    """
    ratio = width / height
    if width >= height:
        height = int(edge / ratio)
        return max(height + height % 2, 1), edge
    width = int(edge * ratio)
    return edge, max(width + width % 2, 1)


def _bounded(height: int, width: int) -> tuple[int, int]:
    """Return (height, width) in pixels, scaled down to a longer side of _MAX_EDGE if that is exceeded, the shorter one
    rounded down; each side is at least 1.
    """
    ratio = width / height
    if width >= height and width > _MAX_EDGE:
        height, width = int(_MAX_EDGE / ratio), _MAX_EDGE
    elif height > width and height > _MAX_EDGE:
        height, width = _MAX_EDGE, int(_MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)

"""Shapes of the Hopper LoRA kernels: which adapters they support, and how a product is cut into tiles. There is no
kernel here, only arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.hopper.shape import BFLOAT16, RESERVED_BYTES, STORED_ROWS
from jaxengine.pallas_kernels.matmul.lora import tile_rows_of
from jaxengine.pallas_kernels.mosaic_gpu import BOX_ROWS, SHARED_MEMORY_BYTES, WARPGROUP_ROWS
from jaxengine.pallas_kernels.tuning import HopperProducts, LoraTiles

COLUMNS = 2 * WARPGROUP_ROWS  # columns of a tile of slots, and of a tile of the result: two warpgroups compute
_CTAS = 2  # CTAs per multiprocessor that inputs are split over


def why_xla(size: int, widths: Sequence[int], rank: int, dtype: jnp.dtype) -> str:
    """Return the reason why the kernels do not support adapters with `size` inputs and sources of `widths` outputs, so
    that XLA computes the product; "" if they do.

    rank: rank of the pool. dtype: dtype of rows and adapters. Reasons: a dtype other than bfloat16, a rank that is not
    a multiple of 8 or does not divide 128, inputs or outputs that are not multiples of 128.
    """
    if dtype != BFLOAT16:
        return "kernels multiply bfloat16"
    if rank % BOX_ROWS or COLUMNS % rank:
        return f"rank {rank} is no multiple of {BOX_ROWS} that divides {COLUMNS}"
    if size % COLUMNS or any(width % COLUMNS for width in widths):
        return f"{size} inputs and {', '.join(map(str, widths))} outputs are no multiples of {COLUMNS}"
    return ""


@dataclass(frozen=True)
class Shape:
    """Compile-time parameters of the kernels, and the sizes that follow from them.

    Attributes:
      rows: rows of the product.
      size: inputs of the product.
      widths: outputs of each source.
      modules: module of each source.
      rank: columns of a slot.
      slot_tiles: tiles of slots that visits may have.
      tile: sizes that visits were cut by.
      products: sizes of the kernels.
    """

    rows: int
    size: int
    widths: tuple[int, ...]
    modules: tuple[int, ...]
    rank: int
    slot_tiles: int
    tile: LoraTiles
    products: HopperProducts

    @property
    def num_modules(self) -> int:
        """Number of modules, each of which has an A."""
        return max(self.modules) + 1

    @property
    def each(self) -> int:
        """Number of slots of a tile of slots, which has COLUMNS columns, `rank` for each slot."""
        return COLUMNS // self.rank

    @property
    def tile_rows(self) -> int:
        """Number of rows of a visit, rounded up to full TMA boxes."""
        return -(-tile_rows_of(self.rows, self.tile) // BOX_ROWS) * BOX_ROWS

    @property
    def row_tiles(self) -> int:
        """Number of tiles of rows."""
        return -(-self.rows // self.tile_rows)

    @property
    def parts(self) -> int:
        """Number of 64-row products of a tile; the last one may include rows of the next tile."""
        return -(-self.tile_rows // WARPGROUP_ROWS)

    @property
    def padded(self) -> int:
        """Number of rows up to the end of the last tile's 64-row products, padding included."""
        return (self.row_tiles - 1) * self.tile_rows + self.parts * WARPGROUP_ROWS

    @property
    def inputs(self) -> int:
        """Number of inputs in a tile of A: 64 for tiles of more than 128 rows, else 128."""
        return 64 if self.tile_rows > COLUMNS else 128

    @property
    def most_visits(self) -> int:
        """Upper bound of the number of visits: every tile of rows with every tile of slots."""
        return self.row_tiles * self.slot_tiles

    @property
    def per_split(self) -> int:
        """Number of tiles of inputs that a CTA adds up: all, or so few that there are up to two CTAs per
        multiprocessor, but no fewer than products.least_tiles.
        """
        tiles = self.size // self.inputs
        splits = _CTAS * self.products.num_ctas // (self.most_visits * self.num_modules)
        return -(-tiles // max(min(splits, tiles // self.products.least_tiles), 1))

    @property
    def splits(self) -> int:
        """Number of parts of the inputs, each added up by separate CTAs."""
        return -(-self.size // (self.inputs * self.per_split))

    @property
    def stored_rows(self) -> int:
        """Number of result rows that the first kernel stages in shared memory at a time."""
        return min(self.tile_rows, STORED_ROWS)

    @property
    def stages_of_a(self) -> int:
        """Number of slots of the first kernel's ring: as many as fit shared memory, at most products.stages and
        per_split.
        """
        stage = 2 * self.inputs * (COLUMNS + self.tile_rows)
        taken = RESERVED_BYTES + 4 * COLUMNS * self.stored_rows
        return min((SHARED_MEMORY_BYTES - taken) // stage, self.products.stages, self.per_split)

    @property
    def stages_of_b(self) -> int:
        """Number of slots of the second kernel's ring: as many as fit shared memory, at most four."""
        rows = self.parts * WARPGROUP_ROWS * (2 * COLUMNS + 4)
        taken = RESERVED_BYTES + rows + 4 * COLUMNS * WARPGROUP_ROWS
        return min((SHARED_MEMORY_BYTES - taken) // (2 * COLUMNS * COLUMNS), 4)

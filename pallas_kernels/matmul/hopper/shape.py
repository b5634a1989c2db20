"""Shapes of the Hopper product kernel: which products it supports, and how they are cut into tiles. There is no kernel
here, only arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.gated import Gating
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES, WARPGROUP_ROWS
from jaxengine.pallas_kernels.tuning import HopperProducts

OUTPUTS = 2 * WARPGROUP_ROWS  # outputs of a tile: two warpgroups compute
STORED_ROWS = 64  # rows of the result that are staged in shared memory at a time
RESERVED_BYTES = 4 * 1024  # shared memory for barriers
# Inputs of a tile, and the smallest group of inputs that one wgmma can have.
TILES, SMALLEST = (128, 64), {"uint8": 32, "int8": 16, "float8_e4m3fn": 32}
E4M3, BFLOAT16 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16)
MOST_SHARED_ROWS = 64  # rows of a tile up to which about 80 registers per thread suffice
# Columns of a product, which are the operation's rows, must be a multiple of this, on Hopper and on Blackwell cards.
PRODUCT_COLUMNS = 8, 16
TENSOR_COLUMNS = 512  # columns of a Blackwell multiprocessor's tensor memory
FEWER_ROWS = 96  # most rows of a tile of pairs of codes with more than two sums, whose factors take registers, too


def why_xla(size: int, out: int, num_scales: int, codes: Any, dtype: Any, *, grouped: bool = False) -> str:
    """Return the reason why the kernel does not support a matrix [size, out] with `num_scales` scales along its inputs,
    so that XLA computes the product; "" if the kernel supports it.

    Reasons: a `dtype` other than bfloat16, one scale per channel of eight-bit codes (unless grouped), inputs that are
    not a multiple of 64, groups of inputs that are too small for a product or do not fit into tiles, and outputs that
    are fewer than 128 or not a multiple of 8.

    codes: dtype of the stored codes. dtype: dtype that they are widened to. grouped: whether each group of rows has a
    matrix of its own, which may be bfloat16, without scales.
    """
    name = jnp.dtype(codes).name
    if dtype != jnp.bfloat16:
        return f"the kernel widens to bfloat16, not {jnp.dtype(dtype).name}"
    if num_scales == 1 and name != "uint8" and not grouped:
        return "with one scale a channel XLA's product is as good"
    inputs = tile_inputs(size)
    if not inputs:
        return f"{size} inputs are no multiple of {TILES[-1]}"
    group = size // num_scales
    if name in SMALLEST and (group < SMALLEST[name] or (inputs % group and group % inputs)):
        return f"groups of {group} inputs do not fit into tiles of {inputs}"
    if out < OUTPUTS or out % 8:
        return f"{out} outputs are fewer than {OUTPUTS} or no multiple of 8"
    return ""


def tile_inputs(size: int) -> int:
    """Return the number of inputs of a tile of a matrix with `size` inputs: 128 or 64, the first that divides them, 0
    if neither does.
    """
    return next((inputs for inputs in TILES if size % inputs == 0), 0)


def most_rows(size: int, num_scales: int, codes: Any, usual: int, *, tensor_memory: bool = False) -> int:
    """Return the most rows of a tile: `usual`, but at most FEWER_ROWS for pairs of codes with more than two sums, or
    with tensor memory for several sums, because registers must hold a tile; and as many as tensor memory holds the sums
    of two steps of.

    size, num_scales: inputs of the matrix, and scales along them. codes: dtype of the stored codes. tensor_memory:
    whether for the kernel of Blackwell cards.
    """
    sums = max(tile_inputs(size) * num_scales // size, 1)
    if tensor_memory:
        return min(usual, FEWER_ROWS if sums > 1 else usual, TENSOR_COLUMNS // 2 // sums)
    return min(usual, FEWER_ROWS) if per_byte(codes) == 2 and sums > 2 else usual


def step_of(tile_rows: int, *, tensor_memory: bool) -> int:
    """Return the number of rows, 8 or 16, of which the sizes of groups' tiles are multiples: 16 with tensor_memory
    (Blackwell cards) or for tile_rows above MOST_SHARED_ROWS, else 8. Products need that multiple, and there are at
    most eight sizes up to tile_rows.
    """
    return PRODUCT_COLUMNS[tensor_memory or tile_rows > MOST_SHARED_ROWS]


@dataclass(frozen=True)
class Shape:
    """Compile-time parameters of the product kernel, and the sizes that follow from them.

    Attributes:
      rows, size, out: rows of the product, and inputs and outputs of the matrix.
      num_scales: scales along the inputs.
      codes: dtype of the codes, or of a plain matrix.
      native: codes go into wgmma unconverted.
      has_scales, has_zeros, has_row_scales: whether the matrix has scales and zeros, and the rows scales.
      out_dtype: dtype of the result.
      sizes: sizes of tiles.
      tiles: tiles of groups' rows, each group with a matrix of its own; 0 where all rows share one.
      tensor_memory: a Blackwell card, with sums in tensor memory.
      gating: activation of gates and ups, `out` of each; None for a plain product.
    """

    rows: int
    size: int
    out: int
    num_scales: int
    codes: Any
    native: bool
    has_zeros: bool
    has_row_scales: bool
    out_dtype: Any
    sizes: HopperProducts
    tiles: int = 0
    has_scales: bool = True
    tensor_memory: bool = False
    gating: Gating | None = None

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile: all rows, rounded up to a multiple of 8 (of 16 with tensor memory), at most
        `most_rows`. If that is less than sizes.rows, the rows are spread over the tiles evenly.
        """
        usual, on_blackwell = self.sizes.rows, self.tensor_memory
        step = PRODUCT_COLUMNS[on_blackwell]
        most = most_rows(self.size, self.num_scales, self.codes, usual, tensor_memory=on_blackwell)
        count = 1 if most == self.sizes.rows else -(-self.rows // most)
        return min(-(-self.rows // (step * count)) * step, most)

    @property
    def vector_rows(self) -> int:
        """Number of entries in shared memory of a vector with one entry per row of a tile: tile_rows, rounded up to a
        multiple of 32, because TMA writes multiples of 128 bytes.
        """
        return -(-self.tile_rows // 32) * 32

    @property
    def row_tiles(self) -> int:
        """Number of tiles of rows."""
        return self.tiles or -(-self.rows // self.tile_rows)

    @property
    def step(self) -> int:
        """Number of rows of which tile sizes are multiples: `step_of` for groups, whose tiles differ in size; else
        tile_rows.
        """
        return step_of(self.tile_rows, tensor_memory=self.tensor_memory) if self.tiles else self.tile_rows

    @property
    def padded(self) -> int:
        """Number of rows with padding to full tiles; `rows` itself for groups, whose rows are already padded."""
        return self.rows if self.tiles else self.row_tiles * self.tile_rows

    @property
    def halves(self) -> int:
        """Number of matrices of which a tile contains the same outputs: 2 for gates and ups, else 1."""
        return 1 if self.gating is None else 2

    @property
    def outputs(self) -> int:
        """Number of result columns that a tile computes: 64 with `gating`, else 128."""
        return OUTPUTS // self.halves

    @property
    def out_tiles(self) -> int:
        """Number of tiles along the outputs; the last one is moved back to end with the matrix."""
        return -(-self.out // self.outputs)

    @property
    def inputs(self) -> int:
        """Number of inputs of a tile: `tile_inputs`, but always 64 for plain bfloat16 matrices."""
        return tile_inputs(self.size) if self.codes != BFLOAT16 else TILES[-1]

    @property
    def input_tiles(self) -> int:
        """Number of tiles along the inputs."""
        return self.size // self.inputs

    @property
    def packed(self) -> int:
        """Number of codes in a stored element, 2 for pairs and else 1. The rows are split into as many parts, of every
        `packed`-th input each.
        """
        return per_byte(self.codes)

    @property
    def columns(self) -> int:
        """Number of columns of a tile of codes, and of a part of the rows."""
        return self.inputs // self.packed

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.size // self.num_scales

    @property
    def sums(self) -> int:
        """Number of sums over the inputs of a tile, each of which has its own scales."""
        return max(self.inputs // self.group, 1)

    @property
    def row_dtype(self) -> Any:
        """Dtype in which wgmma reads the rows: that of the codes if they go in unconverted, else bfloat16."""
        return jnp.dtype(self.codes) if self.native else BFLOAT16

    @property
    def swizzle(self) -> int:
        """Swizzle of rows in shared memory, in bytes: the columns of one sum, at most 128."""
        return min(128, self.columns // self.sums * self.row_dtype.itemsize)

    @property
    def per_split(self) -> int:
        """Number of tiles of inputs that a CTA adds up: all, or so few that there are up to sizes.shared CTAs per
        multiprocessor, but no fewer than sizes.least_tiles.
        """
        splits = max(self.sizes.num_ctas * self.sizes.shared // (self.row_tiles * self.out_tiles), 1)
        splits = min(splits, max(self.input_tiles // self.sizes.least_tiles, 1))
        return -(-self.input_tiles // splits)

    @property
    def splits(self) -> int:
        """Number of parts of the inputs, each added up by separate CTAs."""
        return -(-self.input_tiles // self.per_split)

    @property
    def stored_rows(self) -> int:
        """Number of result rows in a warpgroup's shared memory at a time: all of a tile for gated products, else at
        most STORED_ROWS, or half of that with tensor memory.
        """
        if self.gating is not None:  # stored in pieces, but each has rows of its own
            return self.tile_rows
        return min(self.tile_rows, STORED_ROWS // 2 if self.tensor_memory else STORED_ROWS)

    @property
    def stored_outputs(self) -> int:
        """Number of outputs that are stored together: 128 on Blackwell, else a warpgroup's 64."""
        return OUTPUTS if self.tensor_memory else WARPGROUP_ROWS

    @property
    def staged(self) -> int:
        """Number of staging buffers for the result in shared memory: one for gates and ups, else two."""
        return 2 // self.halves

    @property
    def handed_rows(self) -> int:
        """Number of rows of sums that one warpgroup passes to the other with gates and ups, plus eight, so that
        neighbours are in different banks; 0 without `gating`.
        """
        return 0 if self.gating is None else self.tile_rows + 8

    @property
    def sum_columns(self) -> int:
        """Number of columns of tensor memory: those of the sums of two steps if sums are scaled, else those of one
        sum.
        """
        return 2 * self.sums * self.tile_rows if self.has_scales else self.tile_rows

    @property
    def stored_dtype(self) -> Any:
        """Dtype in which the kernel stores results: float32 if they are parts of sums, else out_dtype."""
        return jnp.dtype(jnp.float32 if self.splits > 1 else self.out_dtype)

    @property
    def stages(self) -> int:
        """Number of tiles in flight: as many as fit shared memory, at most `sizes.stages` and `per_split`. It fits at
        least three of the largest tiles, or two on Blackwell, which needs two.

        Two CTAs of grouped products share a multiprocessor if registers allow: one multiplies while the other begins or
        ends.
        """
        of_rows = self.vector_rows * (self.has_zeros + self.has_row_scales)
        vectors = self.sums * (OUTPUTS * (self.has_scales + self.has_zeros) + of_rows)
        rows = self.tile_rows * self.columns * self.packed * self.row_dtype.itemsize
        stage = OUTPUTS * self.columns * jnp.dtype(self.codes).itemsize + rows + 4 * vectors
        most = MOST_SHARED_ROWS // 2 if self.has_scales else MOST_SHARED_ROWS
        widens = self.tensor_memory and not self.native
        shared = 2 if self.tiles and self.tile_rows <= most and not widens else 1
        stored = self.stored_rows * self.stored_outputs * self.stored_dtype.itemsize
        taken = RESERVED_BYTES + stored * self.staged + 4 * WARPGROUP_ROWS * self.handed_rows
        if widens:  # into shared memory, for two steps
            taken += 2 * OUTPUTS * self.columns * self.packed * BFLOAT16.itemsize
        return min((SHARED_MEMORY_BYTES // shared - taken) // stage, self.sizes.stages, self.per_split)

"""Which products a Hopper kernel takes, and how it cuts one into tiles: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.matmul.gated import Gating
from pallas_kernels.matmul.nibbles import per_byte
from pallas_kernels.mosaic_gpu import SHARED_MEMORY_BYTES, WARPGROUP_ROWS
from pallas_kernels.tuning import HopperProducts

OUTPUTS = 2 * WARPGROUP_ROWS  # of a tile: two warpgroups compute
STORED_ROWS = 64  # of the result that are staged in shared memory at a time
RESERVED_BYTES = 4 * 1024  # of shared memory: barriers
# Inputs of a tile, and the smallest group of them that one wgmma has.
TILES, SMALLEST = (128, 64), {"uint8": 32, "int8": 16, "float8_e4m3fn": 32}
E4M3, BFLOAT16 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16)
MOST_SHARED_ROWS = 64  # of a tile, up to which 80 registers or so do for each thread
# Of a product, which are rows here, by whether it is a Blackwell card: it has a multiple of them.
PRODUCT_COLUMNS = 8, 16
TENSOR_COLUMNS = 512  # of a Blackwell multiprocessor's tensor memory
FEWER_ROWS = 96  # of a tile of pairs of codes with more than two sums: beside their factors registers hold no more


def why_xla(size: int, out: int, num_scales: int, codes: Any, dtype: Any, *, grouped: bool = False) -> str:
    """Why a matrix [size, out] with `num_scales` scales along its inputs is XLA's, "" if the kernel takes it.

    grouped: each group of rows has one of its own. Those may be bfloat16, without scales.
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
    """Inputs of a tile of a matrix with `size` of them, 0 where none divides them."""
    return next((inputs for inputs in TILES if size % inputs == 0), 0)


def most_rows(size: int, num_scales: int, codes: Any, usual: int, *, tensor_memory: bool = False) -> int:
    """Rows of a tile that registers hold, and tensor memory, which has the sums of two steps; `usual` at most."""
    sums = max(tile_inputs(size) * num_scales // size, 1)
    if tensor_memory:
        return min(usual, FEWER_ROWS if sums > 1 else usual, TENSOR_COLUMNS // 2 // sums)
    return min(usual, FEWER_ROWS) if per_byte(codes) == 2 and sums > 2 else usual


def step_of(tile_rows: int, *, tensor_memory: bool) -> int:
    """Rows by which tiles of groups differ: the fewest a product has, where no more than eight sizes come of it."""
    return PRODUCT_COLUMNS[tensor_memory or tile_rows > MOST_SHARED_ROWS]


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for."""

    rows: int
    size: int
    out: int
    num_scales: int
    codes: Any
    native: bool  # codes go into wgmma as they are
    has_zeros: bool
    has_row_scales: bool
    out_dtype: Any
    sizes: HopperProducts
    tiles: int = 0  # of rows of groups, each with a matrix of its own; 0 where all rows have one
    has_scales: bool = True
    tensor_memory: bool = False  # of a Blackwell card: sums lie there
    gating: Gating | None = None  # of matrices of gates and ups, `out` of each: what is made of both

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: tiles of fewer than usual are as many rows each."""
        usual, on_blackwell = self.sizes.rows, self.tensor_memory
        step = PRODUCT_COLUMNS[on_blackwell]
        most = most_rows(self.size, self.num_scales, self.codes, usual, tensor_memory=on_blackwell)
        count = 1 if most == self.sizes.rows else -(-self.rows // most)
        return min(-(-self.rows // (step * count)) * step, most)

    @property
    def vector_rows(self) -> int:
        """Of a vector with an entry a row in shared memory: TMA writes to multiples of 128 bytes."""
        return -(-self.tile_rows // 32) * 32

    @property
    def row_tiles(self) -> int:
        return self.tiles or -(-self.rows // self.tile_rows)

    @property
    def step(self) -> int:
        """Rows by which tiles differ: those of groups have as many as they need."""
        return step_of(self.tile_rows, tensor_memory=self.tensor_memory) if self.tiles else self.tile_rows

    @property
    def padded(self) -> int:
        """Rows with those that fill tiles up, or groups to a multiple of `step` each."""
        return self.rows if self.tiles else self.row_tiles * self.tile_rows

    @property
    def halves(self) -> int:
        """Parts of the matrix that a tile has the same outputs of: gates and ups, or the whole of it."""
        return 1 if self.gating is None else 2

    @property
    def outputs(self) -> int:
        """Of a tile's result."""
        return OUTPUTS // self.halves

    @property
    def out_tiles(self) -> int:
        """The last one begins where it must to end with the matrix."""
        return -(-self.out // self.outputs)

    @property
    def inputs(self) -> int:
        return tile_inputs(self.size) if self.codes != BFLOAT16 else TILES[-1]

    @property
    def input_tiles(self) -> int:
        return self.size // self.inputs

    @property
    def packed(self) -> int:
        """Codes in a byte, and parts that rows come in: of every `packed`-th input each."""
        return per_byte(self.codes)

    @property
    def columns(self) -> int:
        """Columns of a tile of codes, and of a part of rows."""
        return self.inputs // self.packed

    @property
    def group(self) -> int:
        return self.size // self.num_scales

    @property
    def sums(self) -> int:
        """Sums of a tile that are scaled by themselves."""
        return max(self.inputs // self.group, 1)

    @property
    def row_dtype(self) -> Any:
        return jnp.dtype(self.codes) if self.native else BFLOAT16

    @property
    def swizzle(self) -> int:
        """Of rows in shared memory, in bytes: its columns are those of a sum, or a part of them."""
        return min(128, self.columns // self.sums * self.row_dtype.itemsize)

    @property
    def per_split(self) -> int:
        """Tiles of inputs that a CTA adds up."""
        splits = max(self.sizes.num_ctas * self.sizes.shared // (self.row_tiles * self.out_tiles), 1)
        splits = min(splits, max(self.input_tiles // self.sizes.least_tiles, 1))
        return -(-self.input_tiles // splits)

    @property
    def splits(self) -> int:
        return -(-self.input_tiles // self.per_split)

    @property
    def stored_rows(self) -> int:
        if self.gating is not None:  # by fewer, but each where it stays
            return self.tile_rows
        return min(self.tile_rows, STORED_ROWS // 2 if self.tensor_memory else STORED_ROWS)

    @property
    def stored_outputs(self) -> int:
        return OUTPUTS if self.tensor_memory else WARPGROUP_ROWS

    @property
    def staged(self) -> int:
        """Parts of the result in shared memory at a time: of gates and ups one warpgroup stores the result."""
        return 2 // self.halves

    @property
    def handed_rows(self) -> int:
        """Of sums that one warpgroup hands to the other, and eight more, by which neighbours lie in other banks."""
        return 0 if self.gating is None else self.tile_rows + 8

    @property
    def sum_columns(self) -> int:
        """Of tensor memory: of two steps, or of the one sum where no sums are scaled."""
        return 2 * self.sums * self.tile_rows if self.has_scales else self.tile_rows

    @property
    def stored_dtype(self) -> Any:
        return jnp.dtype(jnp.float32 if self.splits > 1 else self.out_dtype)

    @property
    def stages(self) -> int:
        """Tiles in flight; shared memory holds three of the largest there are, two on Blackwell, which needs two.

        Of groups two CTAs share a multiprocessor where registers do: one multiplies while the other begins or ends.
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

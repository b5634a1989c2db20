"""Grouped product on TPUs: a Mosaic kernel that reads the matrices of non-empty groups only.

Its work is a list of visits, computed on the device: one (group, tile of rows) for each pair that has rows in common,
in the order of the rows. The grid is as long as the list, so the time follows the number of rows and of groups that
have rows. A tile may hold rows of several groups: a visit multiplies the smallest of a few block sizes that holds its
group's rows, and leaves other rows of the block unchanged. Blocks begin at multiples of eight rows. The list ends with
the tiles after the last row, which are cleared. Products of experts by blocks are Gale et al.'s (MegaBlocks, 2022,
arXiv:2211.15841).

With gates and ups, a visit multiplies with the same columns of both halves of the matrix and stores the activated sums,
so that [M, 2 F] is never stored.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.matmul.gated import Gating, activated, biased, say_once
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.tpu.moved import ROWS, move_rows
from jaxengine.pallas_kernels.matmul.tpu.quantized import (
    PreparedRows,
    clear,
    column_bytes,
    group_sums,
    prepared,
    sums_are_smaller,
    tiles,
    vmem_limit,
)
from jaxengine.pallas_kernels.matmul.tpu.visits import visits_of
from jaxengine.pallas_kernels.matmul.tpu.widened import CHUNK, LANES, SUBLANES, add_product, why_not_aligned
from jaxengine.pallas_kernels.matmul.xla import quantized_groups as quantized_groups_xla
from jaxengine.pallas_kernels.matmul.xla.grouped import tile_rows_of
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params
from jaxengine.pallas_kernels.tuning import TpuProducts, tuning_of

_MOST_ROWS = 256  # most rows of one product: more take more instructions and are hardly faster
STEP = 8  # blocks begin and end at multiples of this number of rows
_BIASES = 16  # number of biases in VMEM at once, as a register of bfloat16 has that many rows


def quantized_grouped_matmul(
    operands: QuantizedOperands,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    dtype: Any,
    out_dtype: Any,
    sizes: TpuProducts | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Multiply rows x [M, in] by the quantised matrix of their group on a TPU and add the group's bias: return [M, out]
    in out_dtype. matmul.quantized.quantized_grouped_matmul has checked the arguments.

    Rows of no group give 0. group_sizes: i32 [G], consecutive rows of each group. bias: [G, out] or None. XLA computes
    the product if the kernel does not support it. dtype: the dtype that rows and codes are widened to. sizes: tile
    sizes, None for those of the chip that the trace is for. interpret: argument of `pl.pallas_call`.
    """
    x, x_scales, codes, scales, zeros = operands
    if why_not_aligned(x.shape[1], scales.shape[1], dtype):
        options = {"dtype": dtype, "out_dtype": out_dtype, "fine": jnp.float32}
        y = quantized_groups_xla.quantized_grouped_matmul(operands, group_sizes, **options)
        return biased(y, group_sizes, bias)
    matrix = Matrix(codes, scales.astype(jnp.float32), zeros, bias)
    return product_of_groups(x, x_scales, matrix, group_sizes, None, dtype, out_dtype, sizes, interpret)


def quantized_gated_matmul(
    operands: QuantizedOperands,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Gating,
    dtype: Any,
    out_dtype: Any,
    sizes: TpuProducts | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return activation(gate, up) of rows x of `operands` times their group's quantised matrix, gates and then ups,
    plus the group's bias [G, 2 F] or None: [M, F] in out_dtype, 0 for rows of no group.

    The public operation has checked the arguments. If one kernel cannot compute all of it, the product is written to
    memory and activated from there, which is logged once. dtype, sizes, interpret: see `quantized_grouped_matmul`.
    """
    x, x_scales, codes, scales, zeros = operands
    options = {"dtype": dtype, "out_dtype": out_dtype, "sizes": sizes, "interpret": interpret}
    size = x.shape[1]
    if why := why_not_aligned(size, scales.shape[1], dtype):
        log_not_fused(size, codes.shape[2] // 2, why)
        y = quantized_grouped_matmul(operands, group_sizes, **options)
        return activated(y, group_sizes, bias, activation, out_dtype)
    matrix = Matrix(codes, scales.astype(jnp.float32), zeros, bias)
    return gated_product_of_groups(x, x_scales, matrix, group_sizes, activation, *options.values())


def gated_product_of_groups(
    x: jax.Array,
    x_scales: jax.Array | None,
    matrix: Matrix,
    group_sizes: jax.Array,
    activation: Gating,
    dtype: Any,
    out_dtype: Any,
    *options: Any,
) -> jax.Array:
    """Return activation(gate, up) of rows x [M, in] (codes if they have x_scales) times their group's matrix of gates
    and ups: [M, F] in out_dtype. One kernel computes all of it if possible. Otherwise a kernel computes gates and ups
    with their bias, which are activated from memory, and this is logged once.

    Arguments are those of `product_of_groups`. options: its sizes and interpret.
    """
    size, width = x.shape[1], matrix.codes.shape[2] // 2
    if not (why := why_not_fused(width)):
        return product_of_groups(x, x_scales, matrix, group_sizes, activation, dtype, out_dtype, *options)
    log_not_fused(size, width, why)
    y = product_of_groups(x, x_scales, matrix, group_sizes, None, dtype, out_dtype, *options)
    return activated(y, group_sizes, None, activation, out_dtype)


def log_not_fused(size: int, width: int, why: str) -> None:
    """Log, once per process, why gates and ups [size, 2 * width] are activated from memory. Logs nothing unless the
    device of the trace is a TPU.
    """
    if pltpu.is_tpu_device():  # and not while another platform's program is traced
        say_once(size, width, why)


def why_not_fused(width: int) -> str:
    """Return the reason why one kernel cannot multiply and activate gates and ups, `width` columns of each, or "" if it
    can: if width is a multiple of LANES.
    """
    return f"{width} columns do not fill whole registers" if width % LANES else ""


class Matrix(NamedTuple):
    """Operands of groups' matrices, or references to blocks of them; None for absent ones.

    Attributes:
      codes: [G, in, out] or pairs [G, in / 2, out], or bfloat16 weights, which have no scales.
      scales: f32 [G, n, out].
      zeros: [G, n, out].
      bias: [G, out].
    """

    codes: Any
    scales: Any = None
    zeros: Any = None
    bias: Any = None

    @property
    def count(self) -> int:
        """Number of scales along the inputs; 0 without scales."""
        return 0 if self.scales is None else self.scales.shape[1]


def product_of_groups(
    x: jax.Array,
    x_scales: jax.Array | None,
    matrix: Matrix,
    group_sizes: jax.Array,
    activation: Gating | None,
    dtype: Any,
    out_dtype: Any,
    sizes: TpuProducts | None,
    interpret: Any,
) -> jax.Array:
    """Multiply rows x [M, in] by the matrix of their group in the kernel: return [M, out] in out_dtype, or, with an
    activation of gates and ups, [M, out / 2].

    The public operations have checked the arguments. x_scales: f32 [M, n] of rounded rows, whose codes x are; None for
    other rows. group_sizes: i32 [G], consecutive rows of each group; rows of no group give 0. activation: None for the
    plain product. dtype: the dtype that rows and codes are widened to. sizes, interpret: see
    `quantized_grouped_matmul`.
    """
    sizes = tuning_of("tpu").tpu_products if sizes is None else sizes
    rows = rows_for(x, x_scales, matrix.codes.dtype, matrix.count, len(group_sizes), dtype, sizes)
    return _call(rows, matrix, group_sizes, activation, out_dtype, sizes, interpret)


def rows_for(
    x: jax.Array, x_scales: jax.Array | None, codes: Any, count: int, num_groups: int, dtype: Any, sizes: TpuProducts
) -> PreparedRows:
    """Return rows x [M, in], with the scales [M, n] of rounded ones, prepared for a product in `dtype` with matrices of
    `num_groups` groups: by sums if the matrices have no scales or `sums_are_scaled`.

    codes: dtype of the matrices. count: scales of one column of a matrix, 0 without scales. sizes: tile sizes.
    """
    by_sums = not count or sums_are_scaled(tile_rows_of(len(x), num_groups), x.shape[1] // count, sizes)
    return prepared(x, x_scales, codes, count, dtype, sizes, by_sums=by_sums)


class Shape(NamedTuple):
    """Tile and block sizes of a visit.

    Attributes:
      rows: rows of a tile.
      columns: columns of the result whose matrix is in VMEM at once; they are computed `piece` at a time.
      blocks: numbers of rows that one product may have, ascending: the least that holds the group's rows in the tile,
        or repeatedly the largest. Blocks begin at multiples of STEP.
    """

    rows: int
    columns: int
    piece: int
    blocks: tuple[int, ...]


def sums_are_scaled(average: int, group: int, sizes: TpuProducts) -> bool:
    """Return whether sums are scaled, once per chunk of inputs or group of them, instead of the matrix: for groups of
    at least CHUNK inputs, and where `sums_are_smaller`.

    average: rows of a tile of an average group (`tile_rows_of`). group: number of inputs that share a scale.
    """
    return group >= CHUNK or sums_are_smaller(average, group, sizes)


def shape_of(
    num_rows: int,
    size: int,
    out: int,
    num_scales: int,
    num_groups: int,
    x: Any,
    codes: Any,
    sizes: TpuProducts,
    *,
    gated: bool = False,
) -> Shape:
    """Return the Shape for rows [num_rows, size] of dtype `x`, in `num_groups` groups, times matrices [size, out] of
    `codes`.

    num_scales: 0 for plain matrices. gated: there are two matrices for each group; `out` is then a multiple of LANES
    and the width of one.

    The rows of a group should be in one tile, and in one block of it.
    """
    most, whole = min(num_rows, sizes.group_rows), ROWS if jnp.dtype(x).itemsize == 1 else STEP
    tile, piece = tiles(most // whole * whole or num_rows, size, out, num_scales, x, codes, sizes)
    most_columns = sizes.group_bytes * jnp.dtype(codes).itemsize // (2 * column_bytes(size, num_scales, codes))
    if gated:
        piece, columns = _halves(out, piece // 2, most_columns // 2, sizes.cores)
    else:
        most_pieces = pl.cdiv(pl.cdiv(out, piece), sizes.cores), out // piece
        columns = piece * max(min(most_columns // piece, *most_pieces), 1)
    most, mean, group = min(tile, _MOST_ROWS), max(num_rows // num_groups, SUBLANES), size // max(num_scales, 1)
    blocks = blocks_of(mean, most)
    if num_scales and group < CHUNK and sums_are_scaled(tile_rows_of(num_rows, num_groups), group, sizes):
        # Code for many sums is long and takes minutes to compile, so there are few sizes.
        most = min(most, max(min(sizes.sum_rows, group // 2) // STEP * STEP, STEP), mean * 2)
        # Groups larger than the largest block leave few rows, or nearly as many as a block.
        chosen = (2, 4, 5, 6, 8) if mean < most else (1, 3, 5, 7, 8)
        blocks = tuple(sorted({pl.cdiv(most * eighths, 8 * STEP) * STEP for eighths in chosen}))
    blocks = (tile,) if tile % whole else blocks  # fewer rows than a register has
    return Shape(tile, columns, piece, blocks)


def _halves(width: int, piece: int, most: int, cores: int) -> tuple[int, int]:
    """Return (piece, columns of a strip), multiples of LANES, at most `piece` and `most`, or LANES if these are less,
    such that of `cores` cores the one with the most columns has as few as possible.

    A piece divides the columns, and these divide `width`, so that ups begin at a strip as gates do.
    """
    widths = [each for each in range(LANES, width + 1, LANES) if width % each == 0 and each <= max(most, LANES)]
    columns = min(widths, key=lambda each: (pl.cdiv(width // each, cores) * each, -each))  # of the core with most
    return max(each for each in widths if columns % each == 0 and each <= max(piece, LANES)), columns


def blocks_of(mean: int, most: int) -> tuple[int, ...]:
    """Return, in ascending order, the numbers of rows of a product for which there is code, at most `most`: closely
    spaced from half of `mean`, the size of an average group, to one and a half, with a fourth, twice and four times
    `mean` next to these; only the last two exceed _MOST_ROWS. Each is a multiple of STEP or `most`.

    The block for a group of about `mean` rows is about a tenth larger than the group.
    """
    step = min(max((mean + 6 * STEP) // (8 * STEP) * STEP, STEP), _MOST_ROWS // 8)
    low = min(mean, _MOST_ROWS // 2) // 2
    wanted = low // 2, *range(low, min(mean * 3 // 2, _MOST_ROWS) + 1, step), mean * 2, mean * 4
    return tuple(sorted({min(pl.cdiv(rows, STEP) * STEP, most) for rows in wanted}))


def _call(
    rows: PreparedRows,
    matrix: Matrix,
    group_sizes: jax.Array,
    activation: Gating | None,
    out_dtype: Any,
    sizes: TpuProducts,
    interpret: Any,
) -> jax.Array:
    """Run the kernel with prepared rows: return [M, out] in out_dtype, or with an activation [M, out / 2]. The grid is
    (strips of columns, visits of `group_sizes`), as long as the list of visits. Other arguments are those of
    `product_of_groups`.
    """
    (num_rows, size), (num_groups, _, out), count = rows.values.shape, matrix.codes.shape, matrix.count
    dtypes, halves = (rows.values.dtype, matrix.codes.dtype), 1 if activation is None else 2
    out //= halves
    shape = shape_of(num_rows, size, out, count, num_groups, *dtypes, sizes, gated=halves > 1)
    limit = vmem_limit((shape.rows, halves * shape.columns), rows, *matrix[:3], sizes.vmem_limit_bytes)
    visits, strips = visits_of(group_sizes, num_rows, shape.rows), pl.cdiv(out, shape.columns)
    most, is_bytes = pl.cdiv(shape.blocks[-1], ROWS) * ROWS, dtypes[0].itemsize == 1

    def of_rows(array: jax.Array | None) -> pl.BlockSpec | None:
        """Return the BlockSpec of a tile of rows of an array [M, n]; None for no array."""
        if array is None:
            return None
        return pl.BlockSpec((shape.rows, array.shape[1]), lambda n, v, _, tile, *__: (tile[v], 0))

    def of_half(half: int, array: jax.Array | None) -> pl.BlockSpec | None:
        """Return the BlockSpec of a strip of columns of one half of a group's array or biases; None if there is no
        array.
        """
        if array is None:
            return None

        def strip(n: Any) -> Any:
            return half * strips + n

        if array.ndim == 2:  # a bias, whose rows memory lays out several at a time
            block = _BIASES, shape.columns
            return pl.BlockSpec(block, lambda n, v, group, *_: (lax.div(group[v], _BIASES), strip(n)))
        block = 1, array.shape[1], shape.columns
        return pl.BlockSpec(block, lambda n, v, group, *_: (group[v], 0, strip(n)))

    sums = None if matrix.zeros is None else group_sums(rows, count)
    operands = rows.values, rows.scales, rows.after, sums
    specs = *map(of_rows, operands), [Matrix(*map(partial(of_half, half), matrix)) for half in range(halves)]
    total = pltpu.VMEM((halves, shape.blocks[-1], shape.piece), jnp.float32)
    kind = "grouped_matmul" if activation is None else "gated_matmul"
    of_codes = sum(each.nbytes for each in matrix if each is not None) // num_groups
    return pl.pallas_call(
        partial(_body, shape=shape, by_sums=rows.by_sums, activation=activation),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits) - 1,
            grid=(strips, visits.count[0]),
            in_specs=specs,
            out_specs=pl.BlockSpec((shape.rows, shape.columns), lambda n, v, _, tile, *__: (tile[v], n)),
            scratch_shapes=[total, pltpu.VMEM((most, size), dtypes[0]) if is_bytes else None],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), out_dtype),
        compiler_params=compiler_params(interpret, "parallel", "arbitrary", vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size * out * halves,
            bytes_accessed=min(num_rows, num_groups) * of_codes + rows.values.nbytes + 4 * num_rows * out,
            transcendentals=0 if activation is None else num_rows * out,
        ),
        interpret=interpret,
        name=f"quantized_{kind}" if count else kind,
    )(*visits[:-1], *operands, [matrix] * halves)


def _body(
    group,
    tile,
    starts,
    ends,
    products,
    x,
    x_scales,
    after,
    sums,
    halves,
    out,
    total,
    moved,
    *,
    shape: Shape,
    by_sums: bool,
    activation: Gating | None,
):
    """Body of the kernel: run one visit for a strip of columns. The first visit of a tile of rows first clears the
    tile.

    A visit multiplies the blocks of rows that contain its group's rows, and writes only the group's rows of `out`, with
    bias, and activated if there is an activation. group, tile, starts, ends, products: fields of Visits, in SMEM. x,
    x_scales, after, sums: the rows' operands of tpu.quantized, in VMEM. halves: references of one Matrix, or of gates
    and of ups, with a first axis of one; their bias is a block of _BIASES groups. total: f32 scratch of the sums.
    moved: scratch for a block of one-byte rows, None for others. by_sums: see `widened`.
    """
    visit = pl.program_id(1)
    before = tile[visit] * shape.rows
    first = jnp.maximum(starts[group[visit]] - before, 0)
    last = jnp.minimum(ends[group[visit]] - before, shape.rows)

    @pl.when((visit == 0) | (tile[jnp.maximum(visit - 1, 0)] != tile[visit]))
    def _():
        out[...] = jnp.zeros_like(out)

    def add_rows(rows: Any, begin: Any, size: int, column: Any) -> None:
        own, columns = pl.ds(begin, size), pl.ds(column, shape.piece)
        of_rows, row_factors, of_groups = (None if ref is None else ref.at[own] for ref in (x_scales, after, sums))
        products = []
        for half, matrix in enumerate(halves):
            codes, scales, zeros = (None if ref is None else ref.at[0, :, columns] for ref in matrix[:3])
            y = total.at[half, pl.ds(0, size)]
            clear(y, of_groups, zeros)
            add_product(y, rows, of_rows, codes, scales, by_sums=by_sums)
            y = y[...] if row_factors is None else y[...] * row_factors[...]
            products.append(y if matrix.bias is None else y + _row_of(matrix.bias[:, columns], group[visit]))
        result = products[0] if activation is None else activation(*products)
        row = begin + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        previous = out[own, columns].astype(jnp.float32)
        out[own, columns] = jnp.where((row >= first) & (row < last), result, previous).astype(out.dtype)

    def add_block(at: Any, size: int) -> None:
        # A tile's last block may begin sooner: its rows are then recomputed, or another group's and unchanged.
        begin = pl.multiple_of(jnp.minimum(at, shape.rows - size), STEP) if size < shape.rows else 0
        if moved is None or size == shape.rows:
            rows = x.at[pl.ds(begin, size)]
        else:
            move_rows(x, begin, size, moved)
            rows = moved.at[pl.ds(0, size)]
        if shape.columns == shape.piece:
            add_rows(rows, begin, size, 0)
            return

        @pl.loop(0, shape.columns // shape.piece)
        def _(index):
            add_rows(rows, begin, size, pl.multiple_of(index * shape.piece, shape.piece))

    @pl.when(visit < products[0])
    def _():
        begin, most = lax.div(first, STEP) * STEP, shape.blocks[-1]

        @pl.loop(0, pl.cdiv(last - begin, most))
        def _(index):
            at = begin + index * most
            fewer = 0
            for size in shape.blocks:
                is_least = (last - at > fewer) & ((last - at <= size) | (size == most))
                pl.when(is_least)(partial(add_block, at, size))
                fewer = size


def _row_of(biases: jax.Array, group: Any) -> jax.Array:
    """Return f32 [1, columns], the bias of group `group`, from `biases` [_BIASES, columns], the block that contains
    it.
    """
    row = lax.broadcasted_iota(jnp.int32, (_BIASES, 1), 0)
    own = jnp.where(row == lax.rem(group, _BIASES), biases.astype(jnp.float32), 0)
    return jnp.sum(own, axis=0, keepdims=True)

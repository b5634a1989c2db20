"""Quantised product on a Hopper GPU, in Mosaic GPU: codes are widened only in registers.

The same kernel multiplies tiles of rows with the matrices of their groups, which may be bfloat16: see grouped.

The product is transposed, out^T [out, M] = codes^T x^T. The 64 rows of a wgmma are outputs, so that few rows take few
columns, and codes are its operand in registers, as in Machete (Neural Magic, 2024) and Marlin (Frantar et al. 2024,
arXiv:2408.11743). Codes are multiplied unscaled, which bfloat16 and e4m3 represent exactly, and the float32 sum of each
group of inputs is scaled ("promotion", DeepSeek-V3, arXiv:2412.19437), so that only the result is rounded. If both
operands are e4m3, wgmma reads the codes directly from shared memory.

One warpgroup keeps a ring of tiles filled by TMA, two compute 64 outputs each. If the result has fewer tiles than the
card has multiprocessors, several CTAs share a tile: each adds up a part of the inputs, and XLA adds the parts.

On a Blackwell card the tiles are multiplied by `matmul.blackwell.tile`; everything else is the same.

Codes are read as [out, in], as CUDA cards store them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.cards import card_of_trace
from jaxengine.pallas_kernels.matmul.blackwell import tile as blackwell
from jaxengine.pallas_kernels.matmul.hopper import gated, ring
from jaxengine.pallas_kernels.matmul.hopper.shape import BFLOAT16, E4M3, MOST_SHARED_ROWS, OUTPUTS, Shape, why_xla
from jaxengine.pallas_kernels.matmul.nibbles import row_parts
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.rounding import RoundedRows
from jaxengine.pallas_kernels.matmul.xla import quantized as quantized_xla
from jaxengine.pallas_kernels.mosaic_gpu import WARPGROUP_ROWS, launch, swizzled, tiles
from jaxengine.pallas_kernels.tuned import product_sizes
from jaxengine.pallas_kernels.tuning import HopperProducts

logger = logging.getLogger(__name__)

__all__ = ["multiply", "quantized_matmul", "why_xla"]

TILE = 3  # numbers that describe a tile of groups: its group, its first row and its rows, both in steps
REGISTERS = 40, 232  # per lane of the loading and of the computing warpgroups


def quantized_matmul(
    operands: QuantizedOperands,
    *,
    dtype: Any,
    out_dtype: Any,
    sizes: HopperProducts | None = None,
    interpret: Any = False,
    tensor_memory: bool | None = None,
) -> jax.Array:
    """Multiply x [M, in] by codes * scales - zeros (all fields of `operands`) on a Hopper or Blackwell GPU: return [M,
    out] in out_dtype. matmul.quantized.quantized_matmul has checked the arguments.

    XLA computes the product if the kernel does not support it, with a log line that gives the reason, or, without one,
    if the trace is for no card with kernels. dtype: the dtype that codes are widened to; the kernel supports bfloat16
    only. sizes: tile sizes, None for those of the tuning table. interpret: see `mosaic_gpu.launch`. tensor_memory: True
    for the kernel of Blackwell cards, False for that of Hopper cards, None for that of the trace's card.
    """
    x, x_scales, codes, scales, zeros = operands
    num_scales, out = scales.shape
    size = x.shape[1]
    reason = why_xla(size, out, num_scales, codes.dtype, dtype)
    card = card_of_trace()
    if interpret is False and (card is None or not card.multiplies):
        return quantized_xla.quantized_matmul(operands, dtype=dtype, out_dtype=out_dtype)
    if not reason and x_scales is not None and x_scales.shape[1] > num_scales:
        reason = "rows have more scales than the matrix"
    if reason:
        log_once(f"[{size}, {out}]: {reason}")
        return quantized_xla.quantized_matmul(operands, dtype=dtype, out_dtype=out_dtype)
    chosen: HopperProducts = (
        product_sizes("gpu", x.shape[0], size, out, num_scales, codes.dtype) if sizes is None else sizes
    )
    native = x.dtype == E4M3 == codes.dtype
    has = zeros is not None, x_scales is not None
    on_blackwell = (card is not None and card.blackwell) if tensor_memory is None else tensor_memory
    shape = Shape(
        *(x.shape[0], size, out, num_scales, codes.dtype, native, *has, out_dtype, chosen), tensor_memory=on_blackwell
    )
    return multiply(shape, x, x_scales, codes, scales, zeros, interpret=interpret)


@functools.cache
def log_once(reason: str) -> None:
    """Log, at level INFO and once per process and reason, that a quantised product runs as plain XLA."""
    logger.info("a quantised product runs as plain XLA instead of the Mosaic GPU kernel: %s", reason)


class _Refs(NamedTuple):
    """References that the kernel gets, in launch order: operands, result, shared memory, barriers and, on Blackwell,
    tensor memory. None for those that a product does not have.

    Attributes:
      x: [packed * M, in / packed].
      codes: [G * halves * out, in / packed].
      tiles: i32 [tiles * TILE].
      scales: f32 [G * n, out], of gates and ups [G * n, 2, out].
      zeros: as scales.
      row_sums: f32 [tiles * sums, M].
      row_scales: f32 [n, M].
      bias: [2 * G, out].
      y: [splits, M, out tiles * outputs].
      x_smem: [stages, packed * rows, columns].
      codes_smem: [stages, OUTPUTS, columns].
      scales_smem: f32 [stages, sums, OUTPUTS], of gates and ups [stages, sums, 2, 64].
      zeros_smem: as scales_smem.
      row_sums_smem: f32 [stages, sums, vector_rows].
      row_scales_smem: as row_sums_smem.
      y_smem: [2, rows, 64], of gates and ups [1, rows, 64], on Blackwell [2, rows, 128].
      bias_smem: [2, 64].
      ups_smem: f32 [64, rows].
      bias_full: barrier: the bias has arrived.
      ups_full: barrier: the ups have been written.
      full, free: barriers of the ring.
      wide_smem: [2 * packed, OUTPUTS, columns], codes of two steps; this and what follows on Blackwell only.
      sums_tmem: f32 [OUTPUTS, 2 * sums * rows].
      done: barrier per bank of sums: its products are complete.
    """

    x: Any
    codes: Any
    tiles: Any
    scales: Any
    zeros: Any
    row_sums: Any
    row_scales: Any
    bias: Any
    y: Any
    x_smem: Any
    codes_smem: Any
    scales_smem: Any
    zeros_smem: Any
    row_sums_smem: Any
    row_scales_smem: Any
    y_smem: Any
    bias_smem: Any
    ups_smem: Any
    bias_full: Any
    ups_full: Any
    full: Any
    free: Any
    wide_smem: Any
    sums_tmem: Any
    done: Any


def multiply(
    shape: Shape,
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    tiles_of_groups: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    interpret: Any,
) -> jax.Array:
    """Multiply M = shape.rows rows by one matrix, or tiles of them by the matrices of their groups, in the kernel.

    Returns [M, out] in shape.out_dtype, or with shape.gating the activated [M, F]; rows of no tile are undefined. x,
    x_scales, codes, scales, zeros: operands of `quantized_matmul` that `shape` describes; matrices of groups have a
    first axis of G. tiles_of_groups: i32 [shape.tiles * TILE] with -1 as the group of unused tiles; None for one
    matrix. bias: [G, 2 F], for gates and ups, or None. interpret: see `mosaic_gpu.launch`.
    """
    rows, padded, count = shape.rows, shape.padded, shape.num_scales
    stages, sums, tile_rows = shape.stages, shape.sums, shape.tile_rows
    row_scales = row_sums = None
    if x_scales is not None:
        row_scales = jnp.repeat(x_scales, count // x_scales.shape[1], axis=1).T
    if zeros is not None:
        values = x if x_scales is None else RoundedRows(x, x_scales).widened(jnp.float32)
        row_sums = jnp.sum(values.astype(jnp.float32).reshape(rows, shape.input_tiles * shape.sums, -1), axis=2).T
    x = x if shape.native else x.astype(BFLOAT16)
    x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    parts = row_parts(x, codes.dtype)
    if shape.packed == 2:
        parts[1] = parts[1] * jnp.bfloat16(1 / 16)  # high codes, widened without a shift, are times 16
    wide = padded - shape.step + shape.vector_rows
    by_outputs = (shape.out,) if shape.gating is None else (2, shape.out)
    stacked = [vector if vector is None else vector.reshape(-1, *by_outputs) for vector in (scales, zeros)]
    stacked = [vector if vector is None else vector.astype(jnp.float32) for vector in stacked]
    bias = None if bias is None else bias.reshape(-1, shape.out)
    vectors = [tiles_of_groups, *stacked, _padded(row_sums, wide), _padded(row_scales, wide), bias]
    of_codes = jnp.swapaxes(codes, -1, -2).reshape(-1, shape.size // shape.packed)
    operands = [jnp.concatenate(parts), of_codes, *(vector for vector in vectors if vector is not None)]

    def smem(*sizes: int) -> Any:
        return plgpu.SMEM((stages, sums, *sizes), jnp.float32)

    of_outputs = (OUTPUTS,) if shape.gating is None else (2, WARPGROUP_ROWS)
    of_codes = stages, OUTPUTS, shape.columns
    copies = len(operands) - (shape.tiles > 0) - (bias is not None) + shape.packed - 1 + shape.halves - 1
    scratch = [
        swizzled((stages, shape.packed * tile_rows, shape.columns), shape.row_dtype, shape.swizzle),
        swizzled(of_codes, codes.dtype, shape.swizzle) if shape.native else tiles(of_codes, codes.dtype),
        smem(*of_outputs) if shape.has_scales else None,
        smem(*of_outputs) if shape.has_zeros else None,
        smem(shape.vector_rows) if shape.has_zeros else None,
        smem(shape.vector_rows) if shape.has_row_scales else None,
        plgpu.SMEM((shape.staged, shape.stored_rows, shape.stored_outputs), shape.stored_dtype),
        *gated.scratch(shape, bias),
        plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
    ]
    if shape.tensor_memory:
        wide = swizzled((2 * shape.packed, OUTPUTS, shape.columns), BFLOAT16, shape.swizzle)
        scratch += [
            plgpu.Barrier(num_barriers=stages, orders_tensor_core=not shape.has_scales),
            None if shape.native else wide,
            plgpu.TMEM((OUTPUTS, shape.sum_columns), jnp.float32),
            plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
        ]
    else:
        scratch += [plgpu.Barrier(num_barriers=stages, num_arrivals=2), None, None, None]
    outputs = [jax.ShapeDtypeStruct((shape.splits, padded, shape.out_tiles * shape.outputs), shape.stored_dtype)]
    present = [True, True, shape.tiles > 0, *(vector is not None for vector in vectors[1:]), True]
    present += [each is not None for each in scratch]

    def body(*given: Any) -> None:
        remaining = iter(given)
        _body(shape, _Refs(*(next(remaining) if each else None for each in present)))

    (y,) = launch(
        body,
        *operands,
        name="quantized_matmul" if not shape.tiles else "grouped_matmul" if shape.gating is None else "gated_matmul",
        outputs=outputs,
        scratch=[each for each in scratch if each is not None],
        num_ctas=shape.row_tiles * shape.out_tiles * shape.splits,
        num_warpgroups=blackwell.NUM_WARPGROUPS if shape.tensor_memory else 3,
        interpret=interpret,
    )
    y = y[0] if shape.splits == 1 else jnp.sum(y, axis=0)
    whole = shape.out // shape.outputs * shape.outputs
    if whole != shape.out:  # the last tile overlaps the previous one
        y = jnp.concatenate([y[:, :whole], y[:, whole + shape.outputs - (shape.out - whole) :]], axis=1)
    return y[:rows].astype(shape.out_dtype)


def _padded(vector: jax.Array | None, size: int) -> jax.Array | None:
    """Return vector [n, M] with zeros appended to its rows up to `size` columns; None for None."""
    return None if vector is None else jnp.pad(vector, ((0, 0), (0, size - vector.shape[1])))


def _body(shape: Shape, refs: _Refs) -> None:
    """Run one CTA: its number selects a tile of rows and outputs and a part of the inputs, which it computes. CTAs of
    unused tiles of groups do nothing.
    """
    cta = lax.axis_index("cta")
    if shape.tiles:
        # Neighbours share rows. CTAs a little further apart share a group's matrix, which the card's cache holds.
        tile, out_tile = lax.div(cta, jnp.int32(shape.out_tiles)), lax.rem(cta, jnp.int32(shape.out_tiles))
        matrix, first, steps = (refs.tiles[TILE * tile + index] for index in range(TILE))
        work = _Work(first * shape.step, steps, out_tile, jnp.int32(0), matrix)
        pl.when(matrix >= 0)(lambda: _tile(shape, refs, work))
        return
    # Neighbours share a tile of codes.
    row_tile, rest = lax.rem(cta, jnp.int32(shape.row_tiles)), lax.div(cta, jnp.int32(shape.row_tiles))
    split, out_tile = lax.rem(rest, jnp.int32(shape.splits)), lax.div(rest, jnp.int32(shape.splits))
    _tile(shape, refs, _Work(row_tile * shape.tile_rows, jnp.int32(1), out_tile, split, jnp.int32(0)))


class _Work(NamedTuple):
    """Work of a CTA: a tile of the result, a part of the inputs, and a matrix.

    Attributes:
      row: first row of the tile.
      steps: rows of the tile, in units of shape.step.
      out_tile: tile of the outputs.
      split: part of the inputs.
      matrix: group of the rows, 0 for one matrix.
    """

    row: Any
    steps: Any
    out_tile: Any
    split: Any
    matrix: Any


def _tile(shape: Shape, refs: _Refs, item: _Work) -> None:
    """Load, compute and store `item`, the work of a CTA, divided among its warpgroups: one loads, the others multiply
    (and, with shape.gating, activate) and store their outputs.
    """
    first = item.split * shape.per_split
    count = jnp.minimum(shape.input_tiles - first, shape.per_split)

    def send(part, begin, warpgroup=0):
        rows = pl.ds(item.row + begin, part.shape[0])
        columns = pl.ds(item.out_tile * shape.outputs + warpgroup * WARPGROUP_ROWS, shape.stored_outputs)
        plgpu.copy_smem_to_gmem(part, refs.y.at[item.split, rows, columns])

    def load(rows):
        _load(shape, refs, item, rows, first, count)

    def compute(warpgroup, rows):
        y = (_multiply if shape.has_scales else _multiply_plain)(shape, refs, warpgroup, rows, count)
        if shape.gating is not None:
            gated.store(shape.gating, refs, warpgroup, y, send)
            return
        ring.store_transposed(y, refs.y_smem.at[warpgroup], partial(send, warpgroup=warpgroup))

    def compute_on_blackwell(rows):
        if shape.has_scales:
            pieces = blackwell.multiply(shape, refs, rows, count, _widened)
        else:
            pieces = blackwell.multiply_plain(shape, refs, rows, count)
        blackwell.store(pieces, refs.y_smem, send)

    of_own_rows = partial(_of_own_rows, shape, item)
    if shape.tensor_memory:
        blackwell.share_work(partial(of_own_rows, load), partial(of_own_rows, compute_on_blackwell))
        return
    registers = REGISTERS if shape.tile_rows > MOST_SHARED_ROWS else None
    ring.share_work(registers, partial(of_own_rows, load), lambda warpgroup: of_own_rows(partial(compute, warpgroup)))


def _of_own_rows(shape: Shape, item: _Work, work: Callable[[int], None]) -> None:
    """Call work(rows) with the number of rows of the item's tile. As it must be static in a product, there is a branch
    for each multiple of shape.step up to shape.tile_rows.
    """
    sizes = range(shape.step, shape.tile_rows + 1, shape.step)
    lax.switch(item.steps - 1, [partial(work, rows) for rows in sizes])


def _load(shape: Shape, refs: _Refs, item: _Work, rows: int, first, count) -> None:
    """Load the item's `count` tiles of inputs from `first` on, of `rows` rows, as far ahead as there is room in the
    ring. A tile is rows, codes and, if present, scales, zeros, sums of rows and scales of rows; the bias is loaded
    once. Returns once all have been read.
    """
    start = jnp.minimum(item.out_tile * (shape.outputs // 8), (shape.out - shape.outputs) // 8)
    outputs, own_rows = pl.ds(start * 8, shape.outputs), pl.ds(item.row, shape.vector_rows)
    own = (outputs,) if shape.gating is None else (slice(None), outputs)
    if refs.bias is not None:
        plgpu.copy_gmem_to_smem(refs.bias.at[pl.ds(item.matrix * 2, 2), outputs], refs.bias_smem, refs.bias_full)

    def load(step, slot):
        tile, full = first + step, refs.full.at[slot]
        columns = pl.ds(tile * shape.columns, shape.columns)
        for half in range(shape.halves):
            code_rows = pl.ds(((item.matrix * shape.halves + half) * (shape.out // 8) + start) * 8, shape.outputs)
            target = refs.codes_smem.at[slot, pl.ds(half * shape.outputs, shape.outputs)]
            plgpu.copy_gmem_to_smem(refs.codes.at[code_rows, columns], target, full)
        for part in range(shape.packed):
            source = refs.x.at[pl.ds(part * shape.padded + item.row, rows), columns]
            target = refs.x_smem.at[slot, pl.ds(part * shape.tile_rows, rows)]
            plgpu.copy_gmem_to_smem(source, target, full)
        group = lax.div(tile * shape.inputs, jnp.int32(shape.group))
        groups, own_groups = pl.ds(item.matrix * shape.num_scales + group, shape.sums), pl.ds(group, shape.sums)
        for source, target, part in (
            (refs.scales, refs.scales_smem, (groups, *own)),
            (refs.zeros, refs.zeros_smem, (groups, *own)),
            (refs.row_sums, refs.row_sums_smem, (pl.ds(tile * shape.sums, shape.sums), own_rows)),
            (refs.row_scales, refs.row_scales_smem, (own_groups, own_rows)),
        ):
            if source is not None:
                plgpu.copy_gmem_to_smem(source.at[part], target.at[slot], full)

    ring.fill(count, shape.stages, refs.free, load)


def _multiply(shape: Shape, refs: _Refs, warpgroup, num_rows: int, count):
    """Return the scaled sum f32 [64, num_rows] over `count` tiles of inputs in the ring, for the warpgroup's 64
    outputs: each group's sum times the scales of outputs and rows, minus zeros times row sums. Waits for each tile and
    frees its slot.
    """
    own, columns = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS), shape.columns // shape.sums
    area, rows_of_tile = (WARPGROUP_ROWS, num_rows), pl.ds(0, num_rows)
    of_own = own if shape.gating is None else warpgroup

    def add(step, total):
        slot = lax.rem(step, jnp.int32(shape.stages))
        plgpu.barrier_wait(refs.full.at[slot])
        codes = refs.codes_smem.at[slot, own]
        factors = [] if shape.native else _widened(codes[...])
        for index in range(shape.sums):
            begin = index * columns

            def multiply(accumulator, begin=begin):
                each = pl.ds(begin, columns)
                for part in range(shape.packed):
                    rows = refs.x_smem.at[slot, pl.ds(part * shape.tile_rows, num_rows), each]
                    factor = codes.at[:, each] if shape.native else factors[part][:, begin : begin + columns]
                    plgpu.wgmma(accumulator, factor, rows.transpose((1, 0)))
                return accumulator[...]

            y = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(area, jnp.float32))
            y = y * lax.broadcast_in_dim(refs.scales_smem[slot, index, of_own], area, [0])
            if refs.row_scales_smem is not None:
                y = y * lax.broadcast_in_dim(refs.row_scales_smem[slot, index, rows_of_tile], area, [1])
            if refs.zeros_smem is not None:
                sums = lax.broadcast_in_dim(refs.row_sums_smem[slot, index, rows_of_tile], area, [1])
                y = y - lax.broadcast_in_dim(refs.zeros_smem[slot, index, of_own], area, [0]) * sums
            total = total + y
        plgpu.commit_smem()  # the next tile is copied where this one was read
        plgpu.barrier_arrive(refs.free.at[slot])
        return total

    return lax.fori_loop(0, count, add, jnp.zeros(area, jnp.float32))


def _multiply_plain(shape: Shape, refs: _Refs, warpgroup, num_rows: int, count):
    """Return the sum f32 [64, num_rows] over `count` tiles of inputs in the ring, for the warpgroup's 64 outputs of a
    matrix without scales. Waits for each tile and frees its slot. One product is in progress while the next tile
    arrives.
    """
    own, rows_of_tile = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS), pl.ds(0, num_rows)

    def factors(slot):
        return refs.codes_smem.at[slot, own], refs.x_smem.at[slot, rows_of_tile].transpose((1, 0))

    area = WARPGROUP_ROWS, num_rows
    return ring.sum_of_products(count, shape.stages, refs.full, refs.free, factors, area)


def _widened(codes) -> list[Any]:
    """Return codes [outputs, columns] as bfloat16 factors of successive products. For pairs of codes there are two: the
    low codes, and the high codes times 16.
    """
    if codes.dtype == jnp.uint8:
        low = lax.bitcast_convert_type((codes & 15) ^ 8, jnp.int8).astype(jnp.bfloat16) - jnp.bfloat16(8)
        return [low, lax.bitcast_convert_type(codes & 0xF0, jnp.int8).astype(jnp.bfloat16)]
    if codes.dtype == E4M3:
        codes = codes.astype(jnp.float16)  # the card converts them to no other type
    return [codes.astype(jnp.bfloat16)]

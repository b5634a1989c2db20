"""LoRA addition on a Hopper GPU: two Mosaic GPU kernels, rows times A and the result times B, over visits.

A visit loads 128 rows of A, those of some slots, in the pool's layout, one TMA box per slot. The product is transposed,
[slots' columns, T] = A x^T, so that few rows take few columns of a wgmma, and A is read once for all rows of a tile. If
there are few visits, the inputs are split over CTAs. XLA then picks for each row the columns of its own slot, adds up
the parts, rounds, and writes the sums to the row's columns within a tile of slots.

The second kernel has a CTA for each tile of the result, which adds up all visits of its rows. Rows that belong to other
tiles of slots are cleared in registers, and B is read in its stored layout, [rank, out] per slot. The grids are as long
as the largest number of visits; CTAs without a visit end at once. In both kernels one warpgroup keeps a ring filled by
TMA and two compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.cards import card_of_trace
from jaxengine.pallas_kernels.matmul.hopper import ring
from jaxengine.pallas_kernels.matmul.hopper.lora_shape import COLUMNS, Shape, why_xla
from jaxengine.pallas_kernels.matmul.hopper.shape import BFLOAT16, MOST_SHARED_ROWS
from jaxengine.pallas_kernels.matmul.lora import LoraVisits, slots_of_tile
from jaxengine.pallas_kernels.matmul.xla import lora as lora_xla
from jaxengine.pallas_kernels.mosaic_gpu import BOX_ROWS, WARPGROUP_ROWS, launch, tiles
from jaxengine.pallas_kernels.tuning import LoraTiles, Tuning, tuning_of

__all__ = ["lora_product", "why_xla"]

# Registers per lane of the loading and of the computing warpgroups. Loads of the first kernel hold the offsets of all
# slots, products of the second one hold two factors.
A_REGISTERS, B_REGISTERS = (72, 216), (40, 232)


def lora_product(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    bs: Sequence[jax.Array],
    visits: LoraVisits,
    *,
    modules: tuple[int, ...],
    rank: int,
    sizes: LoraTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return y f32 [T, out] plus (x A) B of each row that has an adapter, computed on a Hopper GPU.

    Arguments are those of matmul.lora.lora_product, which has checked them: x [T, in], a [modules * slots * rank, in],
    each of bs [slots * rank, out of a source], modules: for each of bs the module whose A it uses. XLA computes the sum
    if the kernels do not support it (`why_xla`), tiles of slots are not COLUMNS wide, or the trace is for no Hopper
    card. sizes: the sizes that the visits were made with, None for the default. interpret: see `mosaic_gpu.launch`.
    """
    tile = Tuning().lora_tiles if sizes is None else sizes
    widths = tuple(b.shape[1] for b in bs)
    plain = interpret is False and ((card := card_of_trace()) is None or not card.hopper)
    if plain or tile.columns != COLUMNS or why_xla(x.shape[1], widths, rank, x.dtype):
        return lora_xla.lora_product(y, x, a, bs, visits, modules=modules, rank=rank, sizes=tile)
    each = slots_of_tile(rank, tile)
    products = tuning_of("gpu").hopper_products
    shape = Shape(len(x), x.shape[1], widths, modules, rank, len(visits.slots) // each, tile, products)
    inner = _own_columns(shape, _times_a(shape, x, a, visits, interpret), visits.slot_index)
    return y + _times_b(shape, inner, bs, visits, interpret)


class _Visits(NamedTuple):
    """Fields of `LoraVisits` that the first kernel reads: i32 [V], [V] and [N]."""

    row_tile: Any
    slot_tile: Any
    slots: Any


def _times_a(shape: Shape, x: jax.Array, a: jax.Array, visits: LoraVisits, interpret: Any) -> jax.Array:
    """Run the first kernel, rows times A: return f32 [splits, modules, tiles of slots, rows of all tiles, COLUMNS],
    undefined for pairs of tiles without a visit.

    shape: compile-time parameters. x: rows [T, in]. a: A of all modules and slots, [modules * slots * rank, in].
    interpret: see `mosaic_gpu.launch`.
    """
    rows, stages = shape.row_tiles * shape.tile_rows, shape.stages_of_a
    outer = shape.splits * shape.num_modules * shape.slot_tiles
    (sums,) = launch(
        partial(_times_a_body, shape, len(a) // (shape.num_modules * shape.rank)),
        visits.row_tile,
        visits.slot_tile,
        visits.slots,
        visits.count,
        jnp.pad(x, ((0, rows - shape.rows), (0, 0))),
        a,
        name="lora_times_a",
        outputs=[jax.ShapeDtypeStruct((outer, rows, COLUMNS), jnp.float32)],
        scratch=[
            tiles((stages, shape.tile_rows, shape.inputs), x.dtype),
            tiles((stages, COLUMNS, shape.inputs), x.dtype),
            plgpu.SMEM((2, shape.stored_rows, WARPGROUP_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=stages, num_arrivals=shape.each + 1),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        ],
        num_ctas=shape.most_visits * shape.num_modules * shape.splits,
        num_warpgroups=3,
        interpret=interpret,
    )
    return sums.reshape(shape.splits, shape.num_modules, shape.slot_tiles, rows, COLUMNS)


class _OfA(NamedTuple):
    """References that the first kernel gets, in launch order: operands, result, shared memory and barriers.

    Attributes:
      visits: operands in memory.
      x: [rows, in].
      a: [modules * slots * rank, in].
      sums: f32 [splits * modules * tiles of slots, rows, COLUMNS].
      x_smem: [stages, tile rows, inputs].
      a_smem: [stages, COLUMNS, inputs].
      sums_smem: f32 [2, stored rows, 64].
      full, free: barriers of the ring.
    """

    visits: _Visits
    x: Any
    a: Any
    sums: Any
    x_smem: Any
    a_smem: Any
    sums_smem: Any
    full: Any
    free: Any


def _times_a_body(shape: Shape, num_slots: int, row_tile, slot_tile, slots, count, *others: Any) -> None:
    """Run one CTA of the first kernel: the product of one visit's rows with one module's A, over one part of the
    inputs.

    num_slots: slots of the pool of adapters. row_tile, slot_tile, slots: fields of _Visits. count: i32 [1], number of
    visits; CTAs of later ones do nothing. others: the fields of _OfA after `visits`. One warpgroup loads; the two
    others compute and store 64 columns each.
    """
    refs = _OfA(_Visits(row_tile, slot_tile, slots), *others)
    cta = lax.axis_index("cta")
    # Neighbours share rows.
    module, rest = lax.rem(cta, jnp.int32(shape.num_modules)), lax.div(cta, jnp.int32(shape.num_modules))
    split, visit = lax.rem(rest, jnp.int32(shape.splits)), lax.div(rest, jnp.int32(shape.splits))

    @pl.when(visit < count[0])
    def _():
        first = split * shape.per_split
        steps = jnp.minimum(shape.size // shape.inputs - first, shape.per_split)
        tile = refs.visits.slot_tile[visit]
        rows = refs.visits.row_tile[visit] * shape.tile_rows

        def load():
            matrices = [
                (module * num_slots + refs.visits.slots[tile * shape.each + at]) * (shape.rank // BOX_ROWS) * BOX_ROWS
                for at in range(shape.each)
            ]

            def load(step, slot):
                columns, full = pl.ds((first + step) * shape.inputs, shape.inputs), refs.full.at[slot]
                for at, matrix in enumerate(matrices):
                    target = refs.a_smem.at[slot, pl.ds(at * shape.rank, shape.rank)]
                    plgpu.copy_gmem_to_smem(refs.a.at[pl.ds(matrix, shape.rank), columns], target, full)
                source = refs.x.at[pl.ds(rows, shape.tile_rows), columns]
                plgpu.copy_gmem_to_smem(source, refs.x_smem.at[slot], full)

            ring.fill(steps, shape.stages_of_a, refs.free, load)

        def compute(warpgroup):
            outer = (split * shape.num_modules + module) * shape.slot_tiles + tile
            columns = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

            def send(part, first):
                plgpu.copy_smem_to_gmem(part, refs.sums.at[outer, pl.ds(rows + first, part.shape[0]), columns])

            ring.store_transposed(_sum_of_a(shape, refs, warpgroup, steps), refs.sums_smem.at[warpgroup], send)

        ring.share_work(A_REGISTERS if shape.tile_rows > MOST_SHARED_ROWS else None, load, compute)


def _sum_of_a(shape: Shape, refs: _OfA, warpgroup, count):
    """Return the sum of products A x^T, f32 [64, tile rows], for the warpgroup's 64 columns of the tile of slots, over
    `count` tiles of inputs in the ring. Waits for each tile and frees its slot in the ring.
    """
    own = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

    def factors(slot):
        return refs.a_smem.at[slot, own], refs.x_smem.at[slot].transpose((1, 0))

    area = WARPGROUP_ROWS, shape.tile_rows
    return ring.sum_of_products(count, shape.stages_of_a, refs.full, refs.free, factors, area)


def _own_columns(shape: Shape, sums: jax.Array, slot_index: jax.Array) -> jax.Array:
    """Return each row's product with the A of its own slot, in the columns of slot % shape.each: bfloat16 [padded rows,
    modules * COLUMNS].

    sums: result of `_times_a`, whose splits are added up. slot_index: i32 [T] of LoraVisits. Other columns, rows
    without a slot and padding are zeros.
    """
    of_slots = sums.reshape(*sums.shape[:4], shape.each, shape.rank)
    row, own = jnp.arange(shape.rows), jnp.maximum(slot_index, 0)
    inner = jnp.sum(of_slots[:, :, own // shape.each, row, own % shape.each], axis=0)  # [modules, T, rank]
    is_own = (slot_index % shape.each)[:, None] == jnp.arange(shape.each)
    # Parts without a visit may be NaN.
    spread = jnp.where((is_own & (slot_index >= 0)[:, None])[:, :, None], inner[:, :, None], 0).astype(BFLOAT16)
    spread = jnp.moveaxis(spread, 0, 1).reshape(shape.rows, -1)
    return jnp.pad(spread, ((0, shape.padded - shape.rows), (0, 0)))


def _times_b(shape: Shape, inner: jax.Array, bs: Sequence[jax.Array], visits: LoraVisits, interpret: Any) -> jax.Array:
    """Run the second kernel, the results of the first times B: return the sum over each row's visits, f32 [T, out].

    shape: compile-time parameters. inner: result of `_own_columns`. bs: B of each source, [slots * rank, its width].
    visits: determine which slots meet which rows. interpret: see `mosaic_gpu.launch`.
    """
    rows, stages = shape.parts * WARPGROUP_ROWS, shape.stages_of_b
    # Where the visits of each tile of rows begin, and the last ones end.
    index, tile = jnp.arange(len(visits.row_tile)), jnp.arange(shape.row_tiles + 1)[:, None]
    begins = jnp.sum((visits.row_tile < tile) & (index < visits.count), axis=1, dtype=jnp.int32)
    of_rows = jnp.pad(visits.slot_index // shape.each, (0, shape.padded - shape.rows), constant_values=-1)
    stored = shape.row_tiles * shape.tile_rows
    (added,) = launch(
        partial(_times_b_body, shape),
        visits.slot_tile,
        visits.slots,
        begins,
        of_rows.astype(jnp.float32),
        inner,
        *bs,
        name="lora_times_b",
        outputs=[jax.ShapeDtypeStruct((stored, sum(shape.widths)), jnp.float32)],
        scratch=[
            plgpu.SMEM((rows,), jnp.float32),
            tiles((rows, COLUMNS), inner.dtype),
            tiles((stages, 2, COLUMNS, WARPGROUP_ROWS), inner.dtype),
            plgpu.SMEM((2, WARPGROUP_ROWS, WARPGROUP_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=1, num_arrivals=2),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2 * shape.each),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        ],
        num_ctas=shape.row_tiles * (sum(shape.widths) // COLUMNS),
        num_warpgroups=3,
        interpret=interpret,
    )
    return added[: shape.rows]


class _OfB(NamedTuple):
    """References that the second kernel gets, in launch order: operands, result, shared memory and barriers.

    Attributes:
      slot_tile, slots: i32 [V] and [N] of LoraVisits.
      begins: i32 [row tiles + 1] first visit of each tile of rows.
      tile_of_row: f32 [padded rows] tile of slots of each row, -1 for none.
      inner: [padded rows, modules * COLUMNS].
      bs: each [slots * rank, its width].
      added: f32 [rows, out].
      tile_of_row_smem: f32 [rows of a tile].
      inner_smem: [rows of a tile, COLUMNS].
      b_smem: [stages, 2, COLUMNS, 64].
      added_smem: f32 [2, 64, 64].
      ready: barrier: rows and their tiles have arrived.
      full, free: barriers of the ring.
    """

    slot_tile: Any
    slots: Any
    begins: Any
    tile_of_row: Any
    inner: Any
    bs: tuple[Any, ...]
    added: Any
    tile_of_row_smem: Any
    inner_smem: Any
    b_smem: Any
    added_smem: Any
    ready: Any
    full: Any
    free: Any


def _times_b_body(shape: Shape, *given: Any) -> None:
    """Run one CTA of the second kernel: one tile of the result, summed over all visits of its rows. One warpgroup
    loads; the two others compute and store 64 outputs each. given: the fields of _OfB in order, with the elements of
    `bs` as separate arguments.
    """
    slot_tile, slots, begins, tile_of_row, inner, *others = given
    num_sources = len(shape.widths)
    bs = tuple(others[:num_sources])
    refs = _OfB(slot_tile, slots, begins, tile_of_row, inner, bs, *others[num_sources:])
    cta = lax.axis_index("cta")
    # Neighbours share B, which is larger than the rows.
    row_tile, column = lax.rem(cta, jnp.int32(shape.row_tiles)), lax.div(cta, jnp.int32(shape.row_tiles))
    visit, rows = refs.begins[row_tile], row_tile * shape.tile_rows
    count = refs.begins[row_tile + 1] - visit

    def load():
        begin = 0
        for b, width, module in zip(refs.bs, shape.widths, shape.modules, strict=True):
            end = begin + width // COLUMNS

            @pl.when((column >= begin) & (column < end))
            def _(b=b, begin=begin, module=module):
                own = pl.ds(rows, shape.parts * WARPGROUP_ROWS)
                plgpu.copy_gmem_to_smem(refs.tile_of_row.at[own], refs.tile_of_row_smem, refs.ready.at[jnp.int32(0)])
                source = refs.inner.at[own, pl.ds(module * COLUMNS, COLUMNS)]
                plgpu.copy_gmem_to_smem(source, refs.inner_smem, refs.ready.at[jnp.int32(0)])
                ring.fill(count, shape.stages_of_b, refs.free, partial(_load_b, shape, refs, b, column - begin, visit))

            begin = end

    def compute(warpgroup):
        plgpu.barrier_wait(refs.ready.at[jnp.int32(0)])
        totals = _sum_of_b(shape, refs, warpgroup, visit, count)
        columns = pl.ds(column * COLUMNS + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        for part, total in enumerate(totals):
            first = part * WARPGROUP_ROWS
            stored = min(WARPGROUP_ROWS, shape.tile_rows - first)
            plgpu.wait_smem_to_gmem(0)
            refs.added_smem[warpgroup] = total
            plgpu.commit_smem()
            source = refs.added_smem.at[warpgroup, pl.ds(0, stored)]
            plgpu.copy_smem_to_gmem(source, refs.added.at[pl.ds(rows + first, stored), columns])
        plgpu.wait_smem_to_gmem(0)

    ring.share_work(B_REGISTERS if shape.parts > 1 else None, load, compute)


def _load_b(shape: Shape, refs: _OfB, b, column, first, step, slot) -> None:
    """Start the copies of B of the slots of visit first + step into `slot` of the ring, the outputs of each warpgroup
    in their own part, to arrive at refs.full of the slot.

    column: index of the tile of COLUMNS outputs of `b`.
    """
    tile = refs.slot_tile[first + step]
    for at in range(shape.each):
        matrix = refs.slots[tile * shape.each + at] * (shape.rank // BOX_ROWS) * BOX_ROWS
        for half in range(2):
            source = b.at[pl.ds(matrix, shape.rank), pl.ds(column * COLUMNS + half * WARPGROUP_ROWS, WARPGROUP_ROWS)]
            target = refs.b_smem.at[slot, half, pl.ds(at * shape.rank, shape.rank)]
            plgpu.copy_gmem_to_smem(source, target, refs.full.at[slot])


def _sum_of_b(shape: Shape, refs: _OfB, warpgroup, first, count) -> list[Any]:
    """Return a list of sums f32 [64, 64], one for each 64 rows of the tile, of the warpgroup's 64 outputs over `count`
    visits from `first` on. In a visit, rows that use another tile of slots count as zeros. Waits for B of each visit,
    and frees its slot of the ring.
    """
    area = WARPGROUP_ROWS, COLUMNS

    def multiply(*accumulators):
        def add(step, carry):
            slot = lax.rem(step, jnp.int32(shape.stages_of_b))
            tile = refs.slot_tile[first + step].astype(jnp.float32)
            plgpu.barrier_wait(refs.full.at[slot])
            for part, accumulator in enumerate(accumulators):
                own = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)
                has = jnp.where(refs.tile_of_row_smem[own] == tile, jnp.float32(1), jnp.float32(0))
                rows = refs.inner_smem[own] * lax.broadcast_in_dim(has.astype(BFLOAT16), area, [0])
                plgpu.wgmma(accumulator, rows, refs.b_smem.at[slot, warpgroup])
                plgpu.wgmma_wait(1 if part + 1 < shape.parts else 0)  # registers hold the rows of two products
            plgpu.barrier_arrive(refs.free.at[slot])
            return carry

        lax.fori_loop(0, count, add, jnp.int32(0))
        return [accumulator[...] for accumulator in accumulators]

    accumulator = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, WARPGROUP_ROWS), jnp.float32)
    return pl.run_scoped(multiply, *[accumulator] * shape.parts)

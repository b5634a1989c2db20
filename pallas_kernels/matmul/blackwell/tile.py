"""Tile of a product on a Blackwell GPU: tcgen05 products with their sums in tensor memory.

The kernel is that of `matmul.hopper.quantized`, whose operands, ring of tiles and order of work it keeps. Here one
product covers all 128 outputs of a tile and leaves its sums in tensor memory, so that one warpgroup issues it and does
not wait: while the products of one tile of inputs run, the sums of the previous one are scaled and added up in
registers. Codes that need conversion are widened into shared memory, because tcgen05 takes no operand from registers.

PTX ISA, "tcgen05 instructions": 512 columns of tensor memory; a product of 128 rows has a multiple of 16 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_WARPGROUPS = 2  # one computes, one loads
PIECE = 32  # columns of sums that are in registers at a time, besides the total


def share_work(load: Callable[[], None], compute: Callable[[], None]) -> None:
    """Run compute() in warpgroup 0 of a CTA and load() in warpgroup 1."""
    warpgroup = lax.axis_index("wg")
    pl.when(warpgroup == 1)(load)
    pl.when(warpgroup == 0)(compute)


def multiply(shape: Any, refs: Any, rows: int, count: Any, widened: Callable[[Any], list[Any]]) -> list[Any]:
    """Return the scaled sum f32 [128, rows] over `count` (at least 1) tiles of inputs, as a list of pieces of `PIECE`
    columns.

    shape, refs: those of `matmul.hopper`. widened: function of codes [128, columns] that returns bfloat16 factors of
    successive products. Waits for each tile in the ring, and frees its slot. Sums go through two banks of tensor
    memory.
    """
    columns = shape.columns // shape.sums

    def begin(step):
        slot, bank = lax.rem(step, jnp.int32(shape.stages)), lax.rem(step, jnp.int32(2))
        plgpu.barrier_wait(refs.full.at[slot])
        if not shape.native:
            for part, factor in enumerate(widened(refs.codes_smem[slot])):
                refs.wide_smem[bank * shape.packed + part] = factor
            plgpu.commit_smem()
        for index in range(shape.sums):
            each = pl.ds(index * columns, columns)
            sums = refs.sums_tmem.at[:, pl.ds((bank * shape.sums + index) * rows, rows)]
            for part in range(shape.packed):
                factor = refs.codes_smem.at[slot, :, each]
                if not shape.native:
                    factor = refs.wide_smem.at[bank * shape.packed + part, :, each]
                x = refs.x_smem.at[slot, pl.ds(part * shape.tile_rows, rows), each]
                plgpu.tcgen05_mma(sums, factor, x.transpose((1, 0)), accumulate=part > 0)
        plgpu.tcgen05_commit_arrive(refs.done.at[bank])

    def add(step, total):
        slot, bank = lax.rem(step, jnp.int32(shape.stages)), lax.rem(step, jnp.int32(2))
        pl.when(step + 1 < count)(lambda: begin(step + 1))
        plgpu.barrier_wait(refs.done.at[bank])
        for index in range(shape.sums):
            total = [
                piece + _scaled(refs, slot, index, (bank * shape.sums + index) * rows, first, piece.shape)
                for first, piece in zip(range(0, rows, PIECE), total, strict=True)
            ]
        plgpu.wait_load_tmem()  # all four warps wait; then the bank's next products may begin
        plgpu.commit_smem()  # the next tile is copied where this one was read
        plgpu.barrier_arrive(refs.free.at[slot])
        return total

    begin(jnp.int32(0))
    zeros = [jnp.zeros((128, min(PIECE, rows - first)), jnp.float32) for first in range(0, rows, PIECE)]
    return lax.fori_loop(0, count, add, zeros)


def _scaled(refs: Any, slot: Any, index: int, begin: Any, first: int, area: tuple[int, int]) -> Any:
    """Return a piece of a sum, f32 [128, columns] of shape `area` from column `first` on, times its scales, minus the
    zero points times the rows' sums if there are any.

    begin: column of tensor memory where the sum begins. slot, index: the tile in shared memory, and the group of inputs
    in it that the sum is over.
    """
    columns = pl.ds(begin + first, area[1])
    y = plgpu.async_load_tmem(refs.sums_tmem.at[:, columns], layout=plgpu.Layout.TCGEN05)
    own_rows = pl.ds(first, area[1])
    y = y * lax.broadcast_in_dim(refs.scales_smem[slot, index], area, [0])
    if refs.row_scales_smem is not None:
        y = y * lax.broadcast_in_dim(refs.row_scales_smem[slot, index, own_rows], area, [1])
    if refs.zeros_smem is not None:
        sums = lax.broadcast_in_dim(refs.row_sums_smem[slot, index, own_rows], area, [1])
        y = y - lax.broadcast_in_dim(refs.zeros_smem[slot, index], area, [0]) * sums
    return y


def multiply_plain(shape: Any, refs: Any, rows: int, count: Any) -> list[Any]:
    """Return the sum f32 [128, rows] over `count` (at least 1) tiles of inputs, as a list of pieces of `PIECE` columns,
    for matrices without scales. The sum stays in tensor memory until the end. Waits for each tile in the ring, and
    frees its slot. shape, refs: those of `matmul.hopper`.
    """
    sums = refs.sums_tmem.at[:, pl.ds(0, rows)]

    def add(step, carry):
        slot = lax.rem(step, jnp.int32(shape.stages))
        plgpu.barrier_wait(refs.full.at[slot])
        x = refs.x_smem.at[slot, pl.ds(0, rows)].transpose((1, 0))
        plgpu.tcgen05_mma(sums, refs.codes_smem.at[slot], x, refs.free.at[slot], accumulate=step > 0)
        return carry

    lax.fori_loop(0, count, add, jnp.int32(0))
    plgpu.tcgen05_commit_arrive(refs.done.at[0])
    plgpu.barrier_wait(refs.done.at[0])
    pieces = [pl.ds(first, min(PIECE, rows - first)) for first in range(0, rows, PIECE)]
    return [plgpu.async_load_tmem(refs.sums_tmem.at[:, piece], layout=plgpu.Layout.TCGEN05) for piece in pieces]


def store(pieces: list[Any], staged: Any, send: Callable[[Any, int], None]) -> None:
    """Transpose the pieces of a tile, f32 [128, up to PIECE], to shared memory and send them to the result. Returns
    once all are stored.

    staged: shared memory [2, PIECE, 128] in the result's dtype. send(part, first): starts the copy of `part` of it to
    the result's rows from `first` on.
    """
    for index, piece in enumerate(pieces):
        count = piece.shape[1]
        part = staged.at[index % 2, pl.ds(0, count)]
        plgpu.wait_smem_to_gmem(1)
        part.transpose((1, 0))[...] = plgpu.layout_cast(piece.astype(staged.dtype), plgpu.Layout.TCGEN05_TRANSPOSED)
        plgpu.commit_smem()
        send(part, index * PIECE)
    plgpu.wait_smem_to_gmem(0)

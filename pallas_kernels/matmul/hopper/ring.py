"""Division of labour of Hopper products: one warpgroup fills a ring of tiles in shared memory by TMA, two compute.

A slot of the ring has two barriers: `full` when its tiles have arrived, `free` when both warpgroups have read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

PRODUCER = 2  # the warpgroup that loads


def share_work(registers: tuple[int, int] | None, load: Callable[[], None], compute: Callable[[Any], None]) -> None:
    """Run load() in warpgroup 2 and compute(warpgroup) in warpgroups 0 and 1.

    registers: registers per lane of the loading and of each computing warpgroup, to which the CTA's registers are
    redistributed; None for no change, where several CTAs share a multiprocessor.
    """
    warpgroup = lax.axis_index("wg")

    @pl.when(warpgroup == PRODUCER)
    def _():
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="decrease")
        load()

    @pl.when(warpgroup < PRODUCER)
    def _():
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="increase")
        compute(warpgroup)


def fill(count: Any, stages: int, free: Any, load: Callable[[Any, Any], None]) -> None:
    """Call load(step, slot) for `count` steps, each as soon as its slot of the ring is free, and return once all slots
    have been read.

    stages, free: number of the ring's slots, and their `free` barriers.
    """

    def body(step, carry):
        slot = lax.rem(step, jnp.int32(stages))

        @pl.when(step >= stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        load(step, slot)
        return carry

    lax.fori_loop(0, count, body, jnp.int32(0))
    # Every arrival must be observed before the CTA ends.
    for slot in range(stages):

        @pl.when(slot < count)
        def _(slot=slot):
            plgpu.barrier_wait(free.at[slot])


def sum_of_products(
    count: Any, stages: int, full: Any, free: Any, factors: Callable[[Any], tuple[Any, Any]], area: tuple[int, int]
) -> Any:
    """Return the sum, f32 of shape `area`, over `count` steps (at least 1), of the product of the pair factors(slot),
    two operands of a wgmma.

    One product is in progress while the next tiles arrive. full, free: barriers of the ring's `stages` slots. Waits
    for each step's tiles and frees their slot.
    """

    def multiply(accumulator):
        def add(step, carry):
            slot = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(accumulator, *factors(slot))
            plgpu.wgmma_wait(1)

            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(step - 1, jnp.int32(stages))])

            return carry

        lax.fori_loop(0, count, add, jnp.int32(0))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(free.at[lax.rem(count - 1, jnp.int32(stages))])
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(area, jnp.float32))


def store_transposed(total: Any, staged: Any, send: Callable[[Any, int], None]) -> None:
    """Transpose the warpgroup's part of a tile, f32 [64, rows], to shared memory and send it. Returns once it is
    stored.

    staged: shared memory [stored rows, 64] that only this warpgroup uses, in the result's dtype. send(part, first):
    starts the copy of `part` of it to the result's rows from `first` on.
    """
    rows, most = total.shape[1], staged.shape[0]
    for first in range(0, rows, most):
        count = min(most, rows - first)
        plgpu.wait_smem_to_gmem(0)
        part = staged.at[pl.ds(0, count)]
        write_transposed(total[:, first : first + count], part)
        send(part, first)
    plgpu.wait_smem_to_gmem(0)


def write_transposed(piece: Any, part: Any) -> None:
    """Write the transpose of a piece of the warpgroup's tile, f32 [64, rows], to shared memory `part` [rows, 64], in
    the dtype of `part`, and make it visible to copies.
    """
    piece = plgpu.layout_cast(piece.astype(part.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    part.transpose((1, 0))[...] = piece
    plgpu.commit_smem()

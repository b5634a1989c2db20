"""Computing warpgroups of the prefill kernel on a Blackwell GPU: tcgen05 products, sums in tensor memory.

Tiles, loads and stores are those of `attention.hopper`, but a warpgroup has 128 rows, all rows of a product. Each lane
holds one row in its registers. A warpgroup starts the scores of the next block before it computes the softmax of this
one. The tensor cores are thus busy during a softmax, and the two warpgroups need not take turns. The sums of values
stay in tensor memory, where they are scaled in pieces. Weights go through shared memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.blackwell.sums import columns_of, load_sums, scale_sums
from jaxengine.pallas_kernels.attention.hopper.prefill import attend_tile, registers, softmax
from jaxengine.pallas_kernels.attention.hopper.prefill_load import Refs, Tile, produce, tile_count
from jaxengine.pallas_kernels.attention.hopper.prefill_shape import Shape


def body(shape: Shape, refs: Refs) -> None:
    """Run one warpgroup of a CTA over all of the CTA's tiles: the last warpgroup loads their data, the others compute
    and store 128 rows of each. If two compute, registers are moved from the loading warpgroup to them.
    """
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    producer, compute = registers(shape)

    @pl.when(warpgroup == shape.computing)
    def _():
        if shape.computing > 1:
            plgpu.set_max_registers(producer, action="decrease")
        produce(shape, refs, cta)

    @pl.when(warpgroup < shape.computing)
    def _():
        if shape.computing > 1:
            plgpu.set_max_registers(compute, action="increase")
        own = _own(shape, refs, warpgroup)
        attend = partial(_attend_block, shape, own)

        def columns(_sums, first, end):
            return columns_of(own.o_tmem, first, end)

        def attend_next(index, step):
            return attend_tile(shape, refs, cta, warpgroup, index, step, (), attend, columns)

        lax.fori_loop(0, tile_count(shape, refs, cta), attend_next, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _own(shape: Shape, refs: Refs, warpgroup) -> Refs:
    """Return `refs` with the fields q_smem, weight_smem, sums_tmem, o_tmem, scored and added restricted to one
    computing warpgroup: its rows of queries and weights, columns of tensor memory and barriers. Other fields are
    unchanged.
    """
    rows = pl.ds(warpgroup * shape.warpgroup_rows, shape.warpgroup_rows)

    def columns(count: int) -> Any:
        return slice(None), pl.ds(warpgroup * count, count)

    return refs._replace(
        q_smem=refs.q_smem.at[rows],
        weight_smem=refs.weight_smem.at[rows],
        sums_tmem=refs.sums_tmem.at[columns(shape.block_kv)],
        o_tmem=refs.o_tmem.at[columns(shape.spec.head_dim)],
        scored=refs.scored.at[warpgroup],
        added=refs.added.at[warpgroup],
    )


def _attend_block(shape: Shape, own: Refs, step, tile: Tile, block, carry, scale, mask):
    """Add one block of a tile to the running softmax; return the new ((), largest, total), `largest` in base 2.

    The sums of values stay in own.o_tmem. Waits for the block's keys and values, releases their stages when its
    products are complete, and starts the scores of the tile's next block; after the last block it waits for the sums.
    own: a result of `_own`. step: number of blocks finished before the tile. block: index within the tile. carry: ((),
    largest and total, f32 [128] each). scale, mask: arguments of `attention.hopper.prefill._attend_block`.
    """
    _, largest, total = carry

    def score(block):
        """Wait for a block's keys and start their products with the queries."""
        slot = lax.rem(step + block, jnp.int32(shape.stages))
        plgpu.barrier_wait(own.k_full.at[slot])
        keys = own.k_smem.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(own.sums_tmem, own.q_smem, keys, own.k_free.at[slot], accumulate=False)
        plgpu.tcgen05_commit_arrive(own.scored)

    pl.when(block == 0)(lambda: score(block))
    plgpu.barrier_wait(own.scored)
    products = load_sums(own.sums_tmem)
    plgpu.wait_load_tmem()
    pl.when(block + 1 < tile.num_blocks)(lambda: score(block + 1))
    mask = None if mask is None else mask(block)
    weights, decay, largest, total = softmax(shape, products, largest, total, scale, mask)

    @pl.when(block > 0)
    def _():
        plgpu.barrier_wait(own.added)  # the products of the previous block have read its weights
        scale_sums(own.o_tmem, decay)

    own.weight_smem[...] = weights.astype(shape.dtype)
    plgpu.commit_smem()
    slot = lax.rem(step + block, jnp.int32(shape.stages))
    plgpu.barrier_wait(own.v_full.at[slot])
    plgpu.tcgen05_mma(own.o_tmem, own.weight_smem, own.v_smem.at[slot], own.v_free.at[slot], accumulate=block > 0)
    plgpu.tcgen05_commit_arrive(own.added)
    pl.when(block + 1 == tile.num_blocks)(lambda: plgpu.barrier_wait(own.added))
    return (), largest, total

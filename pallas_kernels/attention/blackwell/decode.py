"""Computing warpgroup of the split-KV decode kernel on a Blackwell GPU: tcgen05 products, sums in tensor memory.

Items, loads and stores are those of `attention.hopper.decode`. The first of the 128 rows of a product are the new
tokens of a row times the query heads of a kv head. The rows after them hold stale data, which affects no other row. The
scores of the next block are computed during the softmax of this one, and the sums of values stay in tensor memory.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.blackwell.sums import columns_of, load_sums, scale_sums
from jaxengine.pallas_kernels.attention.hopper.decode import (
    NOTHING,
    DecodeShape,
    Refs,
    masked_logits,
    operands,
    store,
)
from jaxengine.pallas_kernels.attention.hopper.schedule import (
    DECODE_BEGIN,
    DECODE_END,
    DECODE_END_BLOCK,
    DECODE_FIRST_BLOCK,
    DECODE_HEAD,
    DECODE_KEYS,
    DECODE_POSITION,
)


def attend(shape: DecodeShape, refs: Refs, first, end) -> None:
    """Compute and store the attention of items `first` to end - 1 of a CTA, each over its blocks, by an online softmax
    (Milakov & Gimelshein 2018, arXiv 1805.02867).

    Waits for each item's queries and blocks, releases their buffers, and returns once the stores are complete.
    """
    _, queries = shape.stages()
    nothing = jnp.full((shape.product_rows,), NOTHING, jnp.float32), jnp.zeros((shape.product_rows,), jnp.float32)

    def attend_item(item, step):
        """Compute and store the attention of one item; return `step` plus its number of blocks."""
        q_slot = lax.rem(item - first, jnp.int32(queries))
        first_block, end_block = refs.items[item, DECODE_FIRST_BLOCK], refs.items[item, DECODE_END_BLOCK]
        plgpu.barrier_wait(refs.q_full.at[q_slot])

        def attend_block(block, carry):
            return _attend_block(shape, refs, item, q_slot, step - first_block, block, carry)

        largest, total = lax.fori_loop(first_block, end_block, attend_block, nothing)
        plgpu.barrier_wait(refs.added)
        plgpu.barrier_arrive(refs.q_free.at[q_slot])
        store(shape, refs, item, lambda begin, stop: columns_of(refs.o_tmem, begin, stop), largest, total)
        return step + end_block - first_block

    lax.fori_loop(first, end, attend_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _attend_block(shape: DecodeShape, refs: Refs, item, q_slot, step, block, carry):
    """Add a block of an item to the running softmax; return the new (largest, total), `largest` in base 2.

    The sums of values, in refs.o_tmem, are first scaled by the decay of the maximum. On return the block's products are
    still being added (refs.added signals their end), and the scores of the item's next block have been started. q_slot:
    slot of the item's queries in shared memory. step: number of blocks that the CTA has finished before the item, minus
    the number of the item's first block. carry: (largest, total), f32 [128] each.
    """
    largest, total = carry
    first_block, end_block = refs.items[item, DECODE_FIRST_BLOCK], refs.items[item, DECODE_END_BLOCK]
    bounds = [refs.items[item, field] for field in (DECODE_BEGIN, DECODE_END, DECODE_POSITION)]
    blocks, _ = shape.stages()

    def buffers(block):
        """Return the slot of a block in shared memory, and its bank of widened blocks."""
        return lax.rem(step + block, jnp.int32(blocks)), lax.rem(step + block, jnp.int32(2))

    def score(block):
        """Wait for a block's keys and start their products with the queries."""
        slot, bank = buffers(block)
        plgpu.barrier_wait(refs.kv_full.at[slot])
        begin, stop, _ = (edge - block * DECODE_KEYS for edge in bounds)
        keys, _ = operands(shape, refs, slot, bank, begin, stop)
        plgpu.tcgen05_mma(refs.sums_tmem, refs.q_smem.at[q_slot], keys.transpose((1, 0)), accumulate=False)
        plgpu.tcgen05_commit_arrive(refs.scored)

    def wait_added():
        """Wait for the products of weights and values of the previous block, unless this block is the item's first."""
        pl.when(block > first_block)(lambda: plgpu.barrier_wait(refs.added))

    pl.when(block == first_block)(lambda: score(block))
    plgpu.barrier_wait(refs.scored)
    products = load_sums(refs.sums_tmem)
    plgpu.wait_load_tmem()
    if shape.converts:  # the next block is widened in the buffer of the previous one
        wait_added()
    pl.when(block + 1 < end_block)(lambda: score(block + 1))
    edges = (edge - block * DECODE_KEYS for edge in bounds)
    scale = refs.scale[refs.items[item, DECODE_HEAD]]
    logits = masked_logits(shape.spec, shape.tokens, products, scale, *edges)
    new_largest = jnp.maximum(largest, logits.max(axis=1))
    decay = jnp.exp2(largest - new_largest)
    weights = jnp.exp2(logits - lax.broadcast_in_dim(new_largest, logits.shape, [0]))
    if not shape.converts:
        wait_added()
    pl.when(block > first_block)(lambda: scale_sums(refs.o_tmem, decay))
    refs.weight_smem[...] = weights.astype(shape.dtype)
    plgpu.commit_smem()
    slot, bank = buffers(block)
    stored = refs.wide_smem if shape.converts else refs.kv_smem.at[slot]
    values = stored.at[pl.ds((bank * 2 if shape.converts else 0) * DECODE_KEYS + DECODE_KEYS, DECODE_KEYS)]
    free = None if shape.converts else refs.kv_free.at[slot]
    plgpu.tcgen05_mma(refs.o_tmem, refs.weight_smem, values, free, accumulate=block > first_block)
    plgpu.tcgen05_commit_arrive(refs.added)
    return new_largest, total * decay + weights.sum(axis=1)

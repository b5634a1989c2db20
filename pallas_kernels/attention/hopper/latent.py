"""Attention over latents on a Hopper GPU: split-KV, in Mosaic GPU, of keys that begin with their values.

Contains the kernel that computes results from `DecodeItems` over latents, for decodes, verified tokens and prefill
alike. If several items share a pair, each yields a part of its result, and merge.py combines the parts. A block of keys
is loaded once and serves as keys and as values. At its width (512 + 64 in DeepSeek-AI 2024, arXiv:2405.04434) 64 rows
of results need more registers than one warpgroup has, so two share them, as in FlashMLA (DeepSeek-AI 2025). Each
computes the scores of half of the keys and half of the columns of the results. They exchange row maxima and weights
through shared memory, and nothing is computed twice. A third warpgroup keeps the ring of blocks filled by TMA.

The 64 rows of a wgmma are the new tokens of a row times up to 64 query heads. More heads make several tiles, each of
which the schedule treats as a (row, kv head) pair of its own. The pool [P, K, page * H] is viewed as rows [P * K *
page, H]. Letters are those of decode.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.hopper.decode import NOTHING, load, masked_logits
from jaxengine.pallas_kernels.attention.hopper.schedule import (
    DECODE_BEGIN,
    DECODE_END,
    DECODE_END_BLOCK,
    DECODE_FIRST_BLOCK,
    DECODE_HEAD,
    DECODE_KEYS,
    DECODE_PAIR,
    DECODE_POSITION,
    DecodeItems,
)
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.mosaic_gpu import (
    BOX_ROWS,
    SHARED_MEMORY_BYTES,
    WARPGROUP_ROWS,
    launch,
    swizzle_of,
    swizzled,
    tiles,
)

COMPUTING = 2  # warpgroups that share the rows' results; the one after them loads
LOADER_REGISTERS, COMPUTE_REGISTERS = 40, 232  # an SM has 512 per lane of its warpgroups
REDUCTION_BYTES = 1024  # shared memory for maxima and sums across warps
STATISTICS_BYTES = 2 * COMPUTING * WARPGROUP_ROWS * 4
BARRIER_BYTES = 256


@dataclass(frozen=True)
class LatentShape:
    """Compile-time parameters of the latent attention kernel, and the buffer sizes that follow from them.

    Attributes:
      spec: this device's heads; its kv heads are tiles of at most 64 query heads.
      head_tiles: tiles that share a kv head of the pool.
      page_size: tokens of a page.
      tokens: most new tokens of a row.
      dtype: dtype of queries and pool.
      max_stages: most blocks in shared memory.
      parts: 1: a block of the pool is keys alone.
    """

    spec: AttentionSpec
    head_tiles: int
    page_size: int
    tokens: int
    dtype: Any
    max_stages: int

    parts = 1

    @property
    def rows(self) -> int:
        """Number M of query rows of a (row, tile of query heads) pair in global memory, and of its maxima and sums:
        `tokens` times the query heads of a tile, rounded up to a multiple of 8.
        """
        return -(-self.tokens * self.spec.group_size // 8) * 8

    @property
    def rest(self) -> int:
        """Number of columns of a key after those that are its value. The queries' elements for them are a separate
        operand.
        """
        return self.spec.head_dim - self.spec.v_head_dim

    @property
    def boxes(self) -> int:
        """Number of TMA boxes that load the keys of a block: one per page, or one if a page holds the block."""
        return max(DECODE_KEYS // self.page_size, 1)

    @property
    def columns(self) -> int:
        """Number of value columns that one of the two computing warpgroups sums."""
        return self.spec.v_head_dim // COMPUTING

    def stages(self) -> tuple[int, int]:
        """Return (blocks, query tiles) that shared memory holds at a time: as many blocks as fit, at most max_stages,
        and one query tile.
        """
        width = jnp.dtype(self.dtype).itemsize
        fixed = REDUCTION_BYTES + STATISTICS_BYTES + BARRIER_BYTES + WARPGROUP_ROWS * DECODE_KEYS * width
        query, block = (rows * self.spec.head_dim * width for rows in (WARPGROUP_ROWS, DECODE_KEYS))
        return min((SHARED_MEMORY_BYTES - fixed - query) // block, self.max_stages), 1


def why_not_latent(spec: AttentionSpec) -> str | None:
    """Return the reason why the kernel does not support the key and value widths of `spec`, or None if it does.

    It supports keys of at most 576 elements and values of at most 512, if the key is wider than the value and a
    multiple of 32, and half of a value is a whole number of swizzled tiles of a key.
    """
    dims = f"values of {spec.v_head_dim} in keys of {spec.head_dim}"
    if spec.head_dim > 576 or spec.v_head_dim > 512:
        return f"{dims}: more than 512 in 576"
    if spec.head_dim == spec.v_head_dim:
        return f"{dims}: no rest of a key"
    if spec.head_dim % 32 or spec.v_head_dim % (COMPUTING * swizzle_of(spec.head_dim, jnp.dtype("bfloat16")) // 2):
        return f"{dims}: half of the values is not a whole number of swizzled tiles of a key"
    return None


class _Refs(NamedTuple):
    """References that the latent attention kernel gets, in launch order: operands and results in global memory, then
    shared memory and barriers.

    Attributes:
      q: [R * K * M, Hv].
      q_rest: [R * K * M, H - Hv].
      pool: rows [P * K * page, H].
      page_table: i32 [S, W].
      scale: f32 [K].
      cta_items, items, item_parts: i32 [C + 1], [I, ITEM_FIELDS] and [I], see DecodeItems.
      o: [R * K, M, Hv].
      lse: f32 [R * K, M].
      part_o, part_lse: [2 * C, M, Hv] and f32 [2 * C, M], results of parts of cut pairs.
      q_smem: [queries, 64, Hv], then the results of the rows.
      q_rest_smem: [queries, 64, H - Hv].
      kv_smem: [blocks, block, H].
      weight_smem: [64, block].
      statistics_smem: f32 [4 * 64] maxima of the rows over each warpgroup's keys, then their sums.
      kv_full: barrier per block: its copies have arrived.
      kv_free: barrier per block: both warpgroups have read it.
      q_full, q_free: barriers per tile of queries, as kv_full and kv_free.
      values_ready, maxima_ready, weights_ready, totals_ready: barriers at which the computing warpgroups meet once both
        have written zeros of unseen values, row maxima, weights and row sums to shared memory.
    """

    q: Any
    q_rest: Any
    pool: Any
    page_table: Any
    scale: Any
    cta_items: Any
    items: Any
    item_parts: Any
    o: Any
    lse: Any
    part_o: Any
    part_lse: Any
    q_smem: Any
    q_rest_smem: Any
    kv_smem: Any
    weight_smem: Any
    statistics_smem: Any
    kv_full: Any
    kv_free: Any
    q_full: Any
    q_free: Any
    values_ready: Any
    maxima_ready: Any
    weights_ready: Any
    totals_ready: Any


def latent_attention(
    q: jax.Array,
    q_rest: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    scale: jax.Array,
    items: DecodeItems,
    shape: LatentShape,
    interpret: Any = False,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Compute the softmax attention of every (row, kv head) pair that is one item, and of each part of a pair that is
    cut into several: ((o, lse), (part_o, part_lse)).

    o is [R * K, M, Hv] and part_o [2 * C, M, Hv], means of values in q's dtype; lse is f32 [R * K, M] and part_lse f32
    [2 * C, M], log-sum-exps in base 2. Rows of o for cut or empty pairs, and of part_o past the last part, are
    undefined.

    q: [R * K * M, Hv] with M = shape.rows and K = shape.spec.num_kv_heads. q_rest: [R * K * M, H - Hv]. pool: rows [P *
    (K / head_tiles) * page, H]. page_table: i32 [S, W]. scale: f32 [K], factor of the product of query and key, log2(e)
    not included. interpret: see `mosaic_gpu.launch`.
    """
    rows, spec, cuts = shape.rows, shape.spec, items.cuts
    blocks, queries = shape.stages()
    swizzle = swizzle_of(spec.head_dim, shape.dtype)  # common to both operands of a product
    o, lse, part_o, part_lse = launch(
        lambda *refs: _body(shape, _Refs(*refs)),
        *(q, q_rest, pool, page_table, scale, items.cta_items, items.items, cuts.item_parts),
        name="paged_attention_latent",
        outputs=[
            jax.ShapeDtypeStruct((count, rows, *columns), dtype)
            for count in (items.pair_items.shape[0] - 1, 2 * cuts.pairs.shape[0])
            for columns, dtype in (((spec.v_head_dim,), shape.dtype), ((), jnp.float32))
        ],
        scratch=[
            swizzled((queries, WARPGROUP_ROWS, spec.v_head_dim), shape.dtype, swizzle),
            swizzled((queries, WARPGROUP_ROWS, shape.rest), shape.dtype, swizzle),
            tiles((blocks, DECODE_KEYS, spec.head_dim), shape.dtype),
            plgpu.SMEM((WARPGROUP_ROWS, DECODE_KEYS), shape.dtype),
            plgpu.SMEM((2 * COMPUTING * WARPGROUP_ROWS,), jnp.float32),
            plgpu.Barrier(num_barriers=blocks, num_arrivals=shape.boxes),
            plgpu.Barrier(num_barriers=blocks, num_arrivals=COMPUTING),
            plgpu.Barrier(num_barriers=queries, num_arrivals=2),
            plgpu.Barrier(num_barriers=queries, num_arrivals=COMPUTING),
            *[plgpu.Barrier(num_arrivals=COMPUTING)] * 4,
        ],
        num_ctas=items.cta_items.shape[0] - 1,
        num_warpgroups=COMPUTING + 1,
        interpret=interpret,
        reduction_scratch_bytes=REDUCTION_BYTES,
    )
    return (o, lse), (part_o, part_lse)


def _body(shape: LatentShape, refs: _Refs) -> None:
    """Run the program of one warpgroup of a CTA: warpgroup 2 loads the CTA's items and gives up registers; warpgroups 0
    and 1, which take them, compute the items together.
    """
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    first, end = refs.cta_items[cta], refs.cta_items[cta + 1]

    @pl.when(warpgroup == COMPUTING)
    def _():
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        load(shape, refs, first, end)

    for own in range(COMPUTING):  # a warpgroup's columns must be static

        @pl.when(warpgroup == own)
        def _(own=own):
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _attend(shape, refs, own, first, end)


def _attend(shape: LatentShape, refs: _Refs, own: int, first, end) -> None:
    """Compute and store warpgroup `own`'s share of the online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) of
    items [first, end).

    own: 0 or 1; its share is half of the keys of each block for the scores, and half of the columns of the results.
    Waits for each item's queries and blocks and for the other warpgroup, and frees the buffers.
    """
    blocks, queries = shape.stages()
    half = DECODE_KEYS // COMPUTING
    columns = pl.ds(own * shape.columns, shape.columns)

    def attend_item(item, step):
        q_slot = lax.rem(item - first, jnp.int32(queries))
        scale = refs.scale[refs.items[item, DECODE_HEAD]]
        begin, stop = refs.items[item, DECODE_BEGIN], refs.items[item, DECODE_END]
        position = refs.items[item, DECODE_POSITION]
        plgpu.barrier_wait(refs.q_full.at[q_slot])

        def attend_block(block, carry):
            step, acc, largest, total = carry
            slot = lax.rem(step, jnp.int32(blocks))
            plgpu.barrier_wait(refs.kv_full.at[slot])
            start = block * DECODE_KEYS
            # The slot of the queries is made to depend on the block (the term added is 0): its descriptors for 36
            # instructions would otherwise be kept in 72 registers from block to block, and others spilled for them.
            query_slot = q_slot + lax.div(block, jnp.int32(1 << 30))
            _zero_unseen(shape, refs, own, slot, begin - start, stop - start)

            def multiply(accumulator):
                width = 0
                for queries in (refs.q_smem.at[query_slot], refs.q_rest_smem.at[query_slot]):
                    keys = refs.kv_smem.at[slot, pl.ds(own * half, half), pl.ds(width, queries.shape[1])]
                    plgpu.wgmma(accumulator, queries, keys.transpose((1, 0)))
                    width += queries.shape[1]
                return accumulator[...]

            products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, half), jnp.float32))
            bounds = (edge - (start + own * half) for edge in (begin, stop, position))
            logits = masked_logits(shape.spec, shape.tokens, products, scale, *bounds)
            new_largest = jnp.maximum(largest, _exchange_maxima(refs, own, logits.max(axis=1)))
            decay = jnp.exp2(largest - new_largest)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(new_largest, logits.shape, [0]))
            total = total * decay + weights.sum(axis=1)
            refs.weight_smem[:, pl.ds(own * half, half)] = weights.astype(shape.dtype)
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            _meet(refs.weights_ready)
            weights = refs.weight_smem[...]
            values = refs.kv_smem.at[slot, :, columns]
            acc = pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, weights, values))(
                plgpu.WGMMAAccumulatorRef.init(acc)
            )
            plgpu.barrier_arrive(refs.kv_free.at[slot])
            return step + 1, acc, new_largest, total

        nothing = (
            jnp.zeros((WARPGROUP_ROWS, shape.columns), jnp.float32),
            jnp.full((WARPGROUP_ROWS,), NOTHING, jnp.float32),
            jnp.zeros((WARPGROUP_ROWS,), jnp.float32),
        )
        step, acc, largest, total = lax.fori_loop(
            refs.items[item, DECODE_FIRST_BLOCK], refs.items[item, DECODE_END_BLOCK], attend_block, (step, *nothing)
        )
        _store(shape, refs, own, item, q_slot, acc, largest, total)
        plgpu.barrier_arrive(refs.q_free.at[q_slot])
        return step

    lax.fori_loop(first, end, attend_item, jnp.int32(0))


def _meet(barrier) -> None:
    """Make this warpgroup's writes to shared memory visible, and wait at `barrier` until the other computing warpgroup
    has done so, too.
    """
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _exchange_maxima(refs: _Refs, own: int, maxima):
    """Return the row maxima f32 [64] over the keys of both computing warpgroups. Waits for the other warpgroup.

    own: 0 or 1, this warpgroup. maxima: f32 [64] over its own keys. The values go through refs.statistics_smem, whose
    last reads came before the warpgroups met over the weights of the previous block.
    """
    refs.statistics_smem[pl.ds(own * WARPGROUP_ROWS, WARPGROUP_ROWS)] = maxima
    _meet(refs.maxima_ready)
    return jnp.maximum(maxima, refs.statistics_smem[pl.ds((1 - own) * WARPGROUP_ROWS, WARPGROUP_ROWS)])


def _zero_unseen(shape: LatentShape, refs: _Refs, own: int, slot, begin, end) -> None:
    """Overwrite with 0 the values in buffer `slot` of shared memory outside of keys [begin, end) of the block, in the
    columns of warpgroup `own`.

    Those slots may hold NaN, and 0 * NaN is not 0. If the block has any, waits until the other warpgroup has done so
    too.
    """
    unseen = end < DECODE_KEYS
    if shape.spec.window is not None:
        unseen = unseen | (begin > 0)

    @pl.when(unseen)
    def _():
        width = swizzle_of(shape.spec.head_dim, shape.dtype) // jnp.dtype(shape.dtype).itemsize
        row = lax.broadcasted_iota(jnp.int32, (DECODE_KEYS, width), 0)
        seen = row < end
        if shape.spec.window is not None:
            seen = seen & (row >= begin)
        # In parts: the results leave too few registers for all columns at once.
        for column in range(own * shape.columns, (own + 1) * shape.columns, width):
            values = refs.kv_smem.at[slot, :, pl.ds(column, width)]
            values[...] = jnp.where(seen, values[...], jnp.zeros((DECODE_KEYS, width), shape.dtype))
        _meet(refs.values_ready)  # the other warpgroup's scores read these columns


def _store(shape: LatentShape, refs: _Refs, own: int, item, q_slot, acc, largest, total) -> None:
    """Normalise this warpgroup's columns of an item's result and store them to the rows of the item's pair, or of its
    part if the pair is cut.

    acc: f32 [64, columns]. total: f32 [64], sums of this warpgroup's weights. largest: f32 [64], maxima over both
    warpgroups' keys. Warpgroup 0 also stores the log-sum-exp in base 2. Results go through the buffer of the queries,
    `q_slot`, which neither warpgroup reads any more since they met over the last block. Waits for the other warpgroup's
    sums, and until this one's copies are complete. A row that saw no key gets result 0 and log-sum-exp -inf.
    """
    of = [pl.ds((COMPUTING + warpgroup) * WARPGROUP_ROWS, WARPGROUP_ROWS) for warpgroup in (own, 1 - own)]
    refs.statistics_smem[of[0]] = total
    _meet(refs.totals_ready)
    total = total + refs.statistics_smem[of[1]]
    divisor = jnp.where(total > 0, total, 1.0)
    columns = pl.ds(own * shape.columns, shape.columns)
    results = refs.q_smem.at[q_slot, :, columns]
    results[...] = (acc / lax.broadcast_in_dim(divisor, acc.shape, [0])).astype(shape.dtype)
    if own == 0:
        refs.statistics_smem[pl.ds(0, WARPGROUP_ROWS)] = largest + jnp.log2(total)
    plgpu.commit_smem()

    def send(o, lse, index) -> None:
        if own == 0:
            plgpu.copy_smem_to_gmem(refs.statistics_smem.at[pl.ds(0, shape.rows)], lse.at[index])
        for row in range(0, shape.rows, BOX_ROWS):  # a slice of the columns is contiguous for that many rows only
            rows = pl.ds(row, BOX_ROWS)
            plgpu.copy_smem_to_gmem(refs.q_smem.at[q_slot, rows, columns], o.at[index, rows, columns])

    part = refs.item_parts[item]
    pl.when(part < 0)(lambda: send(refs.o, refs.lse, refs.items[item, DECODE_PAIR]))
    pl.when(part >= 0)(lambda: send(refs.part_o, refs.part_lse, part))
    plgpu.wait_smem_to_gmem(0)

"""Decode on a Hopper GPU: split-KV attention of rows with few new tokens, in Mosaic GPU.

Contains the kernel that computes a partial softmax for each of `DecodeItems`; merge.py combines them into results. The
structure is that of FlashDecoding (Dao et al. 2023) and FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608): CTAs are
persistent; one warpgroup keeps a ring of key and value blocks filled by TMA, across the borders of items, and one
computes. The first of the 64 rows of a wgmma are the new tokens of a row times the query heads of a kv head. The rows
after them hold stale data, which affects no other row. Global memory holds M rows, the number in use rounded up to a
multiple of 8. I, C, R and Q are the numbers of items, CTAs, rows and tokens of a row of `DecodeItems`.

The pool [P, K, page * 2 * H] is viewed as rows [P * K * 2 * page, H]: for each (page, kv head) page_size rows of keys,
then as many of values, because a tiled TMA box has at most five dimensions. A block smaller than a page is a part of
it; a larger one takes one box per page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.hopper.schedule import (
    DECODE_BEGIN,
    DECODE_END,
    DECODE_END_BLOCK,
    DECODE_FIRST_BLOCK,
    DECODE_HEAD,
    DECODE_KEYS,
    DECODE_PAIR,
    DECODE_POSITION,
    DECODE_SEQ,
    DecodeItems,
)
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.mosaic_gpu import LOG2E, SHARED_MEMORY_BYTES, WARPGROUP_ROWS, launch, tiles

NOTHING = -1e30  # running maximum of a row that has seen no key: finite, so that -inf - NOTHING = -inf
OUTPUT_COLUMNS = 128  # columns of the accumulator that are staged in shared memory at a time
RESERVED_BYTES = 4 * 1024  # shared memory for barriers, cross-warp reductions, row statistics


@dataclass(frozen=True)
class DecodeShape:
    """Compile-time parameters of the decode kernel, and the buffer sizes that follow from them.

    Attributes:
      spec: this device's heads.
      page_size: tokens of a page.
      tokens: most new tokens of a row.
      dtype: dtype of queries and of wgmma's operands.
      kv_dtype: dtype of the pool.
      max_stages: most blocks in shared memory.
      tensor_memory: whether products are tcgen05's, with sums in tensor memory, as on Blackwell.
      parts: 2: a block of the pool is keys and values.
      head_tiles: tiles of query heads that share a kv head.
      rest: columns of queries that are a separate operand.
    """

    spec: AttentionSpec
    page_size: int
    tokens: int
    dtype: Any
    kv_dtype: Any
    max_stages: int
    tensor_memory: bool = False

    parts = 2
    head_tiles = 1
    rest = 0

    @property
    def rows(self) -> int:
        """Number M of query rows of a (row, kv head) pair in global memory, and of its maxima and sums: `tokens` times
        the query heads of a kv head, rounded up to a multiple of 8.
        """
        return -(-self.tokens * self.spec.group_size // 8) * 8

    @property
    def product_rows(self) -> int:
        """Number of query rows of one matrix product: 128 with tensor memory, else 64."""
        return 2 * WARPGROUP_ROWS if self.tensor_memory else WARPGROUP_ROWS

    @property
    def boxes(self) -> int:
        """Number of TMA boxes that load the keys of a block; its values take as many."""
        return max(DECODE_KEYS // self.page_size, 1)

    @property
    def converts(self) -> bool:
        """Whether keys and values have to be widened in shared memory before they are multiplied, because the pool's
        dtype is another than the queries'.
        """
        return self.kv_dtype != self.dtype

    @property
    def output_columns(self) -> int:
        """Number of accumulator columns that are staged in shared memory at a time: 16 with tensor memory, else 128 if
        that divides the head dim, else the whole head dim.
        """
        head_dim = self.spec.head_dim
        if self.tensor_memory:
            return 16
        return OUTPUT_COLUMNS if head_dim % OUTPUT_COLUMNS == 0 else head_dim

    def stages(self) -> tuple[int, int]:
        """Return (blocks, query tiles) that shared memory holds at a time: two query tiles if two or more blocks still
        fit next to them, else one; as many blocks as fit, at most max_stages.

        Raises ValueError if two blocks do not fit next to one query tile.
        """
        head_dim, width = self.spec.head_dim, jnp.dtype(self.dtype).itemsize
        rows, banks = self.product_rows, 2 if self.tensor_memory else 1
        query = rows * head_dim * width
        fixed = RESERVED_BYTES + rows * self.output_columns * 4
        fixed += banks * 2 * DECODE_KEYS * head_dim * width if self.converts else 0
        fixed += rows * DECODE_KEYS * width if self.tensor_memory else 0
        per_block = 2 * DECODE_KEYS * head_dim * jnp.dtype(self.kv_dtype).itemsize
        for queries in (2, 1):
            if (blocks := (SHARED_MEMORY_BYTES - fixed - queries * query) // per_block) >= 2:
                return min(blocks, self.max_stages), queries
        raise ValueError(
            f"head_dim {head_dim} with page_size {self.page_size} overflows shared memory on platform 'gpu'"
        )


class Refs(NamedTuple):
    """References that the decode kernel gets, in launch order: operands and results in global memory, then shared
    memory, barriers and, on Blackwell, tensor memory. None for what the shape does not need.

    Attributes:
      q: [R * K * M, H].
      pool: rows [P * K * 2 * page, H].
      page_table: i32 [S, W].
      scale: f32 [K].
      cta_items, items: i32 [C + 1] and i32 [I, ITEM_FIELDS], see DecodeItems.
      o: f32 [I, M, H].
      largest, total: f32 [I, M].
      q_smem: [queries, product_rows, H].
      kv_smem: [blocks, 2 * block, H] keys, then values.
      o_smem: f32 [product_rows, output_columns].
      largest_smem, total_smem: f32 [product_rows].
      kv_full: barrier per block: its copies have arrived.
      kv_free: barrier per block: it has been read.
      q_full, q_free: barriers per tile of queries, as kv_full and kv_free.
      wide_smem: [banks * 2 * block, H] blocks in the dtype of the queries; None unless shape.converts.
      weight_smem: [product_rows, block] weights; this and what follows on Blackwell only.
      sums_tmem: f32 [product_rows, block] products of queries and keys.
      o_tmem: f32 [product_rows, H] weighted sums of values.
      scored: barrier: the products of queries and keys are complete.
      added: barrier: the products of weights and values are complete.
    """

    q: Any
    pool: Any
    page_table: Any
    scale: Any
    cta_items: Any
    items: Any
    o: Any
    largest: Any
    total: Any
    q_smem: Any
    kv_smem: Any
    o_smem: Any
    largest_smem: Any
    total_smem: Any
    kv_full: Any
    kv_free: Any
    q_full: Any
    q_free: Any
    wide_smem: Any
    weight_smem: Any = None
    sums_tmem: Any = None
    o_tmem: Any = None
    scored: Any = None
    added: Any = None


NUM_OPERANDS = Refs._fields.index("q_smem")  # operands and results


def decode_partials(
    q: jax.Array,
    pool: jax.Array,
    page_table: jax.Array,
    scale: jax.Array,
    items: DecodeItems,
    shape: DecodeShape,
    interpret: Any = False,
    attend: Callable[..., None] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the partial softmax of every item: weighted sums of values f32 [I, M, H], then maxima in base 2 and
    denominators, both f32 [I, M]. Entries past the last item are undefined.

    q: [R * K * M, H] with M = shape.rows. pool: rows [P * K * 2 * page, H] of shape.kv_dtype. page_table: i32 [S, W].
    scale: f32 [K], factor of the product of query and key code, log2(e) not included; value codes are summed unscaled.
    attend: function (shape, refs, first, end) that the computing warpgroup runs over items [first, end); None for
    `_attend`, which uses wgmma. Blackwell passes one that uses tensor memory. interpret: see `mosaic_gpu.launch`.
    Raises ValueError if two blocks do not fit into shared memory.
    """
    num_items, rows = items.items.shape[0], shape.rows
    memory = _scratch(shape)

    def body(*given: Any) -> None:
        allocated = iter(given[NUM_OPERANDS:])
        refs = Refs(*given[:NUM_OPERANDS], *(each and next(allocated) for each in memory))
        _body(shape, refs, attend or _attend)

    o, largest, total = launch(
        body,
        *(q, pool, page_table, scale, items.cta_items, items.items),
        name="paged_attention_decode",
        outputs=[
            jax.ShapeDtypeStruct((num_items, rows, shape.spec.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, rows), jnp.float32),
            jax.ShapeDtypeStruct((num_items, rows), jnp.float32),
        ],
        scratch=[each for each in memory if each is not None],
        num_ctas=items.cta_items.shape[0] - 1,
        num_warpgroups=2,
        interpret=interpret,
    )
    return o, largest, total


def _scratch(shape: DecodeShape) -> list[Any]:
    """Return the specs of the shared memory, barriers and tensor memory in `Refs`, in the order of its fields, with
    None for a buffer that `shape` does not need. Raises ValueError if two blocks do not fit into shared memory.
    """
    blocks, queries = shape.stages()
    head_dim, rows = shape.spec.head_dim, shape.product_rows
    buffers = [
        tiles((queries, rows, head_dim), shape.dtype),
        tiles((blocks, 2 * DECODE_KEYS, head_dim), shape.kv_dtype),
        tiles((rows, shape.output_columns), jnp.float32),
        plgpu.SMEM((rows,), jnp.float32),
        plgpu.SMEM((rows,), jnp.float32),
        plgpu.Barrier(num_barriers=blocks, num_arrivals=2 * shape.boxes),
        plgpu.Barrier(num_barriers=blocks, orders_tensor_core=shape.tensor_memory and not shape.converts),
        plgpu.Barrier(num_barriers=queries),
        plgpu.Barrier(num_barriers=queries),
    ]
    banks = 2 if shape.tensor_memory else 1
    buffers.append(tiles((banks * 2 * DECODE_KEYS, head_dim), shape.dtype) if shape.converts else None)
    if not shape.tensor_memory:
        return buffers
    sums = [plgpu.TMEM((rows, columns), jnp.float32) for columns in (DECODE_KEYS, head_dim)]
    complete = plgpu.Barrier(orders_tensor_core=True)
    return [*buffers, tiles((rows, DECODE_KEYS), shape.dtype), *sums, complete, complete]


def _body(shape: DecodeShape, refs: Refs, attend: Callable[..., None]) -> None:
    """Run the program of one warpgroup of a CTA: warpgroup 1 loads the CTA's items [first, end) into shared memory,
    warpgroup 0 computes them by calling attend(shape, refs, first, end).
    """
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    first, end = refs.cta_items[cta], refs.cta_items[cta + 1]

    @pl.when(warpgroup == 1)
    def _():
        load(shape, refs, first, end)

    @pl.when(warpgroup == 0)
    def _():
        attend(shape, refs, first, end)


def load(shape: Any, refs: Any, first, end) -> None:
    """Load the queries and the key-value blocks of items [first, end) into shared memory by TMA, as far ahead as
    buffers are free. Returns once the computing warpgroups have read all of them.

    shape, refs: DecodeShape and Refs of this kernel, or LatentShape and _Refs of latent.py, whose buffers and barriers
    have the same names.
    """
    (blocks, queries), rows = shape.stages(), shape.rows
    num_heads, page_size, parts = shape.spec.num_kv_heads // shape.head_tiles, shape.page_size, shape.parts

    def load_item(item, step):
        seq, head = refs.items[item, DECODE_SEQ], refs.items[item, DECODE_HEAD]
        if shape.head_tiles > 1:
            head = lax.div(head, jnp.int32(shape.head_tiles))
        slot = lax.rem(item - first, jnp.int32(queries))

        @pl.when(item - first >= queries)
        def _():
            plgpu.barrier_wait(refs.q_free.at[slot])

        query_rows = pl.ds(refs.items[item, DECODE_PAIR] * rows, rows)
        operands = [(refs.q, refs.q_smem), *([(refs.q_rest, refs.q_rest_smem)] if shape.rest else [])]
        for source, target in operands:
            plgpu.copy_gmem_to_smem(source.at[query_rows], target.at[slot, pl.ds(0, rows)], refs.q_full.at[slot])
        low = lax.div(refs.items[item, DECODE_BEGIN], jnp.int32(page_size))
        high = lax.div(refs.items[item, DECODE_END] - 1, jnp.int32(page_size))

        def load_block(block, step):
            slot = lax.rem(step, jnp.int32(blocks))
            sources = _box_rows(shape, refs.page_table, seq, block, low, high)

            @pl.when(step >= blocks)
            def _():
                plgpu.barrier_wait(refs.kv_free.at[slot])

            size = min(page_size, DECODE_KEYS)
            for index, (page, offset) in enumerate(sources):
                for part in range(parts):
                    source = pl.ds(((page * num_heads + head) * parts + part) * page_size + offset, size)
                    target = refs.kv_smem.at[slot, pl.ds(part * DECODE_KEYS + index * size, size)]
                    plgpu.copy_gmem_to_smem(refs.pool.at[source], target, refs.kv_full.at[slot])
            return step + 1

        return lax.fori_loop(refs.items[item, DECODE_FIRST_BLOCK], refs.items[item, DECODE_END_BLOCK], load_block, step)

    total = lax.fori_loop(first, end, load_item, jnp.int32(0))
    # Every arrival must be observed before the CTA ends.
    for barriers, count, most in ((refs.kv_free, total, blocks), (refs.q_free, end - first, queries)):
        for slot in range(most):

            @pl.when(slot < count)
            def _(barriers=barriers, slot=slot):
                plgpu.barrier_wait(barriers.at[slot])


def _box_rows(shape: Any, page_table, seq, block, low, high) -> list[tuple[Any, Any]]:
    """Return a list of (page, first slot in the page), one for each TMA box of the block-th DECODE_KEYS keys of
    sequence `seq`.

    low, high: first and last page-table column of the item, both inclusive. A box outside of them gets the page of the
    nearest of the two, because other columns may hold garbage.
    """
    if shape.page_size >= DECODE_KEYS:
        parts = shape.page_size // DECODE_KEYS
        column = lax.div(block, jnp.int32(parts))
        return [(page_table[seq, column], lax.rem(block, jnp.int32(parts)) * DECODE_KEYS)]
    columns = [jnp.clip(block * shape.boxes + index, low, high) for index in range(shape.boxes)]
    return [(page_table[seq, column], 0) for column in columns]


def _attend(shape: DecodeShape, refs: Refs, first, end) -> None:
    """Compute the online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867) of items [first, end) of a CTA, each
    over its blocks, with wgmma, and store the partial results (`store`).

    Waits for each item's queries and blocks, frees their buffers, and returns once the stores are complete.
    """
    blocks, queries = shape.stages()
    head_dim = shape.spec.head_dim

    def attend_item(item, step):
        q_slot = lax.rem(item - first, jnp.int32(queries))
        q, scale = refs.q_smem.at[q_slot], refs.scale[refs.items[item, DECODE_HEAD]]
        begin, stop = refs.items[item, DECODE_BEGIN], refs.items[item, DECODE_END]
        position = refs.items[item, DECODE_POSITION]
        plgpu.barrier_wait(refs.q_full.at[q_slot])

        def attend_block(block, carry):
            step, acc, largest, total = carry
            slot = lax.rem(step, jnp.int32(blocks))
            plgpu.barrier_wait(refs.kv_full.at[slot])
            start = block * DECODE_KEYS
            keys, values = operands(shape, refs, slot, 0, begin - start, stop - start)

            def multiply(accumulator):
                plgpu.wgmma(accumulator, q, keys.transpose((1, 0)))
                return accumulator[...]

            products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, DECODE_KEYS), jnp.float32))
            logits = masked_logits(
                shape.spec, shape.tokens, products, scale, begin - start, stop - start, position - start
            )
            new_largest = jnp.maximum(largest, logits.max(axis=1))
            decay = jnp.exp2(largest - new_largest)
            weights = jnp.exp2(logits - lax.broadcast_in_dim(new_largest, logits.shape, [0]))
            total = total * decay + weights.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
            weights = weights.astype(shape.dtype)
            acc = pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, weights, values))(
                plgpu.WGMMAAccumulatorRef.init(acc)
            )
            if not shape.converts:
                plgpu.barrier_arrive(refs.kv_free.at[slot])
            return step + 1, acc, new_largest, total

        nothing = (
            jnp.zeros((WARPGROUP_ROWS, head_dim), jnp.float32),
            jnp.full((WARPGROUP_ROWS,), NOTHING, jnp.float32),
            jnp.zeros((WARPGROUP_ROWS,), jnp.float32),
        )
        step, *softmax = lax.fori_loop(
            refs.items[item, DECODE_FIRST_BLOCK], refs.items[item, DECODE_END_BLOCK], attend_block, (step, *nothing)
        )
        plgpu.barrier_arrive(refs.q_free.at[q_slot])
        acc, largest, total = softmax
        store(shape, refs, item, lambda first, end: acc[:, first:end], largest, total)
        return step

    lax.fori_loop(first, end, attend_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def operands(shape: DecodeShape, refs: Refs, slot, bank, begin, end):
    """Return the keys and the values of the block in buffer `slot` of shared memory, as refs [DECODE_KEYS, H] for
    products.

    Values outside keys [begin, end) of the block are overwritten with 0, because they may be NaN and 0 * NaN is not 0;
    keys stay as they are. If shape.converts, keys and values are first widened to the queries' dtype into bank `bank`
    of refs.wide_smem, and the barrier that frees `slot` is signalled; else the caller must signal it.
    """
    block, width = DECODE_KEYS, shape.spec.head_dim
    stored = refs.kv_smem.at[slot, pl.ds(0, block)], refs.kv_smem.at[slot, pl.ds(block, block)]
    row = lax.broadcasted_iota(jnp.int32, (block, width), 0)
    unseen = end < block
    if shape.spec.window is not None:
        unseen = unseen | (begin > 0)

    def seen_only(values):
        seen = row < end
        if shape.spec.window is not None:
            seen = seen & (row >= begin)
        return jnp.where(seen, values, jnp.zeros((block, width), values.dtype))

    keys, values = stored
    if shape.converts:
        keys, values = (refs.wide_smem.at[pl.ds(bank * 2 * block + part * block, block)] for part in range(2))
        for source, target in zip(stored, (keys, values), strict=True):
            target[...] = _widen(source[...], shape.dtype)

    @pl.when(unseen)
    def _():
        values[...] = seen_only(values[...])
        plgpu.commit_smem()

    if shape.converts:
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.kv_free.at[slot])
    return keys, values


def _widen(codes, dtype):
    """Convert one-byte codes to `dtype`. Float codes go through float16, which holds all their values: the card
    converts them to no other type directly.
    """
    return codes.astype(dtype) if codes.dtype == jnp.int8 else codes.astype(jnp.float16).astype(dtype)


def masked_logits(spec: AttentionSpec, tokens: int, products, scale, begin, end, position):
    """Return the logits in base 2, f32 [rows, keys], of a block's query-key products of that shape; -inf where a query
    does not see a key.

    tokens: most new tokens of a row of the schedule; the queries of a row are ordered (token, head). scale: factor of
    the products, applied before a soft cap. begin, end: first and one past the last key of the row; position: that of
    its first token. All three are counted from the block's first key.
    """
    if (cap := spec.soft_cap) is None:
        logits = products * (scale * LOG2E)
    else:  # tanh(x) = 1 - 2 / (1 + e^2x): the card's own tanh is accurate to 11 bits only
        exponential = jnp.exp2(products * (scale * (2 * LOG2E / cap)))
        logits = (cap * LOG2E) - (2 * cap * LOG2E) / (1.0 + exponential)
    key = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    seen = key < end
    if tokens == 1 or not spec.causal:
        if spec.window is not None:
            seen = seen & (key >= begin)
    else:
        row = lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        last = position + lax.div(row, jnp.full_like(row, spec.group_size))
        seen = seen & (key <= last)
        if spec.window is not None:
            seen = seen & (key > last - spec.window)
    return jnp.where(seen, logits, -jnp.inf)


def store(shape: DecodeShape, refs: Refs, item, sums: Callable[[int, int], Any], largest, total) -> None:
    """Start the copies of an item's partial softmax to its rows of refs.o, refs.largest and refs.total in global
    memory. They go through shared memory, and the last ones may still be reading it on return.

    sums(first, end): columns [first, end) of the weighted sums of values, f32 [product_rows, end - first]. largest,
    total: f32 [product_rows]; the first shape.rows rows are stored.
    """
    columns = shape.output_columns
    for first in range(0, shape.spec.head_dim, columns):
        piece = sums(first, first + columns)
        plgpu.wait_smem_to_gmem(0)  # the last store still reads the buffer
        refs.o_smem[...] = piece
        if first == 0:
            refs.largest_smem[...] = largest
            refs.total_smem[...] = total
        plgpu.commit_smem()
        target = refs.o.at[item, :, pl.ds(first, columns)]
        plgpu.copy_smem_to_gmem(refs.o_smem.at[pl.ds(0, shape.rows)], target)
    plgpu.copy_smem_to_gmem(refs.largest_smem.at[pl.ds(0, shape.rows)], refs.largest.at[item])
    plgpu.copy_smem_to_gmem(refs.total_smem.at[pl.ds(0, shape.rows)], refs.total.at[item])

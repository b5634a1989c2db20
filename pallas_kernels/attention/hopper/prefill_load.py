"""Tiles and buffers of the Hopper prefill kernel, and the producer warpgroup that loads their data.

The producer loads TMA boxes of queries, keys and values, one per page (or part of a larger page); keys and values are
separate boxes so that scores can begin before the values arrive. It also widens one-byte pools and writes zeros to
value slots that hold no value. The softmax is in prefill.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxengine.pallas_kernels.attention.hopper.prefill_shape import RAW_STAGES, Shape
from jaxengine.pallas_kernels.attention.hopper.schedule import (
    PREFILL_BEGIN,
    PREFILL_END,
    PREFILL_POSITION,
    PREFILL_ROWS,
    PREFILL_SEQ,
    PREFILL_TOKEN,
)
from jaxengine.pallas_kernels.mosaic_gpu import BOX_ROWS, WARPGROUP_ROWS, swizzle_of, tiles


class Refs(NamedTuple):
    """References that the prefill kernel gets, in launch order: operands and results in global memory, then shared
    memory, barriers and, on Blackwell, tensor memory. None for what the shape does not need.

    Attributes:
      q, o: [T, N, H] and [T, N, output_width].
      pool: rows [P * K * 2 * page, H].
      page_table, cu_q_lens, kv_lens: i32 [S, W], [S + 1] and [S].
      items, num_items: i32 [I, ITEM_FIELDS] and i32 [1], see PrefillItems.
      scales: f32 [2 * K] k_scale, then v_scale.
      sinks: f32 [num_groups, tile_rows] in base 2, one per row of a tile.
      lse: f32 [I, num_groups, tile_rows].
      q_smem: [tile_rows, H].
      k_smem, v_smem: [stages, block, H].
      o_smem: [tile_rows, output_columns], not tiled: a box may then begin at any row.
      lse_smem, sink_smem: f32 [tile_rows].
      q_full, q_free: barriers per compute warpgroup: its queries have arrived; it has read them.
      k_full, k_free: barriers per stage: the keys are there to be read; all warpgroups have read them.
      v_full, v_free: as k_full and k_free, of the values.
      raw_full: barriers of values that still need zeros, and of one-byte blocks that still need widening.
      turn: barrier at which the compute warpgroups take turns at the tensor cores; None on Blackwell.
      raw_smem: [RAW_STAGES, 2 * block, H] one-byte keys, then values; None unless shape.widens.
      weight_smem: [tile_rows, block] weights; this and what follows on Blackwell only.
      sums_tmem: f32 [rows, computing * block] products of queries and keys, of each warpgroup.
      o_tmem: f32 [rows, computing * H] weighted sums of values, of each warpgroup.
      scored, added: barriers per compute warpgroup: its products with keys, and with values, are complete.
    """

    q: Any
    pool: Any
    page_table: Any
    cu_q_lens: Any
    kv_lens: Any
    items: Any
    num_items: Any
    scales: Any
    sinks: Any
    o: Any
    lse: Any
    q_smem: Any
    k_smem: Any
    v_smem: Any
    o_smem: Any
    lse_smem: Any
    sink_smem: Any
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    raw_full: Any
    turn: Any
    raw_smem: Any
    weight_smem: Any = None
    sums_tmem: Any = None
    o_tmem: Any = None
    scored: Any = None
    added: Any = None


NUM_OPERANDS = Refs._fields.index("q_smem")  # operands and results


def scratch(shape: Shape) -> list[Any]:
    """Return the specs of the shared memory, barriers and tensor memory in `Refs`, in the order of its fields, with
    None for a buffer that `shape` does not need. Raises ValueError if two blocks do not fit into shared memory.
    """
    head_dim, block, stages, rows = shape.spec.head_dim, shape.block_kv, shape.stages, shape.tile_rows
    arrivals, of_tensors = 1 if shape.widens else shape.boxes, shape.tensor_memory
    free = plgpu.Barrier(num_arrivals=shape.computing, num_barriers=stages, orders_tensor_core=of_tensors)
    full = plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
    buffers = [
        tiles((rows, head_dim), shape.dtype),
        tiles((stages, block, head_dim), shape.dtype),
        tiles((stages, block, head_dim), shape.dtype),
        plgpu.SMEM((rows, shape.output_columns), shape.dtype),
        plgpu.SMEM((rows,), jnp.float32),
        plgpu.SMEM((rows,), jnp.float32),
        plgpu.Barrier(num_arrivals=shape.parts + shape.has_sinks, num_barriers=shape.computing),
        plgpu.Barrier(num_barriers=shape.computing),
        *(full, free, full, free),
        plgpu.Barrier(num_arrivals=2 * shape.boxes, num_barriers=RAW_STAGES)
        if shape.widens
        else plgpu.Barrier(num_arrivals=shape.boxes),
        None if of_tensors else plgpu.Barrier(num_arrivals=2),
        tiles((RAW_STAGES, 2 * block, head_dim), shape.kv_dtype) if shape.widens else None,
    ]
    if not of_tensors:
        return buffers
    complete = plgpu.Barrier(num_barriers=shape.computing, orders_tensor_core=True)
    sums = [plgpu.TMEM((shape.warpgroup_rows, shape.computing * columns), jnp.float32) for columns in (block, head_dim)]
    return [*buffers, tiles((rows, block), shape.dtype), *sums, complete, complete]


class Tile(NamedTuple):
    """Unit of work of a CTA: a schedule item for one group of `heads` query heads. All fields are i32 [].

    Attributes:
      item: row of `PrefillItems.items`.
      group, kv_head: the group's number, and the KV head that it shares.
      seq: row of the page table.
      token, position, num_rows: first token of the tile, its position, and the number of tokens.
      load_row: first token to load, divided by 8.
      end: one past the last key that any of its tokens sees.
      first_box: first box of the sequence's keys that the tile reads.
      num_blocks: blocks of keys that it reads.
    """

    item: Any
    group: Any
    kv_head: Any
    seq: Any
    token: Any
    num_rows: Any
    load_row: Any
    position: Any
    end: Any
    first_box: Any
    num_blocks: Any

    def begin(self, shape: Shape):
        """Return the index of the first key of the tile's first block."""
        return self.first_box * shape.box


def load_row(shape: Shape, token):
    """Return the first token to load, divided by 8, for a tile that begins at `token`: token // 8, or less if the
    tile's box of block_q tokens would then end past the queries.
    """
    return jnp.minimum(token // BOX_ROWS, (shape.num_tokens - shape.block_q) // BOX_ROWS)


def tile_count(shape: Shape, refs: Refs, cta):
    """Return the number of tiles that CTA `cta` computes, i32 []: its share of the num_items * num_groups tiles, which
    are dealt out to the CTAs in rounds of one each.
    """
    total, num_ctas = refs.num_items[0] * shape.num_groups, shape.num_ctas
    rounds = lax.div(total, jnp.int32(num_ctas))
    return rounds + (_index_in_round(shape, cta, rounds) < total - rounds * num_ctas).astype(jnp.int32)


def _index_in_round(shape: Shape, cta, index):
    """Return which of the num_ctas tiles of round `index` CTA `cta` computes: cta in even rounds, num_ctas - 1 - cta in
    odd ones, so that no CTA always gets the longest tile of a round.
    """
    return jnp.where(lax.rem(index, jnp.int32(2)) == 0, cta, shape.num_ctas - 1 - cta)


def read_tile(shape: Shape, refs: Refs, cta, index) -> Tile:
    """Return the CTA's index-th tile, read from the items in global memory; `index` must be below `tile_count`."""
    work = index * shape.num_ctas + _index_in_round(shape, cta, index)
    item, group = lax.div(work, jnp.int32(shape.num_groups)), lax.rem(work, jnp.int32(shape.num_groups))
    token, end = refs.items[item, PREFILL_TOKEN], refs.items[item, PREFILL_END]
    first_box = lax.div(refs.items[item, PREFILL_BEGIN], jnp.int32(shape.box))
    return Tile(
        item=item,
        group=group,
        kv_head=lax.div(group, jnp.int32(shape.spec.group_size // shape.heads)),
        seq=refs.items[item, PREFILL_SEQ],
        token=token,
        num_rows=refs.items[item, PREFILL_ROWS],
        load_row=load_row(shape, token),
        position=refs.items[item, PREFILL_POSITION],
        end=end,
        first_box=first_box,
        num_blocks=lax.div(end - first_box * shape.box + (shape.block_kv - 1), jnp.int32(shape.block_kv)),
    )


def part_origin(shape: Shape, part):
    """Return (head in the tile, first token in the tile) of the part-th range of `shape.part` rows of a tile."""
    return (part, 0) if shape.block_q == shape.part else (0, part * shape.part)


def produce(shape: Shape, refs: Refs, cta) -> None:
    """Load the queries, keys and values of all tiles of CTA `cta` into shared memory, as far ahead as buffers are free:
    block by block its keys, then its values, and with a tile's first block the queries. Returns once the computing
    warpgroups have read all of them.
    """
    count, stages = tile_count(shape, refs, cta), shape.stages

    def load_tile(index, step):
        tile = read_tile(shape, refs, cta, index)
        if shape.widens:
            _fetch_raw(shape, refs, tile, 0)

        def load_block(block, _carry):
            slot = lax.rem(step + block, jnp.int32(stages))

            def wait_until_free(free):
                @pl.when(step + block >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

            if shape.widens:

                @pl.when(block + 1 < tile.num_blocks)
                def _():
                    _fetch_raw(shape, refs, tile, block + 1)

                plgpu.barrier_wait(refs.raw_full.at[lax.rem(block, jnp.int32(RAW_STAGES))])
            wait_until_free(refs.k_free)
            _load_keys(shape, refs, tile, block, slot)

            # The second warpgroup ends a tile only when the first has begun the next one: its queries come last.
            pl.when(block == 0)(lambda: _load_queries(shape, refs, tile, index, 0))
            wait_until_free(refs.v_free)
            _load_values(shape, refs, tile, block, slot)
            if shape.computing > 1:
                pl.when(block == 0)(lambda: _load_queries(shape, refs, tile, index, 1))
            return 0

        lax.fori_loop(0, tile.num_blocks, load_block, 0)
        return step + tile.num_blocks

    steps = lax.fori_loop(0, count, load_tile, jnp.int32(0))
    # Every arrival must be observed before the CTA ends.
    for slot in range(stages):

        @pl.when(slot < steps)
        def _(slot=slot):
            plgpu.barrier_wait(refs.k_free.at[slot])
            plgpu.barrier_wait(refs.v_free.at[slot])

    @pl.when(count > 0)
    def _():
        for warpgroup in range(shape.computing):
            plgpu.barrier_wait(refs.q_free.at[warpgroup])


def _load_queries(shape: Shape, refs: Refs, tile: Tile, index, warpgroup: int) -> None:
    """Start the copies of a computing warpgroup's queries and sinks of the CTA's index-th tile, to arrive at
    q_full[warpgroup]. Before the copies of any but the first tile, waits until the warpgroup has read the previous
    ones.
    """
    full = refs.q_full.at[warpgroup]
    pl.when(index > 0)(lambda: plgpu.barrier_wait(refs.q_free.at[warpgroup]))
    for part in range(warpgroup * shape.parts, (warpgroup + 1) * shape.parts):
        head, token = part_origin(shape, part)
        rows = pl.ds((tile.load_row + token // BOX_ROWS) * BOX_ROWS, shape.part)
        target = refs.q_smem.at[pl.ds(part * shape.part, shape.part)]
        plgpu.copy_gmem_to_smem(refs.q.at[rows, tile.group * shape.heads + head], target, full)
    if shape.has_sinks:
        rows = pl.ds(warpgroup * shape.warpgroup_rows, shape.warpgroup_rows)
        plgpu.copy_gmem_to_smem(refs.sinks.at[tile.group, rows], refs.sink_smem.at[rows], full)


def _copy_block(shape: Shape, refs: Refs, tile: Tile, block, kind: int, target, barrier) -> None:
    """Start the copies of a block's keys (kind 0) or values (1) to `target`, to arrive at `barrier`.

    Boxes past the tile's last key repeat the box of that key.
    """
    boxes_per_page = jnp.int32(shape.page_size // shape.box)
    last = lax.div(tile.end - 1, jnp.int32(shape.box))

    def copy(index, _carry):
        box = jnp.minimum(tile.first_box + block * shape.boxes + index, last)
        page = refs.page_table[tile.seq, lax.div(box, boxes_per_page)]
        row = ((page * shape.spec.num_kv_heads + tile.kv_head) * 2 + kind) * boxes_per_page
        source = pl.ds((row + lax.rem(box, boxes_per_page)) * shape.box, shape.box)
        plgpu.copy_gmem_to_smem(refs.pool.at[source], target.at[pl.ds(index * shape.box, shape.box)], barrier)
        return 0

    lax.fori_loop(0, shape.boxes, copy, 0)


def _load_keys(shape: Shape, refs: Refs, tile: Tile, block, slot) -> None:
    """Load the keys of the tile's block-th block into stage `slot`, which must be free, to arrive at k_full[slot]. Only
    starts the copies, or, if shape.widens, widens the one-byte keys that have already arrived in raw_smem.
    """
    target = refs.k_smem.at[slot]
    if not shape.widens:
        _copy_block(shape, refs, tile, block, 0, target, refs.k_full.at[slot])
        return
    _widen(shape, _raw(shape, refs, block, 0), target, lambda codes, _row: codes)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.k_full.at[slot])


def _load_values(shape: Shape, refs: Refs, tile: Tile, block, slot) -> None:
    """Load the values of the tile's block-th block into stage `slot`, which must be free, to arrive at v_full[slot]: by
    starting the copies, or, if shape.widens, by widening the one-byte values that have already arrived in raw_smem.

    Slots that no token of the batch sees may hold NaN and are set to zero, because 0 * NaN is not 0. If a block that is
    not widened has such slots, waits for its copies first.
    """
    target, full = refs.v_smem.at[slot], refs.v_full.at[slot]
    key = tile.begin(shape) + block * shape.block_kv
    end = refs.kv_lens[tile.seq] - key
    begin = jnp.int32(0)
    if shape.spec.window is not None:
        num_computed = tile.position - (tile.token - refs.cu_q_lens[tile.seq])
        begin = num_computed + 1 - shape.spec.window - key

    def written(values, row):
        keep = row < end
        if shape.spec.window is not None:
            keep = keep & (row >= begin)
        return jnp.where(keep, values, jnp.zeros(values.shape, values.dtype))

    if shape.widens:
        _widen(shape, _raw(shape, refs, block, 1), target, written)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full)
        return
    has_unwritten = end < shape.block_kv
    if shape.spec.window is not None:
        has_unwritten = has_unwritten | (begin > 0)

    @pl.when(has_unwritten)
    def _():
        _copy_block(shape, refs, tile, block, 1, target, refs.raw_full)
        plgpu.barrier_wait(refs.raw_full)
        for part in _chunks(shape, shape.dtype):
            chunk = target.at[part]
            chunk[...] = written(chunk[...], _row_of(part))
        plgpu.commit_smem()
        for _box in range(shape.boxes):
            plgpu.barrier_arrive(full)

    @pl.when(jnp.logical_not(has_unwritten))
    def _():
        _copy_block(shape, refs, tile, block, 1, target, full)


def _fetch_raw(shape: Shape, refs: Refs, tile: Tile, block) -> None:
    """Start the copies of the keys and values of the tile's block-th block of one-byte codes to its buffer in raw_smem,
    to arrive at that buffer's barrier in raw_full.
    """
    barrier = refs.raw_full.at[lax.rem(block, RAW_STAGES)]
    for kind in range(2):
        _copy_block(shape, refs, tile, block, kind, _raw(shape, refs, block, kind), barrier)


def _raw(shape: Shape, refs: Refs, block, kind: int):
    """Return the buffer in raw_smem for the one-byte keys (kind 0) or values (1) of the block-th block, [block, H].
    Blocks use the RAW_STAGES buffers in turn.
    """
    return refs.raw_smem.at[lax.rem(block, RAW_STAGES), pl.ds(kind * shape.block_kv, shape.block_kv)]


def _widen(shape: Shape, source, target, change) -> None:
    """Write change(codes, row) to `target`, where codes are those of `source`, converted to `shape.dtype`, and row i32
    their rows in the block.

    Handles one piece at a time, because the producer has few registers.
    """
    for part in _chunks(shape, shape.kv_dtype):
        codes = source.at[part][...]
        if codes.dtype != jnp.int8:
            codes = codes.astype(jnp.float16)  # the card converts them to no other type; exact
        target.at[part][...] = change(codes.astype(shape.dtype), _row_of(part))


def _chunks(shape: Shape, dtype) -> list[tuple[Any, Any]]:
    """Return the indices (rows, columns) of the pieces that make up a block [block_kv, H] of `dtype`, row by row. A
    piece is 64 rows by the columns of one swizzle.
    """
    columns = swizzle_of(shape.spec.head_dim, dtype) // jnp.dtype(dtype).itemsize
    return [
        (pl.ds(row, WARPGROUP_ROWS), pl.ds(column, columns))
        for row in range(0, shape.block_kv, WARPGROUP_ROWS)
        for column in range(0, shape.spec.head_dim, columns)
    ]


def _row_of(part):
    """Return the row in the block of each element of `part`, an index that `_chunks` returns: i32 [rows, columns]."""
    rows, columns = part
    return lax.broadcasted_iota(jnp.int32, (rows.size, columns.size), 0) + rows.start

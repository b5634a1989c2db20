"""Pages for the TPU attention kernel: the walk over segments and blocks of keys, and the copies in flight.

Contains the static `Plan` of a kernel call, the references it works on, and everything about pages and buffers; the
arithmetic of attention is in kernel.py.

An item of work is (segment, block): up to `blocks.pages` pages of the segment's sequence, counted from its first
visible page. Items are fetched in the order in which they are processed, `buffers - 1` ahead, across the ends of
sequences, tiles and grid steps.

Several cores share the grid steps in turn: core c of C runs steps c, C + c, 2 C + c, ..., of `blocks.tiles` tiles each,
and makes its own copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.attention.tpu import words
from jaxengine.pallas_kernels.attention.tpu.schedule import Walk
from jaxengine.pallas_kernels.attention.tpu.tiles import LANES, MOST_COPIES, Blocks, Window, lies_by_token

Item = tuple[jax.Array, jax.Array]  # i32 (segment, block)


class Part(NamedTuple):
    """Rows of a tile and pages of a block that are computed together for one kv head.

    Attributes:
      head: the kv head.
      first_row, end_row: rows [first_row, end_row) of the tile.
      first_page, end_page: pages [first_page, end_page) of the block.
    """

    head: int
    first_row: int
    end_row: int
    first_page: int
    end_page: int


@dataclass(frozen=True)
class Plan:
    """Compile-time parameters of one call of the attention kernel, and the sizes that follow from them.

    Attributes:
      spec: this device's heads.
      block_q: tokens per tile.
      group: query heads per kv head, padded.
      page_size: tokens of a page.
      blocks: how keys, tiles and heads are divided.
      keys, values: columns of the keys and of the values of each kv head.
      operand_dtype: dtype of the operands of both products.
      has_sinks: whether attention sinks are given.
      num_tree_words: uint32 words of a row of the tree mask, 0 without one.
      cores: TensorCores that share the call.
      mxu_columns: columns of the matrix unit.
      parts: parts into which the work on a single kv head is cut.
      table_width: entries of the page table for each sequence.
      lanes: range [first, end) of lanes that a page takes in a row of the pool.
      has_seen: whether keys that a token does not see are given one by one.
      in_words: whether a page is one row of words of a pool in the form of `words.word_rows`.
    """

    spec: AttentionSpec
    block_q: int
    group: int
    page_size: int
    blocks: Blocks
    keys: tuple[Window, ...]
    values: tuple[Window, ...]
    operand_dtype: Any
    has_sinks: bool
    num_tree_words: int
    cores: int
    mxu_columns: int
    parts: int
    table_width: int
    lanes: tuple[int, int]
    has_seen: bool = False
    in_words: bool = False

    def sums_with_values(self, head: int) -> bool:
        """Return whether one product of the matrix unit computes both the weighted values of kv head `head` and the sum
        of its weights, because that sum fits into spare columns.

        The sums are then of the rounded weights, the same that multiply the values. False for single tokens.
        """
        size = self.values[head].size
        return self.block_q > 1 and -(-size // self.mxu_columns) == -(-(size + LANES) // self.mxu_columns)

    @property
    def rows(self) -> int:
        """Number of query rows of a tile for each kv head."""
        return self.group * self.block_q

    @property
    def by_token(self) -> bool:
        """Whether queries, results and the rows of a tile are ordered token by token, as the caller passes them; else
        head by head.

        Always so for single tokens; for longer tiles the heads of a group must fill whole register tiles.
        """
        return self.block_q == 1 or lies_by_token(len(self.keys), self.group)

    @property
    def phases(self) -> list[list[Part]]:
        """Parts that are computed together, in order. A phase is `blocks.heads` kv heads, or one of the `parts` parts
        of the work on the only kv head.

        Parts are of rows, which share the keys that are loaded into the matrix unit; for tiles of one token of pages.
        """
        blocks, num_heads, parts = self.blocks, len(self.keys), self.parts
        if parts == 1:
            whole = [Part(head, 0, self.rows, 0, blocks.pages) for head in range(num_heads)]
            return [whole[first : first + blocks.heads] for first in range(0, num_heads, blocks.heads)]
        if self.block_q > 1:
            size = self.rows // parts
            return [[Part(0, first, first + size, 0, blocks.pages)] for first in range(0, self.rows, size)]
        size = blocks.pages // parts
        return [[Part(0, 0, self.rows, first, first + size)] for first in range(0, blocks.pages, size)]

    @property
    def row_lanes(self) -> int:
        """Number of lanes that a page takes in a row of the pool."""
        return self.lanes[1] - self.lanes[0]

    @property
    def block_kv(self) -> int:
        """Number of keys of a block."""
        return self.blocks.pages * self.page_size


class Refs(NamedTuple):
    """References that the kernel reads and writes, in launch order: operands, results o and lse, and scratch. Shapes
    are those that one grid step sees.

    Attributes:
      walk: SMEM.
      page_table, far_page_table: i32 [S * W] in SMEM or, if it is too large, in HBM; the other is None.
      logit_scale: SMEM f32 [K] of q.k, for logits to base 2 (natural logits under a soft cap).
      value_scale: SMEM f32 [K], factor of the output.
      sinks: SMEM f32 [K, G] to base 2, or None.
      q: [tokens, K, G, width] (plan.by_token) or [K, G, block_q, width], queries moved to their key window.
      q_rest: as q, the columns of queries after those of q; or None.
      tree: i32 [tiles * block_q, words] or None.
      seen: i32 [tiles, keys], 0 for keys of a tile's sequence that its token does not see; or None.
      pool: HBM [P, page_size, C] as `words.tile_rows`, of which plan.lanes are K * (H + Hv), rounded up to whole lane
        tiles; or as `words.word_rows`.
      o: as q, last axis Hv.
      lse: f32 [tiles, K, rows rounded up to whole lane tiles].
      buffer: [buffers, pages, tiles, rows, buffer_lanes(K * (H + Hv))], or pages of `words.page_shape`.
      arrived: DMA semaphore per buffer.
      largest: f32 [K, rows, LANES] all lanes equal.
      total: f32 [K, rows, LANES] sums of every LANES-th key, or of all in one; lanes are added up once per tile.
      acc: f32 [K, rows, width of a value window].
      cursor: SMEM i32 [4] indexed by FETCH_SEGMENT, FETCH_BLOCK, SLOT and TABLE_ROW.
      table_rows: SMEM i32 [2 * W] of a page table in HBM: rows of the segment being fetched and of the next one; else
        None.
      row_arrived: DMA semaphore per row; None without table_rows.
    """

    walk: Walk
    page_table: Any
    far_page_table: Any
    logit_scale: Any
    value_scale: Any
    sinks: Any
    q: Any
    q_rest: Any
    tree: Any
    seen: Any
    pool: Any
    o: Any
    lse: Any
    buffer: Any
    arrived: Any
    largest: Any
    total: Any
    acc: Any
    cursor: Any
    table_rows: Any
    row_arrived: Any


class Segment(NamedTuple):
    """Values that the arrays of `Walk` hold for one segment, i32 [] each."""

    tile: jax.Array
    seq: jax.Array
    first_row: jax.Array
    end_row: jax.Array
    position: jax.Array
    first_page: jax.Array
    end_key: jax.Array
    num_computed: jax.Array


# Fields of `Refs.cursor`, which one grid step passes on to the next: the item to fetch, the buffer of the item to
# process, and the row of `Refs.table_rows` of the segment being fetched.
FETCH_SEGMENT, FETCH_BLOCK, SLOT, TABLE_ROW = range(4)


def segments_before(refs: Refs, tile) -> jax.Array:
    """Return the number of segments in the tiles before `tile`, or of all segments for a tile past the last."""
    return refs.walk.tile_start[jnp.minimum(tile, refs.walk.tile_start.shape[0] - 1)]


def read_segment(refs: Refs, item: Item) -> Segment:
    """Return the segment of an item, or the last segment for an item past the end, which is never computed."""
    index = jnp.minimum(item[0], refs.walk.seq.shape[0] - 1)
    return Segment(*(getattr(refs.walk, field)[index] for field in Segment._fields))


def num_pages(segment: Segment, plan: Plan) -> jax.Array:
    """Return the number of pages from the segment's first visible page to the one with the last key that it sees."""
    return pl.cdiv(segment.end_key, plan.page_size) - segment.first_page


def is_last_block(segment: Segment, item: Item, plan: Plan) -> jax.Array:
    """Return whether `item`, which belongs to `segment`, is the segment's last item: no later block of it has visible
    keys.
    """
    return (item[1] + 1) * plan.blocks.pages >= num_pages(segment, plan)


def next_item(refs: Refs, plan: Plan, segment: Segment, item: Item) -> Item:
    """Return the next item of this core after `item`, which belongs to `segment`: the segment's next block, or block 0
    of the core's next segment.
    """
    last = is_last_block(segment, item, plan)
    return jnp.where(last, _next_segment(refs, plan, item[0]), item[0]), jnp.where(last, 0, item[1] + 1)


def _next_segment(refs: Refs, plan: Plan, segment) -> jax.Array:
    """Return the index of this core's next segment after `segment`; past the last one, any greater index."""
    if plan.cores == 1:
        return segment + 1

    def step_of(segment):
        return refs.walk.tile[jnp.minimum(segment, refs.walk.tile.shape[0] - 1)] // plan.blocks.tiles

    step = step_of(segment + 1)
    own = segments_before(refs, (step + plan.cores - 1) * plan.blocks.tiles)
    # Past the last segment tiles are undefined: without the maximum the walk could go backwards.
    return jnp.where(step == step_of(segment), segment + 1, jnp.maximum(own, segment + 1))


def start_walk(refs: Refs, plan: Plan, begin, end) -> None:
    """Start the copies of a core's first items, `buffers - 1` of them, and initialise refs.cursor.

    begin: its first segment. end: one past the last segment of all cores. With a page table in HBM, waits for the
    table rows of the segments whose pages are fetched.
    """
    refs.cursor[TABLE_ROW] = 1
    if refs.page_table is None:
        pl.when(begin < end)(lambda: _table_row_copy(refs, plan, begin, 0).start())

    def start(slot, item):
        return fetch(refs, plan, item, slot, end)

    item = lax.fori_loop(0, plan.blocks.buffers - 1, start, (begin, jnp.int32(0)))
    refs.cursor[FETCH_SEGMENT], refs.cursor[FETCH_BLOCK] = item
    refs.cursor[SLOT] = 0


def fetch(refs: Refs, plan: Plan, item: Item, slot, end) -> Item:
    """Start the copies of the pages of `item` into buffer `slot`, and return this core's next item. No copy is started
    if the item's segment is `end` or later. With a page table in HBM, a segment's first item waits for the segment's
    table row.
    """
    segment = read_segment(refs, item)
    if refs.page_table is None:
        pl.when((item[0] < end) & (item[1] == 0))(lambda: _enter_segment(refs, plan, item[0], end))

    @pl.when(item[0] < end)
    def _():
        near = refs.page_table is not None
        table, row = (refs.page_table, segment.seq) if near else (refs.table_rows, refs.cursor[TABLE_ROW])
        # The block's index in the flat table is computed once, so that each of its pages takes one addition.
        first = row * plan.table_width + segment.first_page + item[1] * plan.blocks.pages

        def start(base: jax.Array | int, index: jax.Array | int) -> None:
            _page_copy(refs, plan, table[(first + base) + index], slot, base + index).start()

        _for_pages(plan, segment, item, start)

    return next_item(refs, plan, segment, item)


def wait_for(refs: Refs, plan: Plan, segment: Segment, item: Item, slot) -> None:
    """Wait until the copies of the pages of `item`, which belongs to `segment`, to buffer `slot` are complete. The item
    must have been fetched.
    """
    # A wait counts bytes, so one is enough for all pages; the source that it names does not matter.
    pages = _buffered(refs, plan, slot, pl.ds(0, _count(plan, segment, item)))
    pltpu.make_async_copy(pages, pages, refs.arrived.at[slot]).wait()


def _page_copy(refs: Refs, plan: Plan, page, slot, index) -> Any:
    """Return an async copy, not yet started, of page `page` of the pool to page `index` of buffer `slot`."""
    if plan.in_words:
        source = words.page_of(refs.pool, page, plan.lanes)
    else:
        source = refs.pool.at[page, :, :, pl.ds(plan.lanes[0], plan.row_lanes)]
    return pltpu.make_async_copy(source, _buffered(refs, plan, slot, index), refs.arrived.at[slot])


def _buffered(refs: Refs, plan: Plan, slot, index) -> Any:
    """Return the reference to page `index`, or to a range of pages, of buffer `slot`, without unused lanes."""
    if plan.in_words and len(refs.buffer.shape) == 5:
        return refs.buffer.at[slot, index, : plan.row_lanes // LANES]
    return refs.buffer.at[slot, index, ..., : plan.row_lanes]


def _count(plan: Plan, segment: Segment, item: Item) -> jax.Array:
    """Return the number of pages that an item of `segment` covers, 0 to blocks.pages."""
    return jnp.clip(num_pages(segment, plan) - item[1] * plan.blocks.pages, 0, plan.blocks.pages)


def _for_pages(plan: Plan, segment: Segment, item: Item, act: Callable) -> None:
    """Call act(base, index) for each page of `item`, which belongs to `segment` and whose index in the block is base +
    index. For a full block the loop is unrolled, so that copies interleave, with one `base` and constants for `index`.
    That of many pages is unrolled in parts, so that its code stays small, also if the block is not full.
    """
    pages, count = plan.blocks.pages, _count(plan, segment, item)

    def part(first: jax.Array | int) -> None:
        for index in range(unrolled):
            act(first, index)

    if pages > MOST_COPIES:
        unrolled = math.gcd(pages, MOST_COPIES)
        parts = count // unrolled
        lax.fori_loop(0, parts, lambda number, _: part(number * unrolled), None)
        lax.fori_loop(parts * unrolled, count, lambda index, _: act(index, 0), None)
        return
    unrolled = pages
    pl.when(count == pages)(lambda: part(0))

    @pl.when(count < pages)
    def _():
        lax.fori_loop(0, count, lambda index, _: act(0, index), None)


def _table_row_copy(refs: Refs, plan: Plan, segment, row) -> Any:
    """Return an async copy, not yet started, of the page-table row of segment `segment` to refs.table_rows[row]."""

    def at(row):
        return pl.ds(pl.multiple_of(row * plan.table_width, LANES), plan.table_width)

    source, destination = refs.far_page_table.at[at(refs.walk.seq[segment])], refs.table_rows.at[at(row)]
    return pltpu.make_async_copy(source, destination, refs.row_arrived.at[row])


def _enter_segment(refs: Refs, plan: Plan, segment, end) -> None:
    """Wait for the copy of the page-table row of `segment`, make that row the current one in refs.cursor, and start the
    copy of the row of this core's next segment if that is before `end`, one past the last segment of all cores.
    """
    row = 1 - refs.cursor[TABLE_ROW]
    refs.cursor[TABLE_ROW] = row
    _table_row_copy(refs, plan, segment, row).wait()
    following = _next_segment(refs, plan, segment)
    pl.when(following < end)(lambda: _table_row_copy(refs, plan, following, 1 - row).start())


def zero_unseen_values(refs: Refs, plan: Plan, segment: Segment, first_key, slot, end_page) -> None:
    """Overwrite with 0 the values in buffer `slot` that no token of the segment sees: their weight is 0, but they may
    hold NaN.

    first_key: position of the first key of the block in the buffer. end_page: pages from this one on are left as they
    are, because they are not read.
    """
    low = 0
    if plan.spec.window is not None:
        low = jnp.maximum(segment.position + segment.first_row + 1 - plan.spec.window - first_key, 0)
    if plan.spec.chunk is not None:
        low = jnp.maximum((segment.position + segment.first_row) // plan.spec.chunk * plan.spec.chunk - first_key, 0)
    high = segment.end_key - first_key
    if plan.in_words:
        return words.zero_from(refs.buffer.at[slot], jnp.maximum(high, 0), end_page)
    bits = refs.buffer.dtype.itemsize * 8
    packing = 32 // bits

    def zero_page(page):
        # Words of 32 bits hold `packing` rows of one lane; masking bits needs no arithmetic on narrow types.
        tiles, rows = refs.buffer.shape[2:4]
        tile, word = (lax.broadcasted_iota(jnp.int32, (tiles, rows // packing, LANES), axis) for axis in (0, 1))
        word = page * plan.page_size + tile * rows + word * packing
        keep = jnp.zeros_like(word)
        for row in range(packing):
            kept = (word + row >= low) & (word + row < high)
            mask = -1 if bits == 32 else ((1 << bits) - 1) << (bits * row)
            keep |= jnp.where(kept, jnp.int32(mask - (1 << 32) if mask >= 1 << 31 else mask), 0)
        for window in {(window.start, window.size): window for window in plan.values}.values():
            at = (slot, page, slice(None), slice(None), slice(window.start, window.start + window.size))
            kept = pltpu.bitcast(refs.buffer[at], jnp.int32) & jnp.tile(keep, (1, 1, window.size // LANES))
            refs.buffer[at] = pltpu.bitcast(kept, refs.buffer.dtype)

    first_unseen = jnp.maximum(high, 0) // plan.page_size
    if plan.spec.window is not None or plan.spec.chunk is not None:
        pl.when((low > 0) & (first_unseen > 0))(lambda: zero_page(0))  # a window starts inside the first page
    lax.fori_loop(first_unseen, end_page, lambda page, _: zero_page(page), None)

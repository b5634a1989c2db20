"""Work list of one step's attention on a GPU: which CTA attends which keys of which rows.

Contains integers only. It depends on lengths, never on page ids, queries or keys, so that all layers of equal window
share one schedule; XLA computes it once per step. Two kernels read it:

- `DecodeItems`: rows of few new tokens. All blocks of keys of all (row, kv head) pairs form one sequence, which is cut
  into equal parts, one per CTA ("stream-K", Osama et al. 2023, arXiv 2301.03598). A pair that a cut falls into has
  several items, whose partial softmaxes are merged by log-sum-exp; there are at most pairs + CTAs - 1 items.
  Latents, which have no kernel of their own for prefill, are cut into such rows entirely.
- `PrefillItems`: tiles of up to `prefill_block_q` tokens of the longer runs. Queries are not moved: a tile loads
  from the multiple of 8 tokens before its first one, as a tiled TMA box must, so tiles end at such multiples.

R is the number of rows of a batch, Q the most tokens of a row, I the most items, and C the number of CTAs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.mosaic_gpu import BOX_ROWS, WARPGROUP_ROWS
from jaxengine.pallas_kernels.tuning import HopperAttention, TritonAttention, Tuning

MAX_WIDE_HEAD_DIM = 128  # largest head dim for prefill tiles of more than 128 rows
DECODE_KEYS = 64  # keys of a decode block; a page is a multiple of a block, or a block of pages

# Columns of `DecodeItems.items`.
DECODE_PAIR = 0  # row * num_kv_heads + kv head
DECODE_SEQ = 1  # row of the page table
DECODE_HEAD = 2  # kv head
DECODE_FIRST_BLOCK = 3  # blocks of DECODE_KEYS keys: [FIRST_BLOCK, END_BLOCK)
DECODE_END_BLOCK = 4
DECODE_BEGIN = 5  # first key that any of the row's tokens sees
DECODE_END = 6  # one past the last key that any of them sees
DECODE_POSITION = 7  # position of the row's first token

# Columns of `PrefillItems.items`.
PREFILL_SEQ = 0  # row of the page table
PREFILL_TOKEN = 1  # first token of the tile
PREFILL_ROWS = 2  # tokens of the tile
PREFILL_POSITION = 3  # position of its first token
PREFILL_BEGIN = 4  # first key that any of its tokens sees
PREFILL_END = 5  # one past the last key that any of them sees

ITEM_FIELDS = 8  # columns of both tables (prefill: 6 and 7 are 0): an item is one aligned 32-byte read


class Cuts(NamedTuple):
    """Items of pairs that were cut into several items (their parts), in the order of `DecodeItems.items`; at most C - 1
    cuts.

    Attributes:
      item_parts: i32 [I] index of an item among the parts, -1 if it is a full pair.
      pairs: i32 [C] pair that a cut is the first to fall into, R * K for any other cut.
      bounds: i32 [C + 1] its parts: [bounds[c], bounds[c + 1]).
    """

    item_parts: jax.Array
    pairs: jax.Array
    bounds: jax.Array


class DecodeItems(NamedTuple):
    """Work list of R rows of up to Q tokens, with I items in the order of their pairs and blocks. Items past the last
    are undefined.

    Attributes:
      cta_items: i32 [C + 1] CTA c takes the items [cta_items[c], cta_items[c + 1]).
      items: i32 [I, ITEM_FIELDS] columns DECODE_...
      pair_items: i32 [R * K + 1] items of a pair: [pair_items[p], pair_items[p + 1]), none for an empty row.
      cuts: the pairs that have several items.
      row_tokens: i32 [R, Q] the row's tokens, T where there is none.
      token_index: i32 [T] row * Q + index in the row of a token, R * Q if no row holds it.
    """

    cta_items: jax.Array
    items: jax.Array
    pair_items: jax.Array
    cuts: Cuts
    row_tokens: jax.Array
    token_index: jax.Array


class PrefillItems(NamedTuple):
    """Work list of tiles in descending token order, so that the tiles of a causal run that see the most keys start
    first. Each tile serves all query heads.

    The prefill_block_q tokens from (first token // 8 * 8) on include all of a tile's tokens.

    Attributes:
      num_items: i32 [1].
      items: i32 [I, ITEM_FIELDS] columns PREFILL_...; items past num_items are undefined.
      token_item: i32 [T] item of a token, I if no tile holds it.
    """

    num_items: jax.Array
    items: jax.Array
    token_item: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Work list of one step's attention on a Hopper GPU, a pytree.

    Attributes:
      decode: work of rows of few new tokens, or of all tokens.
      prefill: work of longer runs; None for none.
      tuning: sizes that the work was cut to.
    """

    decode: DecodeItems
    prefill: PrefillItems | None
    tuning: Tuning = field(metadata={"static": True})


def head_tiles(spec: AttentionSpec, most: int = WARPGROUP_ROWS) -> int:
    """Return the smallest number of equal tiles, each of at most `most` query heads (by default the rows of a
    warpgroup), into which the query heads of a kv head (spec.group_size) can be cut.
    """
    least = -(-spec.group_size // most)
    return next(count for count in range(least, spec.group_size + 1) if spec.group_size % count == 0)


def tiled_heads(spec: AttentionSpec, most: int = WARPGROUP_ROWS) -> AttentionSpec:
    """Return `spec` with num_kv_heads multiplied by `head_tiles`, so that every tile of at most `most` query heads
    counts as a kv head.
    """
    return replace(spec, num_kv_heads=spec.num_kv_heads * head_tiles(spec, most))


def prefill_rows(spec: AttentionSpec, most: int) -> int:
    """Return the number of query rows of a prefill tile: `most`, or at most 128 if the head dim of `spec` is above
    MAX_WIDE_HEAD_DIM, since the sums of more rows do not fit.
    """
    return most if spec.head_dim <= MAX_WIDE_HEAD_DIM else min(most, 2 * WARPGROUP_ROWS)


def prefill_block_q(spec: AttentionSpec, rows: int = 2 * WARPGROUP_ROWS) -> int:
    """Return the number of tokens of a prefill tile: the number of its query rows (`prefill_rows` of `spec` and `rows`)
    divided by the largest power of two that divides the query heads of a kv head; at least 16.
    """
    heads = spec.group_size & -spec.group_size
    return max(prefill_rows(spec, rows) // heads, 2 * BOX_ROWS)


def attention_schedule(
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    num_tokens: int,
    page_size: int,
    tuning: Tuning,
    most_rows: int = 2 * WARPGROUP_ROWS,
) -> Schedule:
    """Build the work list of a batch of T = num_tokens tokens; `spec` counts the heads that this device holds.

    Sequences of few new tokens (at most T // S, sizes.decode_tokens and 64 // query heads per kv head) become rows of
    `decode`, longer ones tiles of `prefill`. Over latents, and for T of at most S, all tokens become rows and `prefill`
    is None, as it is if no batch of this shape can have a longer sequence. Tokens of no sequence are in no item.
    page_size: a sequence's keys are limited to the columns of its page table times this. most_rows: most query rows of
    a prefill tile, see `prefill_rows`.
    """
    sizes, num_seqs = tuning.hopper_attention, batch.page_table.shape[0]
    if num_tokens <= num_seqs or spec.values_in_keys:
        rows_spec = tiled_heads(spec) if spec.values_in_keys else spec
        items = row_items(batch, rows_spec, sizes, num_tokens=num_tokens, page_size=page_size)
        return Schedule(items, None, tuning)
    q_lens, kv_lens, seqs, valid, index = _tokens(batch, num_tokens, page_size)
    width = min(num_tokens // num_seqs, sizes.decode_tokens, WARPGROUP_ROWS // spec.group_size)
    counts = jnp.where(q_lens <= width, q_lens, 0)
    rows = jnp.arange(num_seqs, dtype=jnp.int32)
    pairs = _pairs(rows, kv_lens - q_lens, counts, kv_lens, spec)
    slots = jnp.arange(width, dtype=jnp.int32)
    row_tokens = jnp.where(slots < counts[:, None], batch.cu_q_lens[:-1, None] + slots, num_tokens)
    in_row = valid & (q_lens[seqs] <= width)
    token_index = jnp.where(in_row, seqs * width + index, num_seqs * width)
    decode = DecodeItems(*_cut(pairs, spec, sizes), row_tokens, token_index)
    runs = jnp.where(q_lens > width, q_lens, 0)
    most = min(num_seqs, num_tokens // (width + 1))
    if not most:  # drafts of a sequence or two are too short for a run
        return Schedule(decode, None, tuning)
    token_seqs = jnp.where(valid & ~in_row, seqs, num_seqs)
    block_q = prefill_block_q(spec, most_rows)
    return Schedule(decode, _prefill_items(runs, most, batch.cu_q_lens, kv_lens, token_seqs, spec, block_q), tuning)


def row_items(
    batch: RaggedBatch,
    spec: AttentionSpec,
    sizes: HopperAttention | TritonAttention,
    *,
    num_tokens: int,
    page_size: int,
    most_rows: int = WARPGROUP_ROWS,
) -> DecodeItems:
    """Cut all T = num_tokens new tokens of a batch into rows, and the keys of these rows into items.

    A row is one token if T is at most the number of sequences; else it is as many consecutive tokens of one sequence as
    make `most_rows` queries with the query heads of a kv head of `spec`. sizes: the number of CTAs and the costs that
    `_cut` balances. page_size: a sequence's keys are limited to the columns of its page table times this.
    """
    num_seqs = batch.page_table.shape[0]
    q_lens, kv_lens, seqs, valid, index = _tokens(batch, num_tokens, page_size)
    if num_tokens > num_seqs:
        token_seqs = jnp.where(valid, seqs, num_seqs)
        width = most_rows // spec.group_size
        return _rows_of_runs(q_lens, batch.cu_q_lens, kv_lens, token_seqs, index, width, spec, sizes)
    position = kv_lens[seqs] - q_lens[seqs] + index
    pairs = _pairs(seqs, position, valid.astype(jnp.int32), kv_lens[seqs], spec)
    slots = jnp.where(valid, jnp.arange(num_tokens, dtype=jnp.int32), num_tokens)
    return DecodeItems(*_cut(pairs, spec, sizes), slots[:, None], slots)


def _tokens(batch: RaggedBatch, num_tokens: int, page_size: int) -> tuple[jax.Array, ...]:
    """Return (q_lens, kv_lens, seqs, valid, index).

    q_lens, kv_lens: i32 [S], the new tokens of each sequence (0 past num_seqs) and its keys, at most its page-table
    columns times page_size. seqs: i32 [T], the sequence of each of the T = num_tokens tokens, clipped below S. valid:
    bool [T], whether the token has a sequence. index: i32 [T], its index among the sequence's new tokens.
    """
    num_seqs, num_columns = batch.page_table.shape
    live = jnp.arange(num_seqs, dtype=jnp.int32) < batch.num_seqs
    q_lens = jnp.where(live, batch.cu_q_lens[1:] - batch.cu_q_lens[:-1], 0)
    kv_lens = jnp.minimum(batch.kv_lens, num_columns * page_size)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    seqs = jnp.sum(live & (tokens[:, None] >= batch.cu_q_lens[1:]), axis=-1, dtype=jnp.int32)
    valid = seqs < batch.num_seqs
    seqs = jnp.minimum(seqs, num_seqs - 1)
    return q_lens, kv_lens, seqs, valid, tokens - batch.cu_q_lens[seqs]


def _rows_of_runs(
    q_lens,
    cu_q_lens,
    kv_lens,
    token_seqs,
    index,
    width: int,
    spec: AttentionSpec,
    sizes: HopperAttention | TritonAttention,
) -> DecodeItems:
    """Cut each sequence's new tokens into rows of `width` tokens, the last one shorter, and the keys of these rows into
    items.

    q_lens, kv_lens: i32 [S], see `_tokens`. cu_q_lens: i32 [S + 1]. token_seqs: i32 [T], the sequence of each token, S
    if it has none. index: i32 [T], the token's index among its sequence's new tokens.
    """
    num_seqs, num_tokens = q_lens.shape[0], token_seqs.shape[0]
    num_rows = min(num_tokens // width + num_seqs, num_tokens)
    row_counts = (q_lens + width - 1) // width
    ends = jnp.cumsum(row_counts, dtype=jnp.int32)
    first_rows = ends - row_counts
    row = jnp.arange(num_rows, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(row[:, None] >= ends, axis=-1, dtype=jnp.int32), num_seqs - 1)
    first = (row - first_rows[seq]) * width
    counts = jnp.clip(q_lens[seq] - first, 0, width)
    pairs = _pairs(seq, kv_lens[seq] - q_lens[seq] + first, counts, kv_lens[seq], spec)
    slots = jnp.arange(width, dtype=jnp.int32)
    row_tokens = jnp.where(slots < counts[:, None], (cu_q_lens[seq] + first)[:, None] + slots, num_tokens)
    of = jnp.minimum(token_seqs, num_seqs - 1)
    token_index = jnp.where(token_seqs < num_seqs, first_rows[of] * width + index, num_rows * width)
    return DecodeItems(*_cut(pairs, spec, sizes), row_tokens, token_index)


class _Pairs(NamedTuple):
    """Range of keys of each row, i32 [R]; it is the same for all (row, kv head) pairs of a row.

    Attributes:
      seqs: row of the page table.
      first_block: first block of DECODE_KEYS keys that holds one its tokens see.
      num_blocks: number of blocks, 0: nothing to attend.
      begin: first key that any of its tokens sees.
      end: one past the last key that any of them sees.
      position: position of its first token.
    """

    seqs: jax.Array
    first_block: jax.Array
    num_blocks: jax.Array
    begin: jax.Array
    end: jax.Array
    position: jax.Array


def _pairs(seqs, position, counts, kv_lens, spec: AttentionSpec) -> _Pairs:
    """Return _Pairs of R rows: row r is the `counts` tokens from `position` on of sequence `seqs`, which has `kv_lens`
    keys. All are i32 [R]. A row without tokens or visible keys gets 0 blocks.
    """
    begin, end = _visible_keys(position, counts, kv_lens, spec)
    first = begin // DECODE_KEYS
    num_blocks = jnp.where((counts > 0) & (end > begin), (end + DECODE_KEYS - 1) // DECODE_KEYS - first, 0)
    return _Pairs(seqs, first, num_blocks, begin, end, position)


def _visible_keys(position, counts, kv_lens, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """Return the range [begin, end), i32 [R] each, of keys that at least one of `counts` tokens from `position` on
    sees, by the causal range, window or chunk of `spec`. Without `causal` the range ends at kv_lens.
    """
    end = position + counts if spec.causal else kv_lens
    if spec.chunk is not None:
        return position // spec.chunk * spec.chunk, end
    begin = jnp.zeros_like(end) if spec.window is None else jnp.maximum(position + 1 - spec.window, 0)
    return begin, end


def _cut(
    rows: _Pairs, spec: AttentionSpec, sizes: HopperAttention | TritonAttention
) -> tuple[jax.Array, jax.Array, jax.Array, Cuts]:
    """Lay the blocks of keys of all (row, kv head) pairs end to end, repeating each of `rows` for every kv head of
    `spec`, and cut this sequence into one part of equal cost per CTA.

    A pair costs its blocks plus sizes.pair_cost; a part costs at least sizes.min_part_cost, so that later CTAs may get
    none. Returns `cta_items`, `items`, `pair_items` and `cuts` of DecodeItems.
    """
    num_heads, num_ctas, pair_cost = spec.num_kv_heads, sizes.num_ctas, sizes.pair_cost
    pairs = jax.tree.map(lambda x: jnp.repeat(x, num_heads), rows)
    num_pairs = pairs.seqs.shape[0]
    num_items = num_pairs + num_ctas - 1
    cost = jnp.where(pairs.num_blocks > 0, pairs.num_blocks + pair_cost, 0)
    ends = jnp.cumsum(cost, dtype=jnp.int32)
    part = jnp.maximum((ends[-1] + num_ctas - 1) // num_ctas, sizes.min_part_cost)
    cuts = jnp.arange(1, num_ctas, dtype=jnp.int32) * part
    cut_pairs = jnp.sum(cuts[:, None] >= ends, axis=-1, dtype=jnp.int32)  # num_pairs for a cut past the end
    of = jnp.minimum(cut_pairs, num_pairs - 1)
    # A cut within a pair's fixed cost, before its first block, is a cut before the pair.
    skipped = cuts - (ends - cost)[of] - pair_cost
    inside = (cut_pairs < num_pairs) & (skipped > 0)

    before = _starts(cost > 0) + jnp.sum(
        inside & (cut_pairs < jnp.arange(num_pairs + 1, dtype=jnp.int32)[:, None]), axis=-1, dtype=jnp.int32
    )
    earlier = jnp.sum(inside & (cut_pairs < cut_pairs[:, None]), axis=-1, dtype=jnp.int32)  # cuts inside earlier pairs
    cut_items = jnp.where(inside, before[of] + 1 + _starts(inside)[:-1] - earlier, 0)
    cut_items = jnp.where(inside, cut_items, before[cut_pairs])
    cta_items = jnp.concatenate([jnp.zeros((1,), jnp.int32), cut_items, before[-1:]])

    dropped = num_items
    at = jnp.concatenate([jnp.where(cost > 0, before[:-1], dropped), jnp.where(inside, cut_items, dropped)])
    pair = (
        jnp.zeros((num_items,), jnp.int32)
        .at[at]
        .set(jnp.concatenate([jnp.arange(num_pairs, dtype=jnp.int32), of]), mode="drop")
    )
    first = (
        jnp.zeros((num_items,), jnp.int32)
        .at[at]
        .set(jnp.concatenate([pairs.first_block, pairs.first_block[of] + skipped]), mode="drop")
    )
    last_of_pair = jnp.arange(1, num_items + 1, dtype=jnp.int32) == before[pair + 1]
    end_block = jnp.where(last_of_pair, (pairs.first_block + pairs.num_blocks)[pair], jnp.roll(first, -1))
    fields = (pair, pairs.seqs[pair], pair % num_heads, first, end_block)
    items = jnp.stack([*fields, pairs.begin[pair], pairs.end[pair], pairs.position[pair]], axis=-1)
    counts = before[1:] - before[:-1]
    is_part = counts[pair] > 1
    is_first = inside & (cut_pairs != jnp.roll(jnp.where(inside, cut_pairs, -1), 1).at[:1].set(-1))
    cuts_of_pairs = Cuts(
        jnp.where(is_part, jnp.cumsum(is_part, dtype=jnp.int32) - 1, -1),
        jnp.pad(jnp.where(is_first, cut_pairs, num_pairs), (0, 1), constant_values=num_pairs),
        _starts(jnp.pad(jnp.where(is_first, counts[of], 0), (0, 1))),
    )
    return cta_items, items, before, cuts_of_pairs


def _starts(counts: jax.Array) -> jax.Array:
    """Return the exclusive prefix sums i32 [n + 1] of counts i32 or bool [n]."""
    return jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))


def _prefill_items(
    runs, most_runs: int, cu_q_lens, kv_lens, token_seqs, spec: AttentionSpec, block_q: int
) -> PrefillItems:
    """Cut `runs`, i32 [S] new tokens per sequence (0 for none, at most `most_runs` of them nonzero), into tiles of up
    to block_q tokens.

    cu_q_lens: i32 [S + 1]. kv_lens: i32 [S]. token_seqs: i32 [T], the sequence of each token that belongs to a run, S
    for other tokens. Every tile but the last of a run ends at a multiple of 8 tokens.
    """
    num_seqs, num_tokens = runs.shape[0], token_seqs.shape[0]
    most_items = num_tokens // block_q + 2 * most_runs
    aligned = cu_q_lens[:-1] // BOX_ROWS * BOX_ROWS
    num_tiles = jnp.where(runs > 0, (cu_q_lens[:-1] + runs - aligned + block_q - 1) // block_q, 0)
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    first_tiles, num_items = tile_ends - num_tiles, tile_ends[-1]
    tile = num_items - 1 - jnp.arange(most_items, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= tile_ends, axis=-1, dtype=jnp.int32), num_seqs - 1)
    first, end = cu_q_lens[seq], cu_q_lens[seq] + runs[seq]
    block = aligned[seq] + (tile - first_tiles[seq]) * block_q
    token = jnp.maximum(block, first)
    counts = jnp.minimum(block + block_q, end) - token
    position = kv_lens[seq] - runs[seq] + token - first
    fields = (seq, token, counts, position, *_visible_keys(position, counts, kv_lens[seq], spec))
    items = jnp.pad(jnp.stack(fields, axis=-1), ((0, 0), (0, ITEM_FIELDS - len(fields))))

    of = jnp.minimum(token_seqs, num_seqs - 1)
    token_tile = first_tiles[of] + (jnp.arange(num_tokens, dtype=jnp.int32) - aligned[of]) // block_q
    token_item = jnp.where(token_seqs < num_seqs, num_items - 1 - token_tile, most_items)
    return PrefillItems(num_items[None], items, token_item)

"""Work list of one step for the XLA implementation: which tile of rows meets which blocks of keys.

Contains integers only. It depends on lengths, never on page ids, queries or keys, so that all layers share one
schedule. A row is one new token; a tile is B sequences x Q tokens, and is computed over the kv blocks that at least one
of its rows sees.

- `single`: B sequences of one token each, ordered by length, so that the rows of a tile need about equally many blocks.
- `runs`: Q consecutive tokens of one sequence, for sequences with several new tokens. A batch of at most as many
  tokens as sequences is all `single`, one row per token, and has no `runs`: half the program to compile.

kv blocks start at multiples of the block size in the sequence's own positions, so that the order in which a row adds
up its keys does not depend on the other rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVSpec
from jaxengine.pallas_kernels.tuning import Tuning, XlaAttention


class Tiles(NamedTuple):
    """Work list of n tiles of B sequences x Q tokens, of which the first `num_tiles` have rows. Index b of a tile is
    sequence seqs[tile, b].

    Attributes:
      num_tiles: i32 [].
      seqs: i32 [n, B] row of the page table.
      tokens: i32 [n, B] first of the Q tokens.
      start: i32 [n, B, Q] first key a row sees.
      end: i32 [n, B, Q] one past the last key a row sees; 0 for a row that is padding.
      low, high: i32 [n, B] first key any of the Q rows sees, and one past the last.
      first_block, last_block: i32 [n] kv blocks of the tile: [first_block, last_block].
      whole_from, whole_to: i32 [n] blocks in [whole_from, whole_to) lie in [low, high) of all B sequences.
    """

    num_tiles: jax.Array
    seqs: jax.Array
    tokens: jax.Array
    start: jax.Array
    end: jax.Array
    low: jax.Array
    high: jax.Array
    first_block: jax.Array
    last_block: jax.Array
    whole_from: jax.Array
    whole_to: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Work list of one step's attention in plain XLA, a pytree.

    Attributes:
      single: sequences of one token each.
      rank: i32 [T] row (tile * B + index) of `single` that holds a token, n * B if none does.
      runs: sequences of several tokens; None for none.
      sizes: sizes that the tiles were cut to.
      mutual: bool [T] tokens whose keys earlier ones may see; None: the ranges say it all.
    """

    single: Tiles
    rank: jax.Array
    runs: Tiles | None
    sizes: XlaAttention = field(metadata={"static": True})
    mutual: jax.Array | None = None


def attention_schedule(
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    num_tokens: int,
    page_size: int,
    tuning: Tuning,
    kv_limits: jax.Array | None = None,
    kv_spec: KVSpec | None = None,
    q_dtype: Any = None,
) -> Schedule:
    """Return the tiles of a batch of T = num_tokens tokens, computed by a few integer operations on [S], [T] and [T /
    Q, S].

    spec: its causal, window, chunk, mutual and stored width are used. tuning: sizes of tiles and blocks. kv_limits: as
    in the public operation; they become part of the tiles' key ranges, and with spec.mutual of `mutual`. kv_spec and
    q_dtype are not used. `runs` is None if T is at most S.
    """
    del kv_spec, q_dtype
    num_seqs, sizes = batch.kv_lens.shape[0], tuning.xla_attention
    single_kv = sizes.block_kv_of(page_size, min(num_tokens, num_seqs))
    runs_kv = sizes.block_kv_of(page_size, num_tokens)
    live = jnp.arange(num_seqs, dtype=jnp.int32) < batch.num_seqs
    q_lens = jnp.where(live, batch.cu_q_lens[1:] - batch.cu_q_lens[:-1], 0)
    if num_tokens <= num_seqs:
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        ended = num_true(live & (tokens[:, None] >= batch.cu_q_lens[1:]))
        seqs, valid = jnp.minimum(ended, num_seqs - 1), ended < batch.num_seqs
    else:
        seqs = jnp.arange(num_seqs, dtype=jnp.int32)
        tokens, valid = batch.cu_q_lens[:-1], q_lens == 1
    keys = KeyRule(batch, q_lens, spec, kv_limits)
    block_seqs = sizes.block_seqs_of(2 * spec.stored_width * single_kv)
    single, rank = _single_tiles(keys, seqs, tokens, valid, num_tokens, block_seqs, single_kv)
    runs = None if num_tokens <= num_seqs else _run_tiles(keys, num_tokens, sizes.block_q, runs_kv)
    mutual = kv_limits > 0 if kv_limits is not None and spec.mutual else None
    return Schedule(single, rank, runs, sizes, mutual)


class KeyRule(NamedTuple):
    """Inputs that determine which keys a token sees.

    Attributes:
      batch: rows of the step.
      q_lens: i32 [S], 0 for rows that are not live.
      spec: of which causal, window and chunk count.
      limits: i32 [T], `kv_limits` of the public operation.
    """

    batch: RaggedBatch
    q_lens: jax.Array
    spec: AttentionSpec
    limits: jax.Array | None


def _single_tiles(
    keys: KeyRule, seqs, tokens, valid, num_tokens: int, block_seqs: int, block_kv: int
) -> tuple[Tiles, jax.Array]:
    """Return the tiles [n, B, 1] of those rows (seqs[r], tokens[r]), i32 [R] each, for which `valid` is True, ordered
    by the number of blocks of block_kv keys up to their last, the longest first, and `Schedule.rank`. B is at most
    block_seqs.

    keys: determine which keys a token sees. tokens: indices into the step's num_tokens tokens.
    """
    num_rows = seqs.shape[0]
    width = min(block_seqs, num_rows)
    start, end = visible_keys(keys, seqs, tokens - keys.batch.cu_q_lens[seqs], valid)
    order = jnp.argsort(-_ceil_div(end, block_kv)).astype(jnp.int32)
    pad = (0, -num_rows % width)

    def tiled(rows):
        return jnp.pad(rows[order], pad).reshape(-1, width)

    num_tiles = _ceil_div(num_true(valid), width)
    tokens = jnp.where(valid, tokens, num_tokens)
    rank = jnp.full((num_tokens,), num_rows + pad[1], jnp.int32)
    rank = rank.at[tokens[order]].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    tokens = tiled(jnp.minimum(tokens, num_tokens - 1))
    return _tiles(num_tiles, tiled(seqs), tokens, tiled(start)[..., None], tiled(end)[..., None], block_kv), rank


def _run_tiles(keys: KeyRule, num_tokens: int, block_q: int, block_kv: int) -> Tiles:
    """Return the tiles [n, 1, Q] of every sequence of several new tokens, in token order.

    keys: determine which keys a token sees. num_tokens: tokens of the batch. block_q: most tokens of a tile. block_kv:
    keys of a block.
    """
    q_lens = keys.q_lens
    num_seqs, block_q = q_lens.shape[0], min(block_q, num_tokens)
    tiles = jnp.where(q_lens > 1, _ceil_div(q_lens, block_q), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(num_tokens // block_q + min(num_seqs, num_tokens // 2), dtype=jnp.int32)
    seqs = jnp.minimum(num_true(index[:, None] >= ends), num_seqs - 1)
    offset = (index - (ends - tiles)[seqs]) * block_q
    rows = offset[:, None] + jnp.arange(block_q, dtype=jnp.int32)
    valid = (rows < q_lens[seqs, None]) & (index < ends[-1])[:, None]
    start, end = visible_keys(keys, seqs[:, None], rows, valid)
    tokens = jnp.minimum(keys.batch.cu_q_lens[seqs] + offset, num_tokens)
    return _tiles(ends[-1], seqs[:, None], tokens[:, None], start[:, None], end[:, None], block_kv)


def visible_keys(keys: KeyRule, seqs, index, valid) -> tuple[jax.Array, jax.Array]:
    """Return the range [start, end) of keys that new token `index` of sequence `seqs` sees. end is 0 where `valid` is
    False; start is then undefined.

    seqs, index, valid: i32 and bool arrays that broadcast to the shape of the results.
    """
    batch, q_lens, spec, limits = keys
    position = batch.kv_lens[seqs] - q_lens[seqs] + index
    end = jnp.where(valid, position + 1 if spec.causal else batch.kv_lens[seqs], 0)
    first = end if spec.causal else position + 1
    start = jnp.zeros_like(end) if spec.window is None else jnp.maximum(first - spec.window, 0)
    if spec.window is not None and not spec.causal:
        end = jnp.minimum(end, position + spec.window)
    if spec.chunk is not None:
        start = jnp.where(valid, jnp.maximum(position // spec.chunk - spec.lookback, 0) * spec.chunk, 0)
    if limits is not None:
        own = limits[jnp.minimum(batch.cu_q_lens[seqs] + index, len(limits) - 1)]
        end = jnp.where(valid, jnp.clip(own, end, batch.kv_lens[seqs]), 0)
    return start, end


def _tiles(num_tiles, seqs, tokens, start, end, block_kv: int) -> Tiles:
    """Return Tiles with the given fields, and with block ranges derived from the keys that their rows see.

    num_tiles, seqs, tokens, start, end: fields of Tiles. block_kv: keys of a block.
    """
    never = jnp.iinfo(jnp.int32).max
    low = jnp.min(jnp.where(end > 0, start, never), axis=-1)
    high = jnp.max(end, axis=-1)
    first_block = jnp.min(low, axis=-1) // block_kv
    last_block = _ceil_div(jnp.max(high, axis=-1), block_kv) - 1
    whole_from = jnp.max(low // block_kv + (low % block_kv > 0), axis=-1)
    whole_to = jnp.min(high // block_kv, axis=-1)
    return Tiles(num_tiles, seqs, tokens, start, end, low, high, first_block, last_block, whole_from, whole_to)


def num_true(mask: jax.Array) -> jax.Array:
    """Return the number of true elements of `mask` along the last axis, i32."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32)


def _ceil_div(x: jax.Array, y: int) -> jax.Array:
    """Return x / y, rounded up, for integers."""
    return (x + y - 1) // y

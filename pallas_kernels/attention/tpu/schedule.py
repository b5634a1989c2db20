"""Work list of the TPU attention kernel for one step: which tokens meet the keys of which sequence, in which order.

Contains integers only. It depends on lengths, never on page ids, queries or keys, so that all layers of equal window
share it.

A tile is `block_q` consecutive tokens of the flat token axis; a segment is the part of one sequence that lies in one
tile. A kernel call works through its segments in order, each from its first page to its last. Two calls may be needed:

- `single`: one token per tile. Serves the leading decodes, and every token of a batch with at most as many tokens as
  sequences (whatever its rows are: a sequence of several tokens is then several tiles).
- `runs`: tiles of several tokens, for the sequences after the decodes. A tile may hold several sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.xla.schedule import num_true
from jaxengine.pallas_kernels.kv.pages import KVSpec
from jaxengine.pallas_kernels.tuning import TpuAttention, Tuning


class Walk(NamedTuple):
    """Work list of n segments, ordered by tile and then by sequence; segments past the last are undefined.

    Attributes:
      tile_start: i32 [tiles + 1] first segment of each tile.
      tile: i32 [n] tile of the segment.
      seq: i32 [n] row of the page table.
      first_row, end_row: i32 [n] tokens [first_row, end_row) of the tile belong to the segment.
      position: i32 [n] position that token 0 of the tile would have in the sequence, may be negative.
      first_page: i32 [n] first page of the sequence that holds a visible key.
      end_key: i32 [n] one past the last key any token of the segment sees.
      num_computed: i32 [n] keys of the sequence that are older than this step.
    """

    tile_start: jax.Array
    tile: jax.Array
    seq: jax.Array
    first_row: jax.Array
    end_row: jax.Array
    position: jax.Array
    first_page: jax.Array
    end_key: jax.Array
    num_computed: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Work list of one step's attention on a TPU, a pytree. At least one of the two kernel calls is present.

    Attributes:
      single, runs: tiles of one token and of several; None for none.
      sizes: sizes that the tiles were cut to.
    """

    single: Walk | None
    runs: Walk | None
    sizes: TpuAttention = field(metadata={"static": True})


def block_q_of(sizes: TpuAttention, num_tokens: int, spec: AttentionSpec) -> int:
    """Return the number of tokens per tile of `runs` for a step of num_tokens and the heads of `spec`.

    It is the largest power of two that leaves run_tiles tiles of the step's tokens, at most max_block_q (for one kv
    head that has values of its own, one_head_block_q if that is more) and so many that with the query heads of a kv
    head they make up to run_rows rows, or for narrow results more; but at least min_block_q. All are fields of `sizes`.
    """
    most, narrow_rows = sizes.max_block_q, sizes.narrow_rows
    if spec.num_kv_heads == 1 and not spec.values_in_keys:  # results of latents are wide
        most, narrow_rows = max(most, sizes.one_head_block_q), sizes.one_head_rows
    narrow = sizes.narrow_bytes // (4 * spec.num_q_heads * spec.v_head_dim)
    rows = max(sizes.run_rows // spec.group_size, min(narrow_rows // spec.group_size, narrow))
    wanted = min(most, num_tokens // sizes.run_tiles, rows)
    return max(1 << max(wanted, 1).bit_length() - 1, sizes.min_block_q)


def has_runs(num_tokens: int, num_seqs: int) -> bool:
    """Return whether a batch of num_tokens tokens and num_seqs rows needs the tiles `runs`: whether it has more tokens
    than rows.
    """
    return num_tokens > num_seqs


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
    """Return the segments of a batch of T = num_tokens tokens, for attention.op.attention_schedule.

    `runs` is None if T is at most S. Otherwise `single` serves the leading decodes, or is None if batch.num_decode is.
    spec: its causal, window, chunk, heads and value size are used. tuning: tile sizes. kv_spec and q_dtype are not
    used. Takes a few integer operations on [T, S] and smaller. Raises ValueError for `kv_limits`, and for a window with
    causal=False, which the kernel does not support.
    """
    del kv_spec, q_dtype
    if kv_limits is not None:
        raise ValueError("kv_limits: the TPU kernel has no tokens that see some that follow; XLA on CPU and GPU has")
    if spec.window is not None and not spec.causal:
        raise ValueError("window: the TPU kernel has none with causal=False; XLA on CPU and GPU has")
    num_seqs, sizes = batch.kv_lens.shape[0], tuning.tpu_attention
    index = jnp.arange(num_seqs, dtype=jnp.int32)
    live = index < batch.num_seqs
    if not has_runs(num_tokens, num_seqs):
        return Schedule(walk_of(batch, spec, live, num_tokens, 1, page_size), None, sizes)
    block_q = block_q_of(sizes, num_tokens, spec)
    if batch.num_decode is None:
        return Schedule(None, walk_of(batch, spec, live, num_tokens, block_q, page_size), sizes)
    single = walk_of(batch, spec, live & (index < batch.num_decode), num_seqs, 1, page_size)
    runs = walk_of(batch, spec, live & (index >= batch.num_decode), num_tokens, block_q, page_size)
    return Schedule(single, runs, sizes)


def walk_of(
    batch: RaggedBatch, spec: AttentionSpec, chosen: jax.Array, num_tokens: int, block_q: int, page_size: int
) -> Walk:
    """Return the Walk over the segments of the `chosen` sequences (bool [S]) of `batch` among the first `num_tokens`
    tokens, in tiles of block_q tokens. Sequences without new tokens have no segment. spec: determines which keys a
    token sees. page_size: tokens of a page.
    """
    num_seqs = chosen.shape[0]
    start, end = batch.cu_q_lens[:-1], batch.cu_q_lens[1:]
    chosen = chosen & (end > start)
    first_tile = start // block_q
    counts = jnp.where(chosen, (end - 1) // block_q - first_tile + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    num_tiles = -(-num_tokens // block_q)
    # Every tile starts at most one segment of its own and every sequence one more.
    num_segments = num_tokens if block_q == 1 else min(num_tiles + num_seqs, num_tokens)
    index = jnp.arange(num_segments, dtype=jnp.int32)
    seq = jnp.minimum(num_true(index[:, None] >= ends), num_seqs - 1)
    tile = first_tile[seq] + index - (ends - counts)[seq]
    first_token = tile * block_q
    first_row = jnp.maximum(start[seq] - first_token, 0)
    end_row = jnp.minimum(end[seq] - first_token, block_q)
    kv_lens = batch.kv_lens[seq]
    position = kv_lens - end[seq] + first_token
    end_key = position + end_row if spec.causal else kv_lens
    first_key = 0 if spec.window is None else jnp.maximum(position + first_row + 1 - spec.window, 0)
    if spec.chunk is not None:
        first_key = (position + first_row) // spec.chunk * spec.chunk
    first_page = jnp.broadcast_to(first_key // page_size, seq.shape).astype(jnp.int32)
    # Compared rather than searched: on TPU a [tiles, n] comparison is one small fusion.
    worked = index < ends[-1]
    tiles = jnp.arange(num_tiles + 1, dtype=jnp.int32)
    tile_start = num_true(worked & (tile < tiles[:, None]))
    num_computed = kv_lens - (end - start)[seq]
    return Walk(tile_start, tile, seq, first_row, end_row, position, first_page, end_key, num_computed)

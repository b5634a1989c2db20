"""Sparse attention for TPU: each token's selected keys as a sequence of its own, for the kernel of single tokens.

What a token selected is a list of short runs of rows in pages. The kernel of kernel.py walks over such lists as over
page tables: its "pages" are the runs, its sequences the tokens. So it reads what was selected and what shares a copy
with that, with several blocks of copies in flight across tokens. A token's sums are taken in the order of its own list,
so its result does not depend on the rest of the batch.

- Blocks of keys: a run is the part of a block that lies in one page, and only the lanes of one KV head are copied.
- Selected keys: a run is an aligned group of rows in which some are selected, and the kernel gets a mask of the others.
  A group is the rows that share words of 32 bits, two of bfloat16 (words.py), or with `TpuAttention.selected_rows` a
  tile of eight.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.tpu import words
from jaxengine.pallas_kernels.attention.tpu.attend import attend_tiles
from jaxengine.pallas_kernels.attention.tpu.schedule import walk_of
from jaxengine.pallas_kernels.attention.tpu.tiles import LANES, SUBLANES
from jaxengine.pallas_kernels.attention.xla import selected, selected_blocks
from jaxengine.pallas_kernels.attention.xla.attend import log_once
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.tuning import Tuning

_NONE = jnp.iinfo(jnp.int32).max  # sorts after every position


def selected_attention(
    q: jax.Array,
    q_rest: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    positions: jax.Array,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    tuning: Tuning,
    interpret: Any = False,
) -> jax.Array:
    """Compute the attention of q [T, N, Hv] with q_rest [T, N, H - Hv] over the keys at `positions` i32 [T, k] on a
    TPU: return o [T, N, Hv] in q's dtype.

    Arguments are those of attention.selected.selected_attention, which has checked them. interpret:
    pltpu.InterpretParams to run on a CPU. What the kernel does not support runs as plain XLA, and a warning says why.
    """
    in_words = tuning.tpu_attention.selected_rows < SUBLANES or words.rows_of_tile(kv.data) > SUBLANES
    group = words.rows_of_word(kv.data) if in_words else SUBLANES
    if reason := _unsupported(q, kv, SUBLANES):
        log_once("TPU kernel", reason)
        options: dict[str, Any] = {"spec": spec, "sinks": sinks, "tuning": tuning}
        return selected.selected_attention(q, q_rest, kv, batch, positions, **options)
    view = replace(kv.spec, values_in_keys=True)
    first, _ = kv.lanes_of_page
    rows = _runs_of(kv, view, group, (first, first + _whole_tiles(spec.head_dim)))

    def attend(q: jax.Array, q_rest: jax.Array, positions: jax.Array, seqs: jax.Array, ends: jax.Array) -> jax.Array:
        groups, seen, num_keys = _groups(positions, ends, group)
        runs = _run_ids(groups * group, seqs, kv.page_size, group, batch.page_table)
        options: dict[str, Any] = {"spec": spec, "sinks": sinks, "tuning": tuning, "interpret": interpret}
        return _attend_runs(q, q_rest, rows, batch, runs, num_keys, seen=seen, in_words=in_words, **options)

    return selected.over_tokens(kv, batch, (q, q_rest, positions), attend, tuning.tpu_attention.selected_tokens)


def block_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    blocks: jax.Array,
    *,
    spec: AttentionSpec,
    size: int,
    tuning: Tuning,
    interpret: Any = False,
) -> jax.Array:
    """Compute the attention of q [T, N, H] over the keys of `blocks` i32 [T, K, k] on a TPU: return o [T, N, Hv] in q's
    dtype.

    Arguments are those of attention.selected.block_attention, which has checked them. interpret: pltpu.InterpretParams
    to run on a CPU. What the kernel does not support runs as plain XLA, and a warning says why.
    """
    run, stride = math.gcd(size, kv.page_size), kv.spec.row_width
    reason = _unsupported(q, kv, run)
    if not reason and spec.num_kv_heads > 1 and stride % LANES:
        reason = f"KV heads of {stride} elements, which do not begin at multiples of {LANES}"
    if reason:
        log_once("TPU kernel", reason)
        return selected_blocks.block_attention(q, kv, batch, blocks, spec=spec, size=size, tuning=tuning)
    group, width = spec.group_size, spec.head_dim + spec.v_head_dim
    view = replace(kv.spec, num_kv_heads=1, head_dim=spec.head_dim, v_head_dim=spec.v_head_dim, aligned_values=False)
    own = replace(spec, num_q_heads=group, num_kv_heads=1)
    options: dict[str, Any] = {"spec": own, "sinks": None, "tuning": tuning, "interpret": interpret}

    def attend(q: jax.Array, blocks: jax.Array, seqs: jax.Array, ends: jax.Array) -> jax.Array:
        found = []
        for head in range(spec.num_kv_heads):
            first = kv.lanes_of_page[0] + head * stride
            rows = _runs_of(kv, view, run, (first, first + _whole_tiles(width)))
            firsts, num_keys = _pieces(blocks[:, head], ends, size, run)
            runs = _run_ids(firsts, seqs, kv.page_size, run, batch.page_table)
            heads = lax.slice_in_dim(q, head * group, (head + 1) * group, axis=1)
            found.append(_attend_runs(heads, None, rows, batch, runs, num_keys, **options))
        return jnp.concatenate(found, axis=1)

    return selected.over_tokens(kv, batch, (q, blocks), attend, tuning.tpu_attention.selected_tokens)


def _unsupported(q: jax.Array, kv: KVPages, run: int) -> str:
    """Return why the kernel cannot read runs of `run` rows of the pool for queries `q`: float16, or pages or runs that
    are no multiple of SUBLANES rows; "" if it can.
    """
    if jnp.float16 in (q.dtype, kv.data.dtype):
        return "float16, which TPUs do not have"
    if kv.page_size % SUBLANES:
        return f"pages of {kv.page_size} tokens, which is no multiple of {SUBLANES}"
    return f"runs of {run} tokens of a block in a page, which is no multiple of {SUBLANES}" if run % SUBLANES else ""


def _whole_tiles(width: int) -> int:
    """Return `width` lanes rounded up to whole lane tiles."""
    return -(-width // LANES) * LANES


def _runs_of(kv: KVPages, spec: Any, run: int, lanes: tuple[int, int]) -> KVPages:
    """Return the pool as one of pages of `run` tokens, a multiple of SUBLANES or the rows of a word, of which only
    `lanes` are read. On a TPU it is the same array. spec: logical shape of what is in those lanes.
    """
    num_pages = kv.data.shape[0] * (kv.page_size // run)
    own = replace(spec, num_pages=num_pages, page_size=run)
    data = words.word_rows(kv.data) if run < SUBLANES else kv.data.reshape(num_pages, run, kv.data.shape[2])
    return replace(kv, data=data, spec=own, lanes=lanes)


def _attend_runs(
    q: jax.Array,
    q_rest: jax.Array | None,
    rows: KVPages,
    batch: RaggedBatch,
    runs: jax.Array,
    num_keys: jax.Array,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    tuning: Tuning,
    interpret: Any,
    seen: jax.Array | None = None,
    in_words: bool = False,
) -> jax.Array:
    """Return the attention [T, N, Hv] of q (and q_rest) over the keys in the pages `runs` i32 [T, n] of `rows`, of
    which each token sees the first num_keys i32 [T], without those where `seen` i32 [T, keys] is 0; 0 where num_keys
    is.
    """
    num_tokens, sizes = len(q), tuning.tpu_attention
    cu_q_lens = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    own = batch._replace(cu_q_lens=cu_q_lens, kv_lens=num_keys, page_table=runs)
    walk = walk_of(own, spec, num_keys > 0, num_tokens, 1, rows.page_size)
    options: dict[str, Any] = {"spec": spec, "sinks": sinks, "sizes": sizes, "interpret": interpret, "seen": seen}
    options["in_words"] = in_words
    o, _ = attend_tiles(q, q_rest, None, walk, kv=rows, batch=own, block_q=1, **options)
    return jnp.where(num_keys[:, None, None] > 0, o, 0)  # a token without keys between others has no tile


def _run_ids(firsts: jax.Array, seqs: jax.Array, page_size: int, run: int, page_table: jax.Array) -> jax.Array:
    """Return the runs i32 [T, n] of `run` rows of the pool that begin at positions `firsts` i32 [T, n] of sequences
    `seqs` i32 [T]; any number for positions past the page table.
    """
    columns = jnp.arange(page_table.shape[1], dtype=jnp.int32)
    own = page_table[seqs]
    # Compared rather than gathered, which a TPU does one by one.
    pages = jnp.sum(jnp.where((firsts // page_size)[..., None] == columns, own[:, None], 0), axis=2, dtype=jnp.int32)
    return pages * (page_size // run) + firsts % page_size // run


def _pieces(blocks: jax.Array, ends: jax.Array, size: int, run: int) -> tuple[jax.Array, jax.Array]:
    """Return (first positions i32 [T, n] of the runs of which a token sees a key, how many keys i32 [T] it sees in
    them) for `blocks` i32 [T, k] of `size` tokens, -1 for none. ends: i32 [T], keys that a token sees in all.

    A run that ends after the token's own key comes last, so that the keys it sees are the first ones. What follows the
    last run is undefined.
    """
    inner = jnp.arange(size // run, dtype=jnp.int32) * run
    firsts = (blocks[..., None] * size + inner).reshape(len(blocks), -1)
    live = jnp.repeat(blocks >= 0, size // run, axis=1)
    seen = jnp.where(live, jnp.clip(ends[:, None] - firsts, 0, run), 0)
    count = firsts.shape[1]
    numbers = jnp.arange(count, dtype=jnp.int32)
    order = jnp.where(seen == run, numbers, jnp.where(seen > 0, count, count + 1 + numbers))
    place = jnp.sum(order[:, :, None] > order[:, None], axis=2, dtype=jnp.int32)
    firsts = jnp.sum(jnp.where(place[:, None] == numbers[:, None], firsts[:, None], 0), axis=2, dtype=jnp.int32)
    return firsts, jnp.sum(seen, axis=1, dtype=jnp.int32)


def _groups(positions: jax.Array, ends: jax.Array, group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the groups of `group` positions with one of `positions` i32 [T, k], as (their numbers i32 [T, k],
    ascending; i32 [T, n] with n at least k * group, 1 for selected positions of theirs; how many keys i32 [T] there are
    up to the token's own).

    positions: distinct and less than 2**26, -1 for none. ends: i32 [T], keys that a token sees. What follows the last
    group is undefined.
    """
    chosen = jnp.sort(jnp.where((positions >= 0) & (ends[:, None] > 0), positions, _NONE), axis=1)
    live, numbers = chosen != _NONE, chosen // group
    is_last = live & (numbers != jnp.pad(numbers[:, 1:], ((0, 0), (0, 1)), constant_values=-1))
    # Sums of distinct powers of two: their differences say which positions of a group are selected.
    sums = jnp.cumsum(jnp.where(live, 1 << chosen % group, 0), axis=1, dtype=jnp.int32)
    before = lax.cummax(jnp.pad(jnp.where(is_last, sums, 0)[:, :-1], ((0, 0), (1, 0))), axis=1)
    # One array of numbers and bits: XLA compiles a sort of two for many seconds.
    joined = jnp.sort(jnp.where(is_last, numbers << group | (sums - before), _NONE), axis=1)
    seen = _unpacked(joined & ((1 << group) - 1), group)
    count = jnp.sum(is_last, axis=1, dtype=jnp.int32)
    last = jnp.max(jnp.where(live, numbers, 0), axis=1)
    inner = jnp.clip(ends - last * group, 1, group)
    num_keys = jnp.where(count > 0, (count - 1) * group + inner, 0)
    return joined >> group, seen, num_keys


def _unpacked(masks: jax.Array, group: int) -> jax.Array:
    """Return the `group` lowest bits of `masks` i32 [T, k], which have no others, one after the other: i32 [T, n], 0 or
    1, with n the least multiple of group * LANES that is at least k * group.
    """
    masks = jnp.pad(masks, ((0, 0), (0, -masks.shape[1] % LANES))).reshape(len(masks), -1, LANES)
    # A product repeats every mask, exactly; to repeat along lanes is a shuffle that XLA compiles for ten seconds.
    lane = jnp.arange(LANES * group, dtype=jnp.int32)
    repeat = jnp.arange(LANES, dtype=jnp.int32)[:, None] == lane // group
    operands = masks.astype(jnp.bfloat16), repeat.astype(jnp.bfloat16)
    repeated = jnp.matmul(*operands, preferred_element_type=jnp.float32).astype(jnp.int32)
    return ((repeated >> lane % group) & 1).reshape(len(masks), -1)

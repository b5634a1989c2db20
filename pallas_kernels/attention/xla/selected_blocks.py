"""Attention to selected blocks of keys in plain XLA: scores of blocks over paged keys, and attention to the best.

`select_blocks` works on the tiles of selected.py, with each KV head of a token as a row of its own. `block_attention`
processes a few tokens at a time and gathers only the blocks that each of their KV heads selected, in pieces that lie in
one page.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch, tokens_of
from jaxengine.pallas_kernels.attention.xla.attend import operand
from jaxengine.pallas_kernels.attention.xla.schedule import Schedule, Tiles
from jaxengine.pallas_kernels.attention.xla.selected import (
    KeyScores,
    Span,
    best_groups,
    index_keys,
    operand_dtype,
    over_tiles,
    scores_in_blocks,
)
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.registry import TOKEN_ROWS
from jaxengine.pallas_kernels.tuning import Tuning
from jaxengine.pallas_kernels.zeros import zeros_in_layer


def select_blocks(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    size: int,
    count: int,
    local: int,
    scores: KeyScores | None = None,
) -> jax.Array:
    """Return the numbers i32 [T, K, k] of the k = count blocks that each KV head of a token selects, -1 after the last,
    computed in plain XLA. Arguments, and the order of blocks, are those of attention.selected.select_blocks, which has
    checked them. scores: another implementation of the products of queries and keys; None for that in plain XLA.
    """
    num_heads = q.shape[1]

    def select(tiles: Tiles, tile: jax.Array, q: jax.Array) -> jax.Array:
        rows, seqs = q.reshape(q.shape[0], -1, q.shape[3]), tiles.seqs[tile]  # [B, Q * K, J]
        last = jnp.repeat(tiles.end[tile], num_heads, axis=1)[..., None]  # keys that a row sees
        ends = -(-last[..., 0] // size)

        def best(first: jax.Array, scores: jax.Array) -> jax.Array:
            """Return the scores of blocks from those of keys f32 [B, Q * K, n], the first of them key `first`: the
            largest of those that a row sees, infinity for its last `local` blocks.
            """
            num_keys = scores.shape[2]
            seen = first + jnp.arange(num_keys, dtype=jnp.int32) < last
            best = jnp.max(jnp.where(seen, scores, -jnp.inf).reshape(*rows.shape[:2], -1, size), axis=-1)
            numbers = first // size + jnp.arange(num_keys // size, dtype=jnp.int32)
            return jnp.where(numbers >= ends[..., None] - local, jnp.inf, best)

        def score(block: jax.Array, num_keys: int) -> jax.Array:
            keys, _ = index_keys(seqs, block, num_keys, q.dtype, kv, batch)
            products = lax.dot_general(rows, keys, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
            return best(block * num_keys, products)

        def of_span(span: Span) -> jax.Array:
            if scores is not None:
                return best(span.first * span.size, scores(rows, None, seqs, tiles.end[tile], span))
            return scores_in_blocks(score, span, kv, (*ends.shape, span.most * span.size // size))

        found = best_groups(ends, size, count, of_span, kv, schedule.sizes)
        return found.reshape(*q.shape[:3], count)

    return over_tiles(schedule, kv, (q.astype(operand_dtype(q, kv)),), (num_heads, count), select)


def block_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    blocks: jax.Array,
    *,
    spec: AttentionSpec,
    size: int,
    tuning: Tuning,
) -> jax.Array:
    """Compute the attention of q [T, N, H] over the keys of `blocks` i32 [T, K, k] (-1 past a head's last) in plain
    XLA: return o [T, N, Hv] in q's dtype, 0 for tokens without a key. Arguments are those of
    attention.selected.block_attention, which has checked them.
    """
    num_tokens, num_kv_heads, count = blocks.shape
    sizes, own_dtype, dtype = tuning.xla_selection, q.dtype, operand_dtype(q, kv)
    width, at_once = min(sizes.block_tokens, num_tokens), min(max(sizes.gathered_keys // size, 1), count)
    pad = (0, -num_tokens % width)
    q = q.astype(dtype).reshape(num_tokens, num_kv_heads, -1, spec.head_dim)
    q = jnp.pad(q, (pad, (0, 0), (0, 0), (0, 0)))
    (seqs, ends), num_live = tokens_of(batch, len(q)), batch.cu_q_lens[batch.num_seqs]
    blocks = jnp.pad(blocks, (pad, (0, 0), (0, -count % at_once)), constant_values=-1)
    blocks = jnp.where((jnp.arange(len(q)) < num_live)[:, None, None], blocks, -1)

    def attend(tile: jax.Array, o: jax.Array) -> jax.Array:
        first = tile * width
        rows, own, seq, end = (lax.dynamic_slice_in_dim(x, first, width) for x in (q, blocks, seqs, ends))

        def fold(index: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            chosen = lax.dynamic_slice_in_dim(own, index * at_once, at_once, axis=2)
            positions = jnp.maximum(chosen, 0)[..., None] * size + jnp.arange(size, dtype=jnp.int32)
            seen = (chosen >= 0)[..., None] & (positions < end[:, None, None, None])
            keys = _keys(kv, batch.page_table[seq], jnp.maximum(chosen, 0), size)
            joined = operand(keys, spec.head_dim + spec.v_head_dim, dtype, kv.spec)
            return _folded(softmax, rows, joined, seen.reshape(*joined.shape[:3]), spec)

        shape = rows.shape[:3]
        start = zeros_in_layer(kv.data, shape) - jnp.inf, zeros_in_layer(kv.data, shape)
        most = jnp.max(jnp.sum(own >= 0, axis=2, dtype=jnp.int32))
        sums = zeros_in_layer(kv.data, (*shape, spec.v_head_dim))
        _, total, sums = lax.fori_loop(0, -(-most // at_once), fold, (*start, sums))
        new = (sums / jnp.where(total > 0, total, 1.0)[..., None]).astype(own_dtype)
        return lax.dynamic_update_slice_in_dim(o, new.reshape(width, -1, spec.v_head_dim), first, 0)

    o = zeros_in_layer(kv.data, (len(q), spec.num_q_heads, spec.v_head_dim), own_dtype)
    return lax.fori_loop(0, -(-num_live // width), attend, o)[:num_tokens]


def _keys(kv: KVPages, page_table: jax.Array, blocks: jax.Array, size: int) -> jax.Array:
    """Gather the keys joined with values [B, K, b * size, H + Hv], as stored, of blocks i32 [B, K, b] of `size` tokens.

    page_table: i32 [B, W], pages of each token's sequence. Of a block that ends after the last page, or past the
    sequence's keys, the rest may be any keys: ids out of range are clipped.
    """
    spec = kv.spec
    piece = math.gcd(size, spec.page_size)  # tokens that always lie in one page
    firsts = blocks[..., None] * size + jnp.arange(size // piece, dtype=jnp.int32) * piece
    firsts = firsts.reshape(*blocks.shape[:2], -1)  # [B, K, n]
    columns = jnp.minimum(firsts // spec.page_size, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table[:, None], columns, axis=2)
    offsets = firsts % spec.page_size
    heads = jnp.broadcast_to(jnp.arange(blocks.shape[1], dtype=jnp.int32)[:, None], pages.shape)
    if kv.layout == TOKEN_ROWS:
        index = jnp.stack([pages, offsets, kv.lanes_of_page[0] + heads * spec.row_width], axis=-1)
        dims = lax.GatherDimensionNumbers((pages.ndim, pages.ndim + 1), (0,), (0, 1, 2))
        window = 1, piece, spec.key_width
    else:
        index = jnp.stack([pages, heads, offsets * spec.key_width], axis=-1)
        dims = lax.GatherDimensionNumbers((pages.ndim,), (0, 1), (0, 1, 2))
        window = 1, 1, piece * spec.key_width
    rows = lax.gather(kv.data, index, dims, window, mode=lax.GatherScatterMode.CLIP)
    return rows.reshape(*blocks.shape[:2], -1, spec.key_width)


def _folded(
    softmax: tuple[jax.Array, ...], q: jax.Array, joined: jax.Array, seen: jax.Array, spec: AttentionSpec
) -> tuple[jax.Array, ...]:
    """Add keys to the online softmax of queries [B, K, G, H], (largest logit and total f32 [B, K, G], sums f32 [B, K,
    G, Hv]), and return the new one.

    joined: keys followed by their values [B, K, b, H + Hv]. seen: bool [B, K, b], False for keys to leave out, which
    may be NaN.
    """
    largest, total, sums = softmax
    keys, values = joined[..., : spec.head_dim], jnp.where(seen[..., None], joined[..., spec.head_dim :], 0)
    batched = (0, 1), (0, 1)
    logits = lax.dot_general(q, keys, (((3,), (3,)), batched), preferred_element_type=jnp.float32) * spec.sm_scale
    logits = jnp.where(seen[:, :, None], logits, -jnp.inf)
    new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
    shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)  # of a token that has seen nothing
    shares, decay = jnp.exp(logits - shift[..., None]), jnp.exp(largest - shift)
    total = total * decay + jnp.sum(shares, axis=-1)
    new = lax.dot_general(
        shares.astype(values.dtype), values, (((3,), (2,)), batched), preferred_element_type=jnp.float32
    )
    return new_largest, total, sums * decay[..., None] + new

"""Sparse attention in plain XLA: scores of an indexer over paged keys, and attention to the keys that it selects.

`select_keys` processes the work list of schedule.py with tiles of its own size. A tile's scores are computed one block
of keys at a time, and merged into the best so far every few blocks. Of the pool only the indexer's keys are read, once
for each tile. `selected_attention` processes a few tokens at a time and gathers only the keys that they selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch, tokens_of
from jaxengine.pallas_kernels.attention.xla.attend import gather_columns, operand
from jaxengine.pallas_kernels.attention.xla.largest import largest
from jaxengine.pallas_kernels.attention.xla.schedule import Schedule, Tiles, attention_schedule
from jaxengine.pallas_kernels.kv.pages import KVPages, token_scales
from jaxengine.pallas_kernels.registry import TOKEN_ROWS, backend_of
from jaxengine.pallas_kernels.tuning import Tuning, XlaAttention
from jaxengine.pallas_kernels.zeros import zeros_in_layer

_CAUSAL = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1, sm_scale=1.0)
# Times k: keys whose scores are merged into the best so far at a time. On a GPU a merge is many launches.
_MERGED, _MERGED_ON_GPU = 4, 32
_FEW = 256  # keys or blocks that are selected up to which a GPU finds them by a sort


def selection_schedule(batch: RaggedBatch, *, num_tokens: int, page_size: int, tuning: Tuning) -> Schedule:
    """Return the tiles of `select_keys` for a batch of T = num_tokens tokens, causal and without a window, by the sizes
    in tuning.xla_selection. page_size: tokens of a page.
    """
    sizes = tuning.xla_selection
    own = replace(tuning, xla_attention=XlaAttention(sizes.block_seqs, sizes.block_q, sizes.block_kv))
    return attention_schedule(batch, _CAUSAL, num_tokens=num_tokens, page_size=page_size, tuning=own)


class Span(NamedTuple):
    """Blocks of keys whose scores are merged into the best so far together.

    Attributes:
      first: i32 [], number of the first block.
      live: i32 [], how many of the blocks have a key that some row sees.
      size: keys of a block.
      most: blocks of the span.
    """

    first: jax.Array
    live: jax.Array
    size: int
    most: int


# Function from (queries [B, Q * I, J], weights f32 [B, Q, I] or None, sequences i32 [B], keys that a row sees
# i32 [B, Q], span) to scores f32 [B, Q, keys of the span], or without weights [B, Q * I, ...]. Scores of keys that a
# row does not see are undefined.
KeyScores = Callable[[jax.Array, jax.Array | None, jax.Array, jax.Array, Span], jax.Array]


def select_keys(
    q: jax.Array,
    weights: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    count: int,
    pooling: jax.Array | None,
    scores: KeyScores | None = None,
) -> jax.Array:
    """Return the positions i32 [T, k] of the k = count keys of each token with the highest scores, -1 after the last,
    computed in plain XLA. Arguments, and the order of positions, are those of attention.selected.select_keys, which has
    checked them; with `pooling` the result is numbers of groups. scores: another implementation of `scores_in_blocks`
    without pooling; None for that in plain XLA.
    """
    group = 1 if pooling is None else len(pooling)

    def select(tiles: Tiles, tile: jax.Array, q: jax.Array, weights: jax.Array) -> jax.Array:
        q, seqs, ends = q.reshape(q.shape[0], -1, q.shape[3]), tiles.seqs[tile], tiles.end[tile]

        def score(seqs: jax.Array, block: jax.Array, num_keys: int) -> jax.Array:
            keys, scales = index_keys(seqs, block, num_keys, q.dtype, kv, batch)
            keys = keys if pooling is None else _pooled(keys, pooling)
            return _scores(q, weights, keys, scales)

        def of_span(span: Span) -> jax.Array:
            if scores is not None:
                return scores(q, weights, seqs, ends, span)
            return scores_in_blocks(partial(score, seqs), span, kv, (*ends.shape, span.most * span.size // group))

        return best_groups(ends // group, group, count, of_span, kv, schedule.sizes)

    return over_tiles(schedule, kv, (q.astype(operand_dtype(q, kv)), weights), (count,), select)


def over_tiles(
    schedule: Schedule, kv: KVPages, operands: Sequence[jax.Array], shape: tuple[int, ...], select: Callable
) -> jax.Array:
    """Return what the tokens of every tile select, i32 [T, *shape]; -1 for tokens of no sequence.

    operands: arrays [T, ...] of which select(tiles, tile, *own) gets the rows of one tile, [B, Q, ...] each; it returns
    i32 [B, Q, *shape]. kv: the pool.
    """
    single, runs, num_tokens = schedule.single, schedule.runs, len(operands[0])
    width = single.seqs.shape[1]

    def of_single(tile: jax.Array, found: jax.Array) -> jax.Array:
        tokens = single.tokens[tile]
        new = select(single, tile, *(each[tokens][:, None] for each in operands))
        return lax.dynamic_update_slice_in_dim(found, new[:, 0], tile * width, 0)

    found = lax.fori_loop(0, single.num_tiles, of_single, nothing(kv, (single.seqs.size, *shape)))
    in_single = (schedule.rank < single.seqs.size).reshape(-1, *[1] * len(shape))
    found = jnp.where(in_single, found[jnp.minimum(schedule.rank, single.seqs.size - 1)], -1)
    if runs is None:
        return found
    block_q = runs.start.shape[2]
    padded = [jnp.pad(each, ((0, block_q), *[(0, 0)] * (each.ndim - 1))) for each in operands]

    def of_run(tile: jax.Array, found: jax.Array) -> jax.Array:
        # A sequence's last tile also covers tokens that follow, whose own tiles come later.
        first = runs.tokens[tile, 0]
        new = select(runs, tile, *(lax.dynamic_slice_in_dim(each, first, block_q)[None] for each in padded))
        return lax.dynamic_update_slice_in_dim(found, new[0], first, 0)

    of_runs = lax.fori_loop(0, runs.num_tiles, of_run, nothing(kv, (num_tokens + block_q, *shape)))
    return jnp.where(in_single, found, of_runs[:num_tokens])


def over_tokens(
    kv: KVPages, batch: RaggedBatch, operands: Sequence[jax.Array], attend: Callable[..., jax.Array], size: int
) -> jax.Array:
    """Return attend(*operands, seqs, ends) of all tokens, `size` tokens at a time, which bounds its memory.

    operands: [T, ...]. seqs: i32 [T], the sequence of a token. ends: i32 [T], how many keys it sees, 0 for tokens of no
    sequence, which get 0. attend: function of some tokens; it returns [T, N, Hv].
    """
    num_tokens, num_live = len(operands[0]), batch.cu_q_lens[batch.num_seqs]
    operands = (*operands, *tokens_of(batch, num_tokens))
    if num_tokens <= size:
        return attend(*operands)
    padded = -(-num_tokens // size) * size
    operands = [jnp.pad(x, ((0, padded - num_tokens), *[(0, 0)] * (x.ndim - 1))) for x in operands]

    def some(part: jax.Array, o: jax.Array) -> jax.Array:
        own = (lax.dynamic_slice_in_dim(x, part * size, size) for x in operands)
        return lax.dynamic_update_slice_in_dim(o, attend(*own), part * size, 0)

    shape = jax.eval_shape(attend, *(jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in operands))
    o = zeros_in_layer(kv.data, (padded, *shape.shape[1:]), shape.dtype)
    return lax.fori_loop(0, -(-num_live // size), some, o)[:num_tokens]


def operand_dtype(q: jax.Array, kv: KVPages) -> jnp.dtype:
    """Return the dtype of the products' operands: bfloat16 if the queries `q` and the pool `kv` both have it, else
    float32.
    """
    return jnp.dtype(jnp.bfloat16 if q.dtype == kv.dtype == jnp.bfloat16 else jnp.float32)


def nothing(kv: KVPages, shape: tuple[int, ...]) -> jax.Array:
    """Return i32 `shape` filled with -1, the position for "no key", derived from the pool `kv` (`zeros_in_layer`)."""
    return zeros_in_layer(kv.data, shape, jnp.int32) - 1


def scores_in_blocks(
    score: Callable[[jax.Array, int], jax.Array], span: Span, kv: KVPages, shape: tuple[int, ...]
) -> jax.Array:
    """Return the scores f32 `shape` of a span, [B, R, groups of the span], computed one block after another.

    score(block, num_keys): scores f32 [B, R, n] of the n groups in the block-th block of num_keys keys. kv: the pool.
    """
    groups = shape[2] // span.most

    def add(number: jax.Array, scores: jax.Array) -> jax.Array:
        new = score(span.first + number, span.size)
        return lax.dynamic_update_slice_in_dim(scores, new, number * groups, 2)

    return lax.fori_loop(0, span.live, add, zeros_in_layer(kv.data, shape))


def best_groups(
    ends: jax.Array,
    group: int,
    count: int,
    score: Callable[[Span], jax.Array],
    kv: KVPages,
    sizes: XlaAttention,
) -> jax.Array:
    """Return the numbers i32 [B, R, count] of the groups of `group` keys with the highest scores, the best first, of
    equal scores the lowest number first.

    ends: i32 [B, R], number of groups that a row sees. A row that sees at most `count` selects all, in order of their
    numbers, not scores, and -1 after the last. If that holds for every row, no scores are computed. A score of -inf may
    give -1. Groups are scored in blocks of keys whose size `sizes` and the platform decide.
    score(span): scores f32 [B, R, groups of the span], undefined for groups that a row does not see.
    """
    unit = math.lcm(kv.page_size, group)
    num_keys = max(sizes.block_kv_of(kv.page_size, ends.size) // unit, 1) * unit
    block = num_keys // group
    on_gpu = backend_of(kv.platform) == "cuda"
    most = -(-(_MERGED_ON_GPU if on_gpu else _MERGED) * count // block)
    top_k = largest if on_gpu and count > _FEW else lax.top_k
    # Where every row selects all that it sees, no score is needed.
    last = jnp.max(ends)
    num_blocks = jnp.where(last > count, -(-last // block), 0)
    offsets = jnp.arange(most * block, dtype=jnp.int32)

    def merge(index: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        scores = score(Span(index * most, jnp.minimum(most, num_blocks - index * most), num_keys, most))
        scores = jnp.where(index * most * block + offsets < ends[..., None], scores, -jnp.inf)
        # The best so far come first, so that of equal scores the lowest position does.
        scores = jnp.concatenate([best[0], scores.reshape(ends.size, -1)], axis=1)
        more = jnp.broadcast_to(index * most * block + offsets, (ends.size, len(offsets)))
        top, which = top_k(scores, count)
        return top, jnp.take_along_axis(jnp.concatenate([best[1], more], axis=1), which, axis=1)

    start = zeros_in_layer(kv.data, (ends.size, count)) - jnp.inf
    trips = -(-num_blocks // most)
    _, found = lax.fori_loop(0, trips, merge, (start, nothing(kv, (ends.size, count))))
    ends, all_of_them = ends[..., None], jnp.arange(count, dtype=jnp.int32)
    return jnp.where(
        ends > count, found.reshape(*ends.shape[:2], count), jnp.where(all_of_them < ends, all_of_them, -1)
    )


def _pooled(rows: jax.Array, pooling: jax.Array) -> jax.Array:
    """Return keys [B, b / m, J] of groups of m tokens, in the dtype of `rows` [B, b, 2 * J], keys followed by gates:
    means of keys weighted by the softmax of gates + pooling f32 [m, J].
    """
    grouped = rows.astype(jnp.float32).reshape(rows.shape[0], -1, len(pooling), rows.shape[2])
    keys, gates = jnp.split(grouped, 2, axis=-1)
    return jnp.sum(jax.nn.softmax(gates + pooling, axis=2) * keys, axis=2).astype(rows.dtype)


def _scores(q: jax.Array, weights: jax.Array, keys: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Return the scores f32 [B, Q, b] of keys [B, b, J] for queries q [B, Q * I, J]: the sum over the I heads of
    weights f32 [B, Q, I] times relu(q . key). A score of zero is +0.

    scales: f32 [B, b], factors of the keys' scores, or None.
    """
    products = lax.dot_general(q, keys, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    products = jax.nn.relu(products).reshape(*weights.shape, -1)
    scores = jnp.sum(weights[..., None] * products, axis=2)
    if scales is not None:
        scores = scores * scales[:, None]
    return jnp.where(scores == 0, 0.0, scores)


def index_keys(
    seqs: jax.Array, block: jax.Array, block_kv: int, dtype: jnp.dtype, kv: KVPages, batch: RaggedBatch
) -> tuple[jax.Array, jax.Array | None]:
    """Gather the indexer's keys [B, block_kv, J] in `dtype` of the block-th block of block_kv keys of sequences `seqs`
    i32 [B], and their token scales f32 [B, block_kv], or None for a pool without them. The pool stores them as the
    values of its first head.

    Page ids past a sequence's keys may be garbage: the gather clips them, and the caller masks their scores.
    """
    spec = kv.spec
    columns = block * (block_kv // spec.page_size) + jnp.arange(block_kv // spec.page_size, dtype=jnp.int32)
    pages = batch.page_table[seqs[:, None], jnp.minimum(columns, batch.page_table.shape[1] - 1)]
    if kv.layout == TOKEN_ROWS:
        first = kv.lanes_of_page[0] + spec.value_column
        rows = kv.data.at[pages].get(mode="clip")[..., first : first + spec.value_width]
    else:
        flat = kv.data.reshape(kv.data.shape[0], -1)
        sizes = spec.page_size * spec.key_width, spec.page_size * spec.value_width
        rows = gather_columns(flat, pages.reshape(-1), *sizes)
    rows = rows.reshape(len(seqs), block_kv, -1)
    return operand(rows, spec.v_head_dim, dtype, spec), token_scales(rows) if spec.token_scales else None


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
) -> jax.Array:
    """Compute the attention of q [T, N, Hv] with q_rest [T, N, H - Hv] over the keys at `positions` i32 [T, k] (-1 past
    a token's last) in plain XLA: return o [T, N, Hv] in q's dtype, 0 for tokens without a key. Arguments are those of
    attention.selected.selected_attention, which has checked them.
    """
    num_tokens, num_heads, own_dtype = *q.shape[:2], q.dtype
    sizes, count = tuning.xla_selection, positions.shape[1]
    size, block = min(sizes.block_tokens, num_tokens), min(sizes.gathered_keys, count)
    dtype = operand_dtype(q, kv)
    pad = (0, -num_tokens % size)
    q = jnp.pad(jnp.concatenate([q, q_rest], axis=-1).astype(dtype), (pad, (0, 0), (0, 0)))
    (seqs, _), num_live = tokens_of(batch, len(q)), batch.cu_q_lens[batch.num_seqs]
    positions = jnp.pad(positions, (pad, (0, -count % block)), constant_values=-1)
    positions = jnp.where((jnp.arange(len(q)) < num_live)[:, None], positions, -1)
    scale = spec.sm_scale if kv.k_scale is None else spec.sm_scale * kv.k_scale[0]

    def attend(tile: jax.Array, o: jax.Array) -> jax.Array:
        first = tile * size
        rows, own, seq = (lax.dynamic_slice_in_dim(x, first, size) for x in (q, positions, seqs))

        def fold(index: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            chosen = lax.dynamic_slice_in_dim(own, index * block, block, axis=1)
            pages = batch.page_table[seq[:, None], jnp.maximum(chosen, 0) // kv.page_size]
            keys, scales = _latents(kv, pages, jnp.maximum(chosen, 0) % kv.page_size, dtype)
            return _folded(softmax, rows, keys, scales, chosen >= 0, scale, spec)

        shape = size, num_heads
        first_logits = jnp.full(shape, -jnp.inf) if sinks is None else jnp.broadcast_to(sinks, shape)
        start = (first_logits, jnp.where(first_logits > -jnp.inf, 1.0, 0.0), jnp.zeros((*shape, spec.v_head_dim)))
        most = jnp.max(jnp.sum(own >= 0, axis=1, dtype=jnp.int32))
        _, total, sums = lax.fori_loop(0, -(-most // block), fold, start)
        if kv.k_scale is not None:
            sums = sums * kv.k_scale[0]
        new = (sums / jnp.where(total > 0, total, 1.0)[..., None]).astype(own_dtype)
        return lax.dynamic_update_slice_in_dim(o, new, first, 0)

    o = zeros_in_layer(kv.data, (q.shape[0], num_heads, spec.v_head_dim), own_dtype)
    return lax.fori_loop(0, -(-num_live // size), attend, o)[:num_tokens]


def _latents(kv: KVPages, pages: jax.Array, offsets: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Gather the keys [B, b, H] in `dtype` of the slots at `offsets` in `pages`, i32 [B, b] each, and their token
    scales f32 [B, b], or None for a pool without them. Ids out of range are clipped.
    """
    spec = kv.spec
    if kv.layout == TOKEN_ROWS:
        index = jnp.stack([pages, offsets, jnp.full_like(pages, kv.lanes_of_page[0])], axis=-1)
    else:
        index = jnp.stack([pages, jnp.zeros_like(pages), offsets * spec.key_width], axis=-1)
    dims = lax.GatherDimensionNumbers((pages.ndim,), (0, 1), (0, 1, 2))
    rows = lax.gather(kv.data, index, dims, (1, 1, spec.key_width), mode=lax.GatherScatterMode.CLIP)
    return operand(rows, spec.head_dim, dtype, spec), token_scales(rows) if spec.token_scales else None


def _folded(
    softmax: tuple[jax.Array, ...],
    q: jax.Array,
    keys: jax.Array,
    scales: jax.Array | None,
    seen: jax.Array,
    scale: jax.Array | float,
    spec: AttentionSpec,
) -> tuple[jax.Array, ...]:
    """Add keys [B, b, H] to the online softmax of queries [B, N, H], (largest logit and total f32 [B, N], sums f32 [B,
    N, Hv]), and return the new one.

    Values are the first Hv (of `spec`) elements of the keys. scales: f32 [B, b], factors of the keys, or None. seen:
    bool [B, b], False for keys to leave out. scale: factor of the logits.
    """
    largest, total, sums = softmax
    logits = lax.dot_general(q, keys, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32) * scale
    values = jnp.where(seen[..., None], keys[..., : spec.v_head_dim], 0)
    if scales is not None:
        logits, scales = logits * scales[:, None], jnp.where(seen, scales, 0.0)
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
    shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)  # of a token that has seen nothing
    shares, decay = jnp.exp(logits - shift[..., None]), jnp.exp(largest - shift)
    total = total * decay + jnp.sum(shares, axis=-1)
    shares = shares if scales is None else shares * scales[:, None]
    new = lax.dot_general(
        shares.astype(values.dtype), values, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return new_largest, total, sums * decay[..., None] + new

"""Paged attention for the CPU, and for devices whose kernels do not support a call: plain XLA whose cost follows the
actual lengths.

Online softmax over kv blocks (Milakov & Gimelshein 2018, arXiv 1805.02867; FlashAttention, Dao et al. 2022, arXiv
2205.14135) on the work list of schedule.py. One loop with a dynamic trip count processes one (tile, kv block) at a
time: it gathers the block's pages, folds them into the running maximum, denominator and accumulator of the tile's rows,
and writes the normalised result back. Several short sequences share a tile, which saves operations.

The schedule, and not this loop, turns lengths into masks and scalars.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.xla.schedule import Schedule, Tiles, attention_schedule
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, bits, from_storage, token_scales, tokens_of_rows
from jaxengine.pallas_kernels.registry import HEAD_TILES_AS_BITS, TOKEN_ROWS
from jaxengine.pallas_kernels.tuning import XlaAttention
from jaxengine.pallas_kernels.zeros import zeros_in_layer

logger = logging.getLogger(__name__)


def ragged_paged_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    q_rest: jax.Array | None = None,
    slopes: jax.Array | None = None,
    biases: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of queries over the pages of their sequences in plain XLA: return o [T, N, Hv] in q's dtype
    and lse f32 [T, N].

    Arguments are those of attention.op.ragged_paged_attention, which has checked them; sinks, tree_mask, q_rest, slopes
    and biases may be None. schedule: result of xla.schedule.attention_schedule. Tokens of no sequence get 0 and -inf.
    """
    if q_rest is not None:
        q = jnp.concatenate((q, q_rest), axis=-1)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = num_q_heads // spec.group_size  # inside shard_map fewer than the spec of the pool says
    # bfloat16 queries over a bfloat16 pool: both products take bfloat16 operands, sums stay float32.
    operand_dtype = jnp.bfloat16 if q.dtype == kv.dtype == jnp.bfloat16 else jnp.float32
    rows = q.astype(operand_dtype).reshape(num_tokens, num_kv_heads, -1, head_dim)
    if biases is not None:  # taken along with the queries, the farthest distance first
        flipped = biases[..., ::-1].astype(operand_dtype)
        rows = jnp.concatenate((rows, flipped.reshape(*rows.shape[:3], -1)), axis=-1)
    scale = jnp.full((num_kv_heads,), spec.sm_scale, jnp.float32)
    if kv.k_scale is not None:
        scale = scale * kv.k_scale
    sink = jnp.full((num_q_heads,), -jnp.inf) if sinks is None else sinks
    by_head = None if slopes is None else slopes.reshape(num_kv_heads, -1)
    factors = scale, sink.reshape(num_kv_heads, -1), by_head
    step = _Step(kv, batch, spec, *factors, tree_mask, schedule.sizes, schedule.mutual)
    o, lse = _attend_single(rows, step, schedule)
    if schedule.runs is not None:
        in_single = (schedule.rank < schedule.single.seqs.size)[:, None, None]
        run_o, run_lse = _attend_runs(rows, step, schedule.runs)
        o, lse = jnp.where(in_single[..., None], o, run_o), jnp.where(in_single, lse, run_lse)
    valid = (jnp.arange(num_tokens) < batch.cu_q_lens[batch.num_seqs])[:, None, None]
    o, lse = jnp.where(valid[..., None], o, 0.0), jnp.where(valid, lse, -jnp.inf)
    if (value_scale := kv.value_scale) is not None:
        o = o * value_scale[:, None, None]
    return o.reshape(num_tokens, num_q_heads, -1).astype(q.dtype), lse.reshape(num_tokens, num_q_heads)


def attend_in_place_of(
    kernels: str, reason: str, q: jax.Array, kv: KVPages, batch: RaggedBatch, schedule: Any, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """Return what `ragged_paged_attention` returns, for a call that a device's kernels do not support. Logs a warning
    with the reason, once per reason.

    kernels: their name in the warning. schedule: this module's, or that of the kernels, from whose `tuning` this
    module's is then built. options: further arguments of ragged_paged_attention.
    """
    log_once(kernels, reason)
    if not isinstance(schedule, Schedule):
        sizes = {"num_tokens": q.shape[0], "page_size": kv.page_size, "tuning": schedule.tuning}
        schedule = attention_schedule(batch, options["spec"], **sizes)
    return ragged_paged_attention(q, kv, batch, schedule, **options)


@functools.cache
def log_once(kernels: str, reason: str) -> None:
    """Log a warning that attention runs as plain XLA instead of `kernels`, once per process and pair of kernels and
    reason.
    """
    logger.warning("attention runs as plain XLA instead of the %s: %s", kernels, reason)


class _Step(NamedTuple):
    """Operands that all tiles of the step share. `spec` has this device's heads; `sizes` and `mutual` are the
    schedule's.

    Attributes:
      kv: pool to read.
      scale: f32 [K] factor of the products of queries and keys.
      sink: f32 [K, G] logit that is in the denominator from the start, -inf: none.
      slopes: f32 [K, G] loss of a logit for each position to the key.
      tree_mask: u32 [T, words].
    """

    kv: KVPages
    batch: RaggedBatch
    spec: AttentionSpec
    scale: jax.Array
    sink: jax.Array
    slopes: jax.Array | None
    tree_mask: jax.Array | None
    sizes: XlaAttention
    mutual: jax.Array | None


def _attend_single(q: jax.Array, step: _Step, schedule: Schedule) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of rows q [T, K, G, H] in the `single` tiles of `schedule`: return o f32 [T, K, G, Hv] and
    lse f32 [T, K, G], undefined for tokens that are in no such tile.
    """
    tiles = schedule.single
    width = tiles.seqs.shape[1]

    def read(tile):
        tokens = tiles.tokens[tile]
        return q[tokens], None if step.tree_mask is None else step.tree_mask[tokens, None]

    def write(results, tile, new):
        return jax.tree.map(lambda old, rows: lax.dynamic_update_slice_in_dim(old, rows, tile * width, 0), results, new)

    shape = (tiles.seqs.size, *q.shape[1:3])
    o, lse = _walk(tiles, step, read, write, _zeros(step, shape))
    rank = jnp.minimum(schedule.rank, tiles.seqs.size - 1)
    return o[rank], lse[rank]


def _attend_runs(q: jax.Array, step: _Step, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of rows q [T, K, G, H] in the `runs` tiles: return o f32 [T, K, G, Hv] and lse f32 [T, K,
    G], undefined for tokens that are in no such tile.

    The last tile of a sequence also covers tokens of later sequences. Tiles are in token order, so the tiles of those
    tokens overwrite its results for them.
    """
    num_tokens, num_kv_heads, group, _ = q.shape
    block_q = tiles.start.shape[2]
    padded = num_tokens + block_q
    by_head = jnp.pad(q.swapaxes(0, 1), ((0, 0), (0, block_q), (0, 0), (0, 0)))  # [K, T + Q, G, H]
    tree_mask = None if step.tree_mask is None else jnp.pad(step.tree_mask, ((0, block_q), (0, 0)))

    def read(tile):
        first = tiles.tokens[tile, 0]
        rows = lax.dynamic_slice_in_dim(by_head, first, block_q, axis=1).reshape(1, num_kv_heads, block_q * group, -1)
        return rows, None if tree_mask is None else lax.dynamic_slice_in_dim(tree_mask, first, block_q)[None]

    def write(results, tile, new):
        return jax.tree.map(
            lambda old, rows: lax.dynamic_update_slice_in_dim(
                old, rows.reshape(num_kv_heads, block_q, *old.shape[2:]), tiles.tokens[tile, 0], axis=1
            ),
            results,
            new,
        )

    shape = (num_kv_heads, padded, group)
    o, lse = _walk(tiles, step, read, write, _zeros(step, shape))
    return o[:, :num_tokens].swapaxes(0, 1), lse[:, :num_tokens].swapaxes(0, 1)


def _zeros(step: _Step, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return zeros f32 [*shape, Hv] for outputs and f32 `shape` for log-sum-exps, derived from the step's pool
    (`zeros_in_layer`).
    """
    data = step.kv.data
    return zeros_in_layer(data, (*shape, step.spec.v_head_dim)), zeros_in_layer(data, shape)


def _walk(tiles: Tiles, step: _Step, read: Callable, write: Callable, results: tuple[jax.Array, jax.Array]):
    """Compute the tiles of a work list, block after block of each tile by online softmax, and return `results` with
    every tile written. step: operands that all tiles share.

    read(tile): returns its rows [B, K, M, H + E] with M = Q * G, queries followed by biases of distances, and their
        tree mask u32 [B, Q, words] or None.
    write(results, tile, (o [B, K, M, Hv], lse [B, K, M])): returns the new results. Called after every block of a tile;
        the call after the last block overwrites the earlier ones.
    """
    num_seqs, block_q = tiles.start.shape[1:]
    num_kv_heads, group = step.sink.shape
    shape = (num_seqs, num_kv_heads, block_q * group)
    sink = jnp.broadcast_to(jnp.tile(step.sink, (1, block_q)), shape)
    start = (sink, (sink > -jnp.inf).astype(jnp.float32), jnp.zeros((*shape, step.spec.v_head_dim), jnp.float32))

    def attend_block(carry):
        tile, block, softmax, results = carry
        rows, tree = read(tile)
        is_first = block == tiles.first_block[tile]
        softmax = jax.tree.map(lambda fresh, running: jnp.where(is_first, fresh, running), start, softmax)
        keys = _keys_of(*_gather_block(tiles, tile, block, step), rows.dtype, step)
        visible = _visible(tiles, tile, block, keys.k.shape[2], tree, step)
        rows, flipped = jnp.split(rows, [keys.k.shape[3]], axis=-1)
        distance = None if step.slopes is None else _distances(tiles, tile, block, keys.k.shape[2])
        biases = _biases_of(flipped, tiles, tile, block, keys.k.shape[2]) if flipped.shape[-1] else None
        softmax = _fold_block(softmax, rows, keys, visible, distance, biases, step)
        results = write(results, tile, _normalised(*softmax))
        done = block >= tiles.last_block[tile]  # not ==: an inconsistent batch must still end
        next_tile = tile + done
        next_block = jnp.where(done, tiles.first_block[jnp.minimum(next_tile, len(tiles.first_block) - 1)], block + 1)
        return next_tile, next_block, softmax, results

    softmax = jax.tree.map(lambda fresh: zeros_in_layer(step.kv.data, fresh.shape), start)
    carry = (jnp.int32(0), tiles.first_block[0], softmax, results)
    return lax.while_loop(lambda carry: carry[0] < tiles.num_tiles, attend_block, carry)[3]


class _Keys(NamedTuple):
    """Keys and values of a block as operands, with token scales; these are None for a pool without them.

    Attributes:
      k, v: [B, K, kv, H] and [B, K, kv, Hv].
      k_scale, v_scale: f32 [B, K, kv].
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def _keys_of(keys: jax.Array, values: jax.Array, dtype: jnp.dtype, step: _Step) -> _Keys:
    """Return rows of keys and of values, [B, K, kv, elements] each as `_gather_block` returns them, as operands of
    `dtype` with their token scales.
    """
    spec = step.kv.spec
    k, v = (operand(*row, dtype, spec) for row in ((keys, spec.head_dim), (values, spec.v_head_dim)))
    k_scale, v_scale = (token_scales(rows) if spec.token_scales else None for rows in (keys, values))
    return _Keys(k, v, k_scale, v_scale)


def _fold_block(softmax, q, keys: _Keys, visible, distance, biases, step: _Step):
    """Add the keys and values of a block to an online softmax, (largest, total f32 [B, K, M], acc f32 [B, K, M, Hv]),
    and return the new one.

    q: [B, K, M, H]. visible: bool [B, Q, kv], the keys that a token sees, the same for its G rows.
    distance: f32 [B, Q, kv], positions from key to token; None without slopes. biases: f32 [B, K, Q, G, kv], which are
    added to logits; None for none.
    """
    largest, total, acc = softmax
    logits = _batch_dot(q, keys.k, 3) * step.scale[:, None, None]  # [B, K, M, kv]
    if keys.k_scale is not None:
        logits = logits * keys.k_scale[:, :, None]
    if (cap := step.spec.soft_cap) is not None:
        logits = cap * jnp.tanh(logits / cap)
    num_seqs, block_q, block_kv = visible.shape
    by_token = logits.reshape(num_seqs, logits.shape[1], block_q, -1, block_kv)
    if step.slopes is not None:
        by_token = by_token - step.slopes[:, None, :, None] * distance[:, None, :, None]
    if biases is not None:
        by_token = by_token + biases
    logits = jnp.where(visible[:, None, :, None], by_token, -jnp.inf).reshape(logits.shape)
    new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
    shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)  # a row that has seen nothing: exp(-inf - 0) = 0
    weights = jnp.exp(logits - shift[..., None])
    decay = jnp.exp(largest - shift)
    total = total * decay + jnp.sum(weights, axis=-1)
    if keys.v_scale is not None:
        weights = weights * keys.v_scale[:, :, None]
    return new_largest, total, acc * decay[..., None] + _batch_dot(weights.astype(keys.v.dtype), keys.v, 2)


def _normalised(largest, total, acc) -> tuple[jax.Array, jax.Array]:
    """Return the output and the natural log-sum-exp of an online softmax; 0 and -inf for a row that has seen no key.

    largest, total: [...], largest logit and sum of weights of each row. acc: [..., Hv], sum of weighted values.
    """
    return acc / jnp.where(total > 0, total, 1.0)[..., None], largest + jnp.log(total)


def _visible(tiles: Tiles, tile, block, block_kv: int, tree, step: _Step) -> jax.Array:
    """Return bool [B, Q, block_kv], whether each token of a tile sees each key of its block-th block: keys in the
    token's [start, end), of later ones only those of `step.mutual` unless it is None, and, of the sequence's new
    tokens, only those whose bit is set in the token's row of tree u32 [B, Q, words]. tree None: all of them.
    """
    positions = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
    visible = (positions >= tiles.start[tile][..., None]) & (positions < tiles.end[tile][..., None])
    if tree is None and step.mutual is None:
        return visible
    batch, seqs = step.batch, tiles.seqs[tile]
    num_computed = batch.kv_lens[seqs] - (batch.cu_q_lens[seqs + 1] - batch.cu_q_lens[seqs])
    new = positions - num_computed[:, None]  # [B, block_kv]
    if step.mutual is not None:
        first = batch.cu_q_lens[seqs][:, None]
        own = tiles.tokens[tile][:, None] - first + jnp.arange(visible.shape[1], dtype=jnp.int32)  # [B, Q]
        is_seen = step.mutual.at[first + new].get(mode="clip")
        visible &= (new[:, None] <= own[..., None]) | is_seen[:, None]
    if tree is None:
        return visible
    word = jnp.clip(new // 32, 0, tree.shape[-1] - 1)
    words = jnp.take_along_axis(tree, jnp.broadcast_to(word[:, None], visible.shape), axis=-1)
    seen = (words >> (new % 32).astype(jnp.uint32)[:, None]) & 1
    return visible & ((new < 0)[:, None] | (seen == 1))


def _distances(tiles: Tiles, tile, block, block_kv: int) -> jax.Array:
    """Return f32 [B, Q, block_kv]: the position of each token of a tile minus that of each key of its block-th block,
    which is negative for later keys. A token's position is that of the last key that it sees.
    """
    positions = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
    return (tiles.end[tile][..., None] - 1 - positions).astype(jnp.float32)


def _biases_of(flipped: jax.Array, tiles: Tiles, tile, block, block_kv: int) -> jax.Array:
    """Return f32 [B, K, Q, G, block_kv]: what each row of a tile adds to the logit of each key of its block-th block, 0
    for keys that are E or more positions away or after the token.

    flipped: [B, K, Q * G, E], the rows' numbers by distance from E - 1 down to 0.
    """
    end = tiles.end[tile]
    by_token = flipped.reshape(*flipped.shape[:2], end.shape[1], -1, extent := flipped.shape[-1])
    # The numbers of a block's keys are neighbours: key j of the block is at index first + j of them.
    padded = jnp.pad(by_token, ((0, 0),) * 4 + ((block_kv, block_kv),))
    first = jnp.clip(extent - end + block * block_kv, -block_kv, extent) + block_kv

    def of_token(numbers: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(numbers, first, block_kv, axis=-1)

    of_tokens = jax.vmap(of_token, (1, 0), 1)
    return jax.vmap(of_tokens)(padded, first).astype(jnp.float32)


def _gather_block(tiles: Tiles, tile, block, step: _Step) -> tuple[jax.Array, jax.Array]:
    """Gather the keys [B, K, block_kv, H] and values [B, K, block_kv, Hv] of the block-th block of a tile from the
    step's pool, in its storage dtype.

    Token scales follow the codes in the last axis. If values lie in keys, both results are the full keys, gathered
    once.

    Values in slots outside [low, high), scales included, are 0, as those slots may hold NaN; their keys are left as
    they are, because their logits are masked. A page id there may be garbage, which the gather clips. On CPUs the two
    branches of a cond differ only in the mask. The cond also keeps XLA from fusing the reshapes below into the gathers,
    which would take three times as long. On GPUs a cond would make the host wait.
    """
    kv, spec = step.kv, step.kv.spec
    if kv.layout == TOKEN_ROWS:
        return _gather_token_rows(tiles, tile, block, step)
    num_pages, num_kv_heads, _ = kv.data.shape
    block_kv = step.sizes.block_kv_of(spec.page_size, tiles.start[0].size)
    block_pages = block_kv // spec.page_size
    num_seqs = tiles.seqs.shape[1]
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
    page_ids = _pages_of_block(tiles, tile, block, block_pages, step.batch.page_table)[:, None]
    rows = (page_ids * num_kv_heads + heads[:, None]).reshape(-1)
    flat = kv.data.reshape(num_pages * num_kv_heads, -1)
    key_width, value_width = spec.page_size * spec.key_width, spec.page_size * spec.value_width

    def unmasked():
        keys = gather_columns(flat, rows, 0, key_width)
        return (keys,) if spec.values_in_keys else (keys, gather_columns(flat, rows, key_width, value_width))

    def masked():
        *keys, values = unmasked()
        positions = block * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
        in_use = (positions >= tiles.low[tile][:, None]) & (positions < tiles.high[tile][:, None])
        in_use = in_use.reshape(num_seqs, 1, block_pages, spec.page_size, 1)
        shape = (num_seqs, num_kv_heads, block_pages, spec.page_size, -1)
        return *keys, jnp.where(in_use, values.reshape(shape), 0).reshape(values.shape)

    if kv.layout == HEAD_TILES_AS_BITS:
        is_whole = (block >= tiles.whole_from[tile]) & (block < tiles.whole_to[tile])
        gathered = lax.cond(is_whole, unmasked, masked)
    else:
        gathered = masked()
    keys, values = (each.reshape(num_seqs, num_kv_heads, block_kv, -1) for each in (gathered[0], gathered[-1]))
    return keys, values


def _pages_of_block(tiles: Tiles, tile, block, block_pages: int, page_table: jax.Array) -> jax.Array:
    """Return the pages i32 [B, block_pages] of the block-th block of a tile of `tiles`, from page_table [S, W]. Columns
    past the table's end give the last column.
    """
    column = jnp.minimum(block * block_pages + jnp.arange(block_pages, dtype=jnp.int32), page_table.shape[1] - 1)
    return page_table[tiles.seqs[tile][:, None], column]


def _gather_token_rows(tiles: Tiles, tile, block, step: _Step) -> tuple[jax.Array, jax.Array]:
    """Do the work of `_gather_block` for a pool of layout TOKEN_ROWS, in which a token is one row, head after head:
    return keys [B, K, block_kv, H] and values [B, K, block_kv, Hv], 0 in slots outside [low, high).
    """
    kv, spec = step.kv, step.kv.spec
    num_seqs, num_kv_heads = tiles.seqs.shape[1], len(step.scale)
    block_pages = step.sizes.block_kv_of(spec.page_size, tiles.start[0].size) // spec.page_size
    page_ids = _pages_of_block(tiles, tile, block, block_pages, step.batch.page_table)
    first, _ = kv.lanes_of_page
    rows = kv.data.at[page_ids].get(mode="clip")[..., first : first + num_kv_heads * spec.row_width]
    rows = rows.reshape(num_seqs, -1, rows.shape[-1])
    keys, values = tokens_of_rows(rows, spec, num_kv_heads)
    positions = block * rows.shape[1] + jnp.arange(rows.shape[1], dtype=jnp.int32)
    in_use = (positions >= tiles.low[tile][:, None]) & (positions < tiles.high[tile][:, None])
    values = keys if values is None else values
    return keys.swapaxes(1, 2), jnp.where(in_use[:, None, :, None], values.swapaxes(1, 2), 0)


def operand(stored: jax.Array, width: int, dtype: jnp.dtype, spec: KVSpec) -> jax.Array:
    """Return the first `width` of the stored elements of each row, [..., n], as an operand [..., width] of `dtype`:
    bfloat16, which must then be the pool's own dtype, or float32.
    """
    stored = stored[..., :width]
    return bits(stored, dtype) if dtype == jnp.bfloat16 else from_storage(stored, spec)


def gather_columns(data: jax.Array, rows: jax.Array, column: int, width: int) -> jax.Array:
    """Return columns [column, column + width) of rows i32 [n] of data [R, C], as [n, width]. Row numbers out of range
    are clipped to the first or last row.
    """
    dims = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1))
    index = jnp.stack([rows, jnp.full_like(rows, column)], axis=-1)
    return lax.gather(data, index, dims, (1, width), mode=lax.GatherScatterMode.CLIP)


def _batch_dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
    """Return the float32 product of a [B, K, M, x] and b [B, K, ., .] over the last axis of a and axis `contract` of b,
    per [B, K].
    """
    return lax.dot_general(a, b, (((3,), (contract,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)

"""The best tokens of each row of logits f32[S, V] without sorting the vocabulary and without gathering it.

Two levels: the maximum of every block of the vocabulary, then the few blocks that can hold one of the n best tokens:
those with the n greatest maxima. So only short rows are sorted where `lax.top_k` is a sort (XLA:GPU). TPUs use
`lax.top_k` itself.

If the vocabulary is split over n devices, each has f32[S, V / n], finds its own best tokens, and sends only those. All
get the same results; ids are those of the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.sampling.fixed_order import VOCAB
from jaxengine.sharding.collectives import gather_parts, num_shards, shard_index, sum_parts

# Block of `best_token`: its row maxima are few, and one block is a cheap read.
_BLOCK = 64
# Smallest block of `_best_blocks`: smaller ones do not shorten the sorted rows by enough.
_MIN_BLOCK = 4


def vocab_size(columns: jax.Array) -> int:
    """Return V, the size of the whole vocabulary, for an array [S, V / n]."""
    return columns.shape[1] * num_shards(VOCAB)


def first_id(columns: jax.Array) -> Any:
    """Return the token id of this device's first column of an array [S, V / n]: 0 if no devices share the vocabulary,
    else i32[].
    """
    return columns.shape[1] * shard_index(VOCAB)


def first_true(mask: jax.Array) -> jax.Array:
    """Return the index of the first True in each row, bool[S, C] -> i32[S]; C if there is none. XLA:CPU's argmax is 4x
    slower.
    """
    size = mask.shape[1]
    return jnp.min(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size), axis=1)


def best_token(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum f32[S, 1] of each row and the lowest token id that has it, i32[S], in one pass over the
    vocabulary.

    logits: f32[S, V / n], the columns of each of n devices; ids are of the whole vocabulary. A row with NaN has the
    maximum +inf and an arbitrary token. NaN is replaced because XLA CPU's max() may ignore it.
    """
    best, ids = lax.platform_dependent(logits, tpu=_reduced_best, default=_blockwise_best)
    if num_shards(VOCAB) == 1:
        return best, ids
    bests, all_ids = _of_all_parts(logits, best, ids[:, None])
    best = jnp.max(bests, axis=1, keepdims=True)
    return best, jnp.take_along_axis(all_ids, first_true(bests == best)[:, None], axis=1)[:, 0]


def row_extreme(extreme: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Return `extreme`, jnp.max or jnp.min, of each row over the whole vocabulary: x [S, V / n] -> [S, 1], the same on
    all n devices.
    """
    own = extreme(x, axis=1, keepdims=True)
    return extreme(gather_parts(own, VOCAB, dimension=1), axis=1, keepdims=True)


def top_values(logits: jax.Array, num_top: int) -> jax.Array:
    """Return the `num_top` best logits of each row, best first, f32[S, num_top]; num_top <= V.

    logits: f32[S, V / n], the columns of each of n devices, which all get the same result.
    """

    own_top = min(num_top, logits.shape[1])

    def blockwise(logits: jax.Array) -> jax.Array:
        block, blocks = _best_blocks(logits, own_top)
        candidates = logits if blocks is None else _take(logits, _tokens(blocks, block))
        return lax.top_k(candidates, own_top)[0]

    values = lax.platform_dependent(logits, tpu=lambda x: lax.top_k(x, own_top)[0], default=blockwise)
    if num_shards(VOCAB) == 1:
        return values
    return lax.top_k(gather_parts(values, VOCAB, dimension=1), num_top)[0]


def top_tokens(logits: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Return the values f32[S, num_top] and ids i32[S, num_top] of each row's best tokens, best first, equal values by
    ascending id.

    logits: f32[S, V / n], the columns of each of n devices, which all return the same, with ids of the whole
    vocabulary. num_top: at most V. Rows with NaN return arbitrary ids.
    """

    own_top = min(num_top, logits.shape[1])

    def blockwise(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        block, blocks = _best_blocks(logits, own_top)
        if blocks is None:
            return _sorted_top(logits, own_top)
        ids = _tokens(jnp.sort(blocks, axis=1), block)  # ascending, so that the order of positions is that of ids
        values, at = lax.top_k(_take(logits, ids), own_top)
        return values, jnp.take_along_axis(ids, at, axis=1)

    values, ids = lax.platform_dependent(logits, tpu=lambda x: _top_k(x, own_top), default=blockwise)
    if num_shards(VOCAB) == 1:
        return values, ids
    values, ids = _of_all_parts(logits, values, ids)  # equal values by ascending id: in each part, and so in all
    values, at = _sorted_top(values, num_top)
    return values, jnp.take_along_axis(ids, at, axis=1)


def take_tokens(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the logits f32[S, V / n] of the tokens ids i32[S, C] >= 0 of the whole vocabulary: f32[S, C], -inf for ids
    >= V. All n devices return the same.
    """
    if num_shards(VOCAB) == 1:
        return _take(logits, ids)
    columns = ids - first_id(logits)
    taken = jnp.take_along_axis(logits, jnp.clip(columns, 0, logits.shape[1] - 1), axis=1)
    # One device has the token: a sum of bit patterns, the others' 0, changes no bit of it.
    here = (columns >= 0) & (columns < logits.shape[1])
    bits = sum_parts(jnp.where(here, lax.bitcast_convert_type(taken, jnp.int32), 0), VOCAB)
    return jnp.where(ids < vocab_size(logits), lax.bitcast_convert_type(bits, jnp.float32), -jnp.inf)


def _take(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the logits at columns `ids` i32[S, n] of each row of one device's columns f32[S, V]: f32[S, n], -inf for
    ids >= V.
    """
    size = logits.shape[1]
    return jnp.where(ids < size, jnp.take_along_axis(logits, jnp.minimum(ids, size - 1), axis=1), -jnp.inf)


def _of_all_parts(logits: jax.Array, values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gather the tokens that each device chose among its columns: values f32[S, C] and ids i32[S, C], counted from the
    device's first column. Return values f32[S, n * C] and vocabulary ids i32[S, n * C], the devices in order.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    pairs = gather_parts(jnp.stack([bits, ids + first_id(logits)], axis=2), VOCAB, dimension=1)
    return lax.bitcast_convert_type(pairs[:, :, 0], jnp.float32), pairs[:, :, 1]


def _sorted_top(x: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Return the `num_top` greatest values of each row of x, in descending order, and their columns, i32, by a stable
    sort of the row.
    """
    columns = jnp.argsort(x, axis=1, descending=True, stable=True)[:, :num_top].astype(jnp.int32)
    return jnp.take_along_axis(x, columns, axis=1), columns


def _top_k(logits: jax.Array, num_top: int) -> tuple[jax.Array, jax.Array]:
    """Return `lax.top_k`'s values f32[S, num_top] and columns i32[S, num_top] as a tuple, because
    `lax.platform_dependent` requires one type of all branches.
    """
    values, ids = lax.top_k(logits, num_top)
    return values, ids


def _reduced_best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum f32[S, 1] of each row of one device's columns f32[S, V] and the first column with it i32[S],
    by reductions of whole rows; NaN counts as +inf.
    """
    logits = jnp.where(jnp.isnan(logits), jnp.inf, logits)
    return jnp.max(logits, axis=1, keepdims=True), jnp.argmax(logits, axis=1).astype(jnp.int32)


def _blockwise_best(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the maximum f32[S, 1] of each row of one device's columns f32[S, V] and the first column with it i32[S],
    by the maxima of blocks; NaN counts as +inf.
    """
    # The barrier: XLA would merge the two maxima into one over the whole row, and read the row twice.
    maxima = lax.optimization_barrier(_block_maxima(jnp.where(jnp.isnan(logits), jnp.inf, logits), _BLOCK))
    best = jnp.max(maxima, axis=1, keepdims=True)
    ids = first_true(maxima == best)[:, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    inside = first_true(_take(logits, ids) == best)[:, None]
    return best, jnp.take_along_axis(ids, jnp.minimum(inside, _BLOCK - 1), axis=1)[:, 0]


def _best_blocks(logits: jax.Array, num_top: int) -> tuple[int, jax.Array | None]:
    """Return the number of tokens in a block, and the block indices i32[S, num_top] of the `num_top` blocks with the
    greatest maxima; None for the latter if num_top is so large a part of the vocabulary that blocks would not help.

    Among blocks of equal maxima those of lower index are chosen, so that of equal tokens those of lower id are found.
    XLA CPU's top_k keeps that order only if num_top is a small part of the row.
    """
    # The two rows that are ordered, maxima and tokens of the best blocks, become about equally long.
    block = 2 ** max(0, round(math.log2(math.sqrt(logits.shape[1] / max(1, num_top)))))
    return block, None if block < _MIN_BLOCK else lax.top_k(_block_maxima(logits, block), num_top)[1]


def _tokens(blocks: jax.Array, block: int) -> jax.Array:
    """Return the token ids of blocks of `block` tokens each: block indices i32[S, n] -> i32[S, n * block]."""
    ids = blocks[:, :, None] * block + jnp.arange(block, dtype=jnp.int32)
    return ids.reshape(blocks.shape[0], -1)


def _block_maxima(x: jax.Array, block: int) -> jax.Array:
    """Return the maximum of each block of `block` columns, [S, V] -> [S, ceil(V / block)]. The last block may be
    shorter.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), constant_values=-jnp.inf)
    return jnp.max(x.reshape(x.shape[0], -1, block), axis=2)

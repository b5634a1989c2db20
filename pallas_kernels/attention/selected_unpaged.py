"""Attention to selected keys over whole sequences without pages: plain XLA with a gradient by queries, keys and values.

What is selected has none, as in training with DeepSeek Sparse Attention (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"). Keys
are selected for BLOCK queries of a row at a time. Attention then computes the logits of all keys, as that of unpaged.py
does, and leaves out those that were not selected.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.unpaged import Schedule, attend_to, attention_schedule, visible_tokens
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.tuning import Tuning

BLOCK = 64  # queries of a row that select keys at a time

_ANY = AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1, sm_scale=1.0)


def selection_schedule(batch: RaggedBatch, *, num_tokens: int, page_size: int, tuning: Tuning) -> Schedule:
    """Return the run of each token and its index in it, for rows of page_size tokens (`attention_schedule`)."""
    return attention_schedule(batch, _ANY, num_tokens=num_tokens, page_size=page_size, tuning=tuning)


def select_keys(
    q: jax.Array,
    weights: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    count: int,
    pooling: jax.Array | None,
) -> jax.Array:
    """Return the positions i32 [B * T, k] of the k = count keys of each token with the highest scores, in the
    order of these, and -1 after the last; with `pooling` the numbers of groups. Arguments are those of
    attention.selected.select_keys, which has checked them. `batch` is not used.
    """
    del batch
    (num_rows, length), group = schedule.offset.shape, 1 if pooling is None else len(pooling)
    q, weights, keys = (
        lax.stop_gradient(each).reshape(num_rows, length, *each.shape[1:]) for each in (q, weights, _index_keys(kv))
    )
    if pooling is not None:
        keys = _pooled(keys, lax.stop_gradient(pooling))
    # A group is found at its last token.
    ends = schedule.offset % group == group - 1

    def select(indices: jax.Array) -> jax.Array:
        products = jnp.einsum("bqij,bsj->bqis", q[:, indices], keys, preferred_element_type=jnp.float32)
        scores = jnp.einsum("bqis,bqi->bqs", jax.nn.relu(products), weights[:, indices])
        found = _best(jnp.where(_seen(indices, schedule) & ends[:, None], scores, -jnp.inf), count)
        places = jax.vmap(lambda offset, each: offset[each])(schedule.offset // group, jnp.maximum(found, 0))
        return jnp.where(found < 0, -1, places)

    return _in_blocks(select, length).reshape(-1, count)


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
    """Compute the attention of q [B * T, N, Hv] with q_rest [B * T, N, H - Hv] over the keys at `positions` i32 [B * T,
    k] of the tokens' runs alone; return o [B * T, N, Hv] in q's dtype. Arguments are those of
    attention.selected.selected_attention, which has checked them.
    """
    schedule = selection_schedule(batch, num_tokens=len(q), page_size=kv.page_size, tuning=tuning)
    num_rows, length = schedule.run.shape
    positions = positions.reshape(num_rows, length, -1)

    def visible(indices: jax.Array) -> jax.Array:
        own = positions[:, indices]
        first = indices[:, None] - schedule.offset[:, indices, None]
        return _marked(jnp.where(own < 0, length, first + own), length)[:, None, None]

    data = kv.data.reshape(num_rows, length, *kv.data.shape[1:])
    k, v = data[..., : spec.head_dim], data[..., : spec.v_head_dim]
    joined = jnp.concatenate((q, q_rest), axis=-1).reshape(num_rows, length, 1, -1, spec.head_dim)
    sinks = None if sinks is None else sinks.reshape(1, 1, -1, 1, 1)
    o, _ = attend_to(joined, k=k, v=v, sinks=sinks, slopes=None, schedule=schedule, spec=spec, visible=visible)
    return o.reshape(q.shape)


def select_blocks(
    q: jax.Array, kv: KVPages, batch: RaggedBatch, schedule: Schedule, *, size: int, count: int, local: int
) -> jax.Array:
    """Return the numbers i32 [B * T, K, k] of the k = count blocks that each KV head of a token selects, the last
    `local` first and the others in the order of their scores, and -1 after the last. Arguments are those of
    attention.selected.select_blocks, which has checked them. `batch` is not used.
    """
    del batch
    num_rows, length = schedule.offset.shape
    q, keys = (lax.stop_gradient(each).reshape(num_rows, length, *each.shape[1:]) for each in (q, _index_keys(kv)))
    numbers, number = jnp.arange(-(-length // size)), schedule.offset // size

    def select(indices: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqkj,bsj->bqks", q[:, indices], keys, preferred_element_type=jnp.float32)
        scores = jnp.where(_seen(indices, schedule)[:, :, None], scores, -jnp.inf)
        lowest = jnp.full((*scores.shape[1:3], len(numbers)), -jnp.inf)
        best = jax.vmap(lambda scores, number: lowest.at[..., number].max(scores))(scores, number)
        last = number[:, indices, None, None]
        return _best(jnp.where((numbers <= last) & (numbers > last - local), jnp.inf, best), count)

    return _in_blocks(select, length).reshape(num_rows * length, -1, count)


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
    """Compute the attention of q [B * T, N, H] over those keys of `blocks` i32 [B * T, K, k] that a token sees; return
    o [B * T, N, Hv] in q's dtype. Arguments are those of attention.selected.block_attention, which has checked them.
    """
    schedule = selection_schedule(batch, num_tokens=len(q), page_size=kv.page_size, tuning=tuning)
    num_rows, length = schedule.run.shape
    num_blocks, number = -(-length // size), schedule.offset // size
    blocks = blocks.reshape(num_rows, length, *blocks.shape[1:])

    def visible(indices: jax.Array) -> jax.Array:
        own = blocks[:, indices]
        chosen = _marked(jnp.where(own < 0, num_blocks, own), num_blocks)  # [B, Q, K, blocks]
        of_keys = jax.vmap(lambda chosen, number: chosen[..., number])(chosen, number)
        return jnp.moveaxis(of_keys & _seen(indices, schedule)[:, :, None], 2, 1)[:, :, None]

    data = kv.data.reshape(num_rows, length, *kv.data.shape[1:])
    k, v = data[..., : spec.head_dim], data[..., spec.head_dim : spec.head_dim + spec.v_head_dim]
    grouped = q.reshape(num_rows, length, data.shape[2], -1, spec.head_dim)
    o, _ = attend_to(grouped, k=k, v=v, sinks=None, slopes=None, schedule=schedule, spec=spec, visible=visible)
    return o.reshape(*q.shape[:2], spec.v_head_dim)


def _index_keys(kv: KVPages) -> jax.Array:
    """Return the indexer's keys [B * T, J] (and gates), which lie after the keys of the first head of `kv`."""
    return kv.data[:, 0, kv.spec.head_dim :]


def _pooled(rows: jax.Array, pooling: jax.Array) -> jax.Array:
    """Return, for each of the tokens [B, T], the key [B, T, J] of the m tokens that end with it: the mean of their
    keys, weighted by the softmax of gates + pooling f32 [m, J], in the dtype of `rows` [B, T, 2 * J], keys followed by
    gates. Of a token with fewer than m - 1 others before it in its row the result is meaningless.
    """
    lags = range(len(pooling) - 1, -1, -1)
    shifted = jnp.stack([jnp.roll(rows, lag, axis=1) for lag in lags], axis=2).astype(jnp.float32)
    keys, gates = jnp.split(shifted, 2, axis=-1)
    return jnp.sum(jax.nn.softmax(gates + pooling, axis=2) * keys, axis=2).astype(rows.dtype)


def _seen(indices: jax.Array, schedule: Schedule) -> jax.Array:
    """Return bool [B, Q, T], whether the tokens at `indices` i32 [Q] of each row see each token of it: those of the
    same run up to their own.
    """
    return visible_tokens(indices, schedule, _ANY)[:, 0, 0]


def _best(scores: jax.Array, count: int) -> jax.Array:
    """Return the indices i32 [..., count] of the largest of scores f32 [..., n], the first of equal ones, -1 in place
    of -inf and of those that there are not.
    """
    most = min(count, scores.shape[-1])
    top, found = lax.top_k(scores, most)
    found = jnp.where(top == -jnp.inf, -1, found).astype(jnp.int32)
    return jnp.pad(found, (*[(0, 0)] * (found.ndim - 1), (0, count - most)), constant_values=-1)


def _marked(indices: jax.Array, size: int) -> jax.Array:
    """Return bool [..., size], True at the last axis of `indices` i32 [..., k]; those from `size` on are left out."""
    flat = indices.reshape(-1, indices.shape[-1])
    marks = jnp.zeros((len(flat), size), bool).at[jnp.arange(len(flat))[:, None], flat].set(True, mode="drop")
    return marks.reshape(*indices.shape[:-1], size)


def _in_blocks(select: Callable[[jax.Array], jax.Array], length: int) -> jax.Array:
    """Return select(indices) [B, Q, ...] of all `length` queries of a row, BLOCK at a time, joined to [B, T, ...]."""
    if length <= BLOCK:
        return select(jnp.arange(length))
    indices = jnp.minimum(jnp.arange(-(-length // BLOCK) * BLOCK), length - 1).reshape(-1, BLOCK)
    found = jnp.moveaxis(lax.map(select, indices), 0, 1)
    return found.reshape(found.shape[0], -1, *found.shape[3:])[:, :length]

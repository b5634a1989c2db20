"""Attention of patches in both directions, within images, frames or windows that are packed one after the other.

Nothing is causal and nothing is cached. Columns of small integers say which patches see each other, so that one program
serves every packing. Neither form stores the scores of all pairs: memory is that of a block of queries.

A patch's result depends only on the patches that it sees, bit for bit, whatever else is in the call, as long as images
begin at multiples of a block of queries (UNIT, unless a tower has another): sums run over blocks of keys that are
counted from the first key that a block of queries sees, and what is hidden from a query adds exact zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

UNIT = 256
_KEYS = 1024
# Patches whose windows are scored at a time.
_BAND = 2048
_HIDDEN = -1e30


class _Running(NamedTuple):
    """Running softmax of queries [..., B] after some keys, all float32.

    largest: the largest score. total: the sum of exponentials. out: [..., B, H], the weighted sum of values.
    """

    largest: jax.Array
    total: jax.Array
    out: jax.Array


def segment_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, *, scale: float, block: int = UNIT
) -> jax.Array:
    """Return the attention within segments, softmax(scale * q k^T) v over the patches of a segment, [P, N, H] in q's
    dtype, with sums in float32.

    Keys are taken in blocks with a running softmax (FlashAttention, Dao et al. 2022, arXiv:2205.14135), from the first
    to the last that any query of a block sees.

    Args:
      q, k, v: [P, N, H], P a multiple of `block`.
      segment: i32[P], number of each patch's segment, -1 for padding, which sees nothing and gets zeros. The patches
        of a segment must be neighbours.
      scale: factor of the products of queries and keys.
      block: number of patches whose queries are taken at a time, the tower's unit.
    """
    out, _ = _in_segments(q, k, v, segment, None, scale=scale, block=block)
    return out


def led_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, *, scale: float) -> jax.Array:
    """Return segment_attention of P patches each block of which, UNIT patches, has a token more: the patches of the
    block see it, and it sees itself and the patches of its segment. [P + P / UNIT, N, H] in q's dtype.

    A block has patches of one segment alone. Equal tokens in all blocks of a segment have equal results.

    Args:
      q, k, v: [P + P / UNIT, N, H], the patches before the tokens of their blocks.
      segment, scale: arguments of segment_attention; segment is i32[P]. What padding gets depends on its token.
    """
    count = len(segment)
    leads = q[count:], k[count:], v[count:]
    out, led = _in_segments(q[:count], k[:count], v[:count], segment, leads, scale=scale, block=UNIT)
    assert led is not None
    return jnp.concatenate([out, led])


def _in_segments(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment: jax.Array,
    leads: tuple[jax.Array, jax.Array, jax.Array] | None,
    *,
    scale: float,
    block: int,
) -> tuple[jax.Array, jax.Array | None]:
    """Return what `segment_attention` returns, [P, N, H], and the results of the tokens `leads`, [P / block, N, H];
    None for None. It is computed `block` queries at a time.

    q, k, v, segment, scale: as in `segment_attention`. leads: queries, keys and values of these tokens, one for each
    block (led_attention).
    """
    # A block of keys may begin anywhere: after the last patch there is room for one.
    keys, values = (jnp.pad(x, ((0, _KEYS), (0, 0), (0, 0))) for x in (k, v))
    of_keys = jnp.pad(segment, (0, _KEYS), constant_values=-1)
    first, end = _bounds(segment)
    bounds = first.reshape(-1, block).min(axis=1), end.reshape(-1, block).max(axis=1)

    def attend(queries: tuple[Any, ...]) -> jax.Array:
        query, own, begin, stop, lead = queries
        if lead is not None:
            query, own = jnp.concatenate([query, lead[0][None]]), jnp.append(own, own[0])
        query = query.swapaxes(0, 1)
        running = _nothing_seen(query)
        if lead is not None:
            (key, value), everyone = (each[:, None] for each in lead[1:]), jnp.ones((len(own), 1), bool)
            running = _with_keys(running, query, key, value, everyone, scale)

        def add(state: tuple[jax.Array, _Running]) -> tuple[jax.Array, _Running]:
            start, running = state
            key, value = (lax.dynamic_slice_in_dim(x, start, _KEYS).swapaxes(0, 1) for x in (keys, values))
            seen = _same(own, lax.dynamic_slice_in_dim(of_keys, start, _KEYS))
            return start + _KEYS, _with_keys(running, query, key, value, seen, scale)

        _, running = lax.while_loop(lambda state: state[0] < stop, add, (begin, running))
        return _result(running).astype(q.dtype).swapaxes(0, 1)

    out = lax.map(attend, (q.reshape(-1, block, *q.shape[1:]), segment.reshape(-1, block), *bounds, leads))
    return out[:, :block].reshape(q.shape), None if leads is None else out[:, block]


def window_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, window: jax.Array, *, longest: int, scale: float
) -> jax.Array:
    """Return the attention within the windows of segments, [P, N, H] in q's dtype; the patches of a window must be
    neighbours.

    Blocks have `window_block(longest)` patches, and queries see the keys of their own block and of its two neighbours.

    Args:
      q, k, v: [P, N, H], P a multiple of the block.
      segment: i32[P], number of each patch's segment, -1 for padding, which sees nothing and gets zeros.
      window: i32[P], number of each patch's window; windows of one segment have different numbers.
      longest: the most patches of a window.
      scale: factor of the products of queries and keys.
    """
    num_patches, num_heads, head_dim = q.shape
    size = window_block(longest)
    blocks = num_patches // size
    together = max(count for count in range(1, max(1, _BAND // size) + 1) if blocks % count == 0)
    span = together * size
    keys, values = (jnp.pad(x, ((size, size), (0, 0), (0, 0))) for x in (k, v))
    places = jnp.pad(jnp.stack([segment, window], axis=1), ((size, size), (0, 0)), constant_values=-1)

    def attend(start: jax.Array) -> jax.Array:
        query = lax.dynamic_slice_in_dim(q, start, span).reshape(together, size, num_heads, head_dim).swapaxes(1, 2)
        key, value, near = (
            _with_neighbours(lax.dynamic_slice_in_dim(x, start, span + 2 * size), size) for x in (keys, values, places)
        )
        own = near[:, size:-size]
        seen = _same(own[..., 0], near[..., 0]) & (own[:, :, None, 1] == near[:, None, :, 1])
        running = _nothing_seen(query)
        running = _with_keys(running, query, key.swapaxes(1, 2), value.swapaxes(1, 2), seen[:, None], scale)
        return _result(running).astype(q.dtype).swapaxes(1, 2)

    out = lax.map(attend, jnp.arange(0, num_patches, span, dtype=jnp.int32))
    return out.reshape(q.shape)


def window_block(longest: int) -> int:
    """Return the number of patches in a block of window_attention: the smallest power of two that is at least
    `longest`.
    """
    return 1 << max(0, longest - 1).bit_length()


def _bounds(segment: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return, for each patch, the index of the first patch of its segment, and of the patch after its last one, i32[P]
    each; P and 0, an empty range, for padding.
    """
    count = segment.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    changes, edge = segment[1:] != segment[:-1], jnp.ones(1, bool)
    first = lax.cummax(jnp.where(jnp.concatenate([edge, changes]), index, 0))
    end = lax.cummin(jnp.where(jnp.concatenate([changes, edge]), index + 1, count), reverse=True)
    return jnp.where(segment >= 0, first, count), jnp.where(segment >= 0, end, 0)


def _same(own: jax.Array, others: jax.Array) -> jax.Array:
    """Return bool[..., B, K]: whether patches `own` [..., B] and `others` [..., K], given by their segments, have the
    same segment; False for padding, -1.
    """
    return (own[..., :, None] == others[..., None, :]) & (own[..., :, None] >= 0)


def _with_neighbours(x: jax.Array, size: int) -> jax.Array:
    """Return the blocks of x [(n + 2) * size, ...] except the first and the last one, each joined with both its
    neighbours: [n, 3 * size, ...].
    """
    blocks = x.reshape(-1, size, *x.shape[1:])
    return jnp.concatenate([blocks[:-2], blocks[1:-1], blocks[2:]], axis=1)


def _nothing_seen(query: jax.Array) -> _Running:
    """Return the running softmax of queries [..., B, H] before any key: a largest score of _HIDDEN, and zeros."""
    zeros = jnp.zeros(query.shape[:-1], jnp.float32)
    return _Running(zeros + _HIDDEN, zeros, jnp.zeros(query.shape, jnp.float32))


def _with_keys(
    running: _Running, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array, scale: float
) -> _Running:
    """Return the running softmax of queries [..., B, H] after adding keys and values [..., K, H], of which a query
    counts those `seen`, bool[..., B, K]. scale: factor of the products of queries and keys.
    """
    scores = jnp.einsum("...qh,...kh->...qk", query, key, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen, scores, _HIDDEN)
    largest = jnp.maximum(running.largest, scores.max(axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0.0)
    kept = jnp.exp(running.largest - largest)
    added = jnp.einsum("...qk,...kh->...qh", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return _Running(largest, running.total * kept + weights.sum(axis=-1), running.out * kept[..., None] + added)


def _result(running: _Running) -> jax.Array:
    """Return the attention output f32[..., B, H] of a running softmax; zeros for queries that have seen no key."""
    return running.out / jnp.maximum(running.total, jnp.finfo(jnp.float32).tiny)[..., None]

"""Attention over whole sequences without pages: plain XLA that has a gradient (see jaxengine.pallas_kernels.runs).

A token attends to tokens of its own run. Rows of more than BLOCK tokens are computed in blocks of queries, and each
block is recomputed for its gradient, so that memory grows with T and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec
from jaxengine.pallas_kernels.runs import run_indexes, run_numbers
from jaxengine.pallas_kernels.tuning import Tuning

BLOCK = 512  # queries of a row that are computed at a time


class Schedule(NamedTuple):
    """Run and index in it of each token, which with `AttentionSpec` determine the tokens of its row that a token
    sees.

    Attributes:
      run: i32 [B, T] number of the token's run.
      offset: i32 [B, T] index of the token in its run.
    """

    run: jax.Array
    offset: jax.Array


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
    """Return the run of each token and its index in it, for attention without pages over B rows of T = page_size
    tokens; see attention.op.attention_schedule.

    batch: its cu_q_lens are the first tokens of runs. num_tokens: B * T. spec, tuning, kv_spec and q_dtype are not
    used. Raises ValueError for `kv_limits`.
    """
    del spec, tuning, kv_spec, q_dtype
    if kv_limits is not None:
        raise ValueError("kv_limits must be None for whole sequences: tokens see none after their own")
    run, offset = (of(batch.cu_q_lens, num_tokens).reshape(-1, page_size) for of in (run_numbers, run_indexes))
    return Schedule(run, offset)


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
    """Compute the attention of B * T queries over the tokens of their own runs: return o [B * T, N, Hv] in q's dtype
    and lse f32 [B * T, N].

    kv: keys and values of these tokens alone, see kv/update_unpaged.py. `schedule` and `spec` determine what a token
    sees; `batch` is not used. q_rest, sinks, slopes and biases are those of attention.op.ragged_paged_attention, which
    has checked the arguments. Raises ValueError for `tree_mask`.
    """
    del batch
    if tree_mask is not None:
        raise ValueError("tree_mask must be None for whole sequences: they have no drafts")
    q = q if q_rest is None else jnp.concatenate((q, q_rest), axis=-1)
    num_rows, length = schedule.run.shape
    data = kv.data.reshape(num_rows, length, *kv.data.shape[1:])
    k = data[..., : spec.head_dim]
    v = data[..., : spec.v_head_dim] if spec.values_in_keys else data[..., spec.head_dim :]
    q = q.reshape(num_rows, length, data.shape[2], -1, spec.head_dim)
    if biases is not None:  # taken along with the queries
        q = jnp.concatenate((q, biases.reshape(*q.shape[:4], -1)), axis=-1)
    sinks = None if sinks is None else sinks.reshape(1, *q.shape[2:4], 1, 1)
    slopes = None if slopes is None else slopes.reshape(*q.shape[2:4], 1, 1)
    visible = partial(visible_tokens, schedule=schedule, spec=spec)
    o, lse = attend_to(q, k=k, v=v, sinks=sinks, slopes=slopes, schedule=schedule, spec=spec, visible=visible)
    return o.reshape(num_rows * length, -1, spec.v_head_dim), lse.reshape(num_rows * length, -1)


def attend_to(q: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of queries [B, T, K, G, H] of whole rows, BLOCK of each row at a time. Return the output
    [B, T, K, G, Hv] in q's dtype and lse f32 [B, T, K, G].

    options: keyword arguments of `_attend`, which describe keys and values and which of them a query sees.
    """
    attend = partial(_attend, **options)
    o, lse = attend(jnp.arange(q.shape[1]), q) if q.shape[1] <= BLOCK else _in_blocks(attend, q)
    return o.astype(q.dtype), lse


def _in_blocks(attend: Callable[..., tuple[jax.Array, jax.Array]], q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Call `attend` on all queries [B, T, ...], BLOCK of each row at a time, recomputing each block for its gradient.
    Return (o, lse) of all, [B, T, ...] each.

    attend: function of (indices i32 [Q] in the row, queries [B, Q, ...]) that returns (o, lse), [B, Q, ...] each.
    """
    length = q.shape[1]
    indices = jnp.minimum(jnp.arange(-(-length // BLOCK) * BLOCK), length - 1).reshape(-1, BLOCK)
    # The last block repeats the last query; the repeated results are cut off and have no gradient.
    results = lax.map(jax.checkpoint(lambda block: attend(block, q[:, block])), indices)
    o, lse = (jnp.moveaxis(part, 0, 1).reshape(q.shape[0], -1, *part.shape[3:])[:, :length] for part in results)
    return o, lse


def _attend(
    indices: jax.Array,
    q: jax.Array,
    *,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    slopes: jax.Array | None,
    schedule: Schedule,
    spec: AttentionSpec,
    visible: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of queries [B, Q, K, G, H], each followed by its biases by distance [E] if there are any,
    at `indices` i32 [Q] of their rows over keys k [B, T, K, H] and values v [B, T, K, Hv]. Return output f32 [B, Q, K,
    G, Hv] and lse f32 [B, Q, K, G], sinks included.

    visible(indices): whether a query sees each token of its row, at least one: bool, of a shape that broadcasts to [B,
    K, G, Q, T]. sinks: f32 [1, K, G, 1, 1], one more logit of each head, without a value, or None. slopes: f32 [K, G,
    1, 1], subtracted from a logit per position of distance to the key, or None.
    """
    q, biases = jnp.split(q, [spec.head_dim], axis=-1)
    logits = jnp.einsum("bqkgh,bskh->bkgqs", q, k, preferred_element_type=jnp.float32) * spec.sm_scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    if slopes is not None:
        distance = schedule.offset[:, indices, None] - schedule.offset[:, None]
        logits = logits - slopes * distance[:, None, None].astype(jnp.float32)
    if spec.bias_extent:
        logits = logits + _biases_of(biases, schedule.offset[:, indices, None] - schedule.offset[:, None])
    logits = jnp.where(visible(indices), logits, -jnp.inf)
    largest = jnp.max(logits, axis=-1, keepdims=True)  # finite: a query sees some token
    largest = lax.stop_gradient(largest if sinks is None else jnp.maximum(largest, sinks))
    shares = jnp.exp(logits - largest)
    total = jnp.sum(shares, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    o = jnp.einsum("bkgqs,bskh->bqkgh", (shares / total).astype(v.dtype), v, preferred_element_type=jnp.float32)
    return o, jnp.moveaxis((largest + jnp.log(total))[..., 0], 3, 1)


def _biases_of(biases: jax.Array, distance: jax.Array) -> jax.Array:
    """Return f32 [B, K, G, Q, T]: of each query's biases [B, Q, K, G, E] those at i32 distances [B, Q, T], 0 outside
    [0, E).
    """
    extent = biases.shape[-1]
    index = jnp.clip(distance, 0, extent - 1)[:, :, None, None]
    index = jnp.broadcast_to(index, (*biases.shape[:4], index.shape[-1]))
    found = jnp.moveaxis(jnp.take_along_axis(biases.astype(jnp.float32), index, axis=-1), 1, 3)
    return jnp.where(((distance >= 0) & (distance < extent))[:, None, None], found, 0.0)


def visible_tokens(indices: jax.Array, schedule: Schedule, spec: AttentionSpec) -> jax.Array:
    """Return bool [B, 1, 1, Q, T], whether the tokens at `indices` i32 [Q] of each row see each token of it: one of the
    same run in `schedule` that causality, window and chunk of `spec` allow.
    """
    run, offset = (part[:, None] for part in schedule)
    own_run, own_offset = (part[:, indices, None] for part in schedule)
    visible = run == own_run
    if spec.causal:
        visible &= offset <= own_offset
    if spec.window is not None:
        visible &= jnp.abs(offset - own_offset) < spec.window
    if spec.chunk is not None:
        visible &= own_offset // spec.chunk - offset // spec.chunk <= spec.lookback
    return visible[:, None, None]

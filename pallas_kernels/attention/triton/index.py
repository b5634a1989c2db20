"""Scores of an indexer's keys on NVIDIA GPUs, in a Pallas-Triton kernel that reads each key once, from its page.

Selection is that of attention.xla; only the scores of a span of keys come from here. A program multiplies a block of
keys by the queries of all tokens of a tile, and writes one score for each token and key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxengine.pallas_kernels.attention.ragged_batch import RaggedBatch
from jaxengine.pallas_kernels.attention.triton.attend import why_not_pool
from jaxengine.pallas_kernels.attention.triton.kernel import masked_columns, tile_of
from jaxengine.pallas_kernels.attention.xla import selected, selected_blocks
from jaxengine.pallas_kernels.attention.xla.attend import log_once
from jaxengine.pallas_kernels.attention.xla.schedule import Schedule
from jaxengine.pallas_kernels.attention.xla.selected import KeyScores, Span
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec
from jaxengine.pallas_kernels.triton import padded

MOST_WIDTH, MOST_HEADS = 256, 128  # elements of a key, and heads of an indexer
KEYS, FEW_KEYS = 128, 64  # keys of a program, and of one with wider keys than KEYS or more rows than MOST_ROWS
MOST_ROWS = 64  # rows of queries that are multiplied at a time, unless a token has more heads


def select_keys(
    q: jax.Array,
    weights: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    count: int,
    pooling: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """Return the positions i32 [T, k] of the k = count keys of each token with the highest scores, which are computed
    by a kernel on an NVIDIA GPU.

    Arguments are those of attention.selected.select_keys, which has checked them. interpret: run the kernel on the CPU.
    What the kernel does not support runs as plain XLA, and a warning says why.
    """
    reason = "an indexer of pooled keys" if pooling is not None else None
    if q.shape[1] > MOST_HEADS:
        reason = f"an indexer of {q.shape[1]} heads, more than {MOST_HEADS}"
    scores = _scores_of("select_keys", reason, q, kv, batch, interpret)
    return selected.select_keys(q, weights, kv, batch, schedule, count=count, pooling=pooling, scores=scores)


def select_blocks(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    size: int,
    count: int,
    local: int,
    interpret: bool = False,
) -> jax.Array:
    """Return the numbers i32 [T, K, k] of the k = count blocks that each KV head of a token selects, by scores that a
    kernel computes on an NVIDIA GPU.

    Arguments are those of attention.selected.select_blocks, which has checked them. interpret: run the kernel on the
    CPU. What the kernel does not support runs as plain XLA, and a warning says why.
    """
    scores = _scores_of("select_blocks", None, q, kv, batch, interpret)
    options: dict[str, Any] = {"size": size, "count": count, "local": local, "scores": scores}
    return selected_blocks.select_blocks(q, kv, batch, schedule, **options)


def _scores_of(
    op: str, reason: str | None, q: jax.Array, kv: KVPages, batch: RaggedBatch, interpret: bool
) -> KeyScores | None:
    """Return the function that scores spans with the kernel; None if it cannot, for this `reason` or another, which is
    logged.
    """
    reason, width = reason or why_not_pool(q.dtype, kv, interpret=interpret), q.shape[2]
    if not reason and (width % 8 or width > MOST_WIDTH):
        reason = f"keys of {width} elements, which is no multiple of 8 up to {MOST_WIDTH}"
    if reason:
        log_once(f"Triton kernel of {op}", reason)
        return None
    return partial(key_scores, kv=kv, batch=batch, dtype=q.dtype, interpret=interpret)


@dataclass(frozen=True)
class _Plan:
    """Static sizes of a call.

    Attributes:
      spec: that of the pool.
      width: elements of a key.
      heads: rows of queries of a token, whose products are added up; 0 for products as they are.
      rows: rows of queries that are multiplied at a time, a power of two.
      steps: how many times.
      keys: keys of a program, a power of two.
      dtype: dtype of both operands of the products.
    """

    spec: KVSpec
    width: int
    heads: int
    rows: int
    steps: int
    keys: int
    dtype: Any


class _Refs(NamedTuple):
    """References that the kernel gets, in order: operands, then the scores.

    Attributes:
      q: [B, Q * I, J].
      weights: f32 [B, Q, I], None for products as they are.
      pool: [P, K, C].
      page_table: i32 [S, W].
      seqs: i32 [B].
      stop: i32 [B] one past the last key that a row sees.
      first: i32 [1] first key of the span.
      o: f32 [B, Q, keys], or [B, Q * I, keys].
    """

    q: Any
    weights: Any
    pool: Any
    page_table: Any
    seqs: Any
    stop: Any
    first: Any
    o: Any


def key_scores(
    q: jax.Array,
    weights: jax.Array | None,
    seqs: jax.Array,
    ends: jax.Array,
    span: Span,
    *,
    kv: KVPages,
    batch: RaggedBatch,
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Return the scores f32 [B, Q, n] of the n keys of a span, undefined for keys that a row does not see.

    q: [B, Q * I, J] of the I heads of each of Q tokens. weights: f32 [B, Q, I], of the sum over heads of relu(q . key);
    None for the products themselves, [B, Q * I, n]. seqs, ends: sequences i32 [B], and how many keys their rows see i32
    [B, Q]. dtype: that of the queries before they were widened for plain XLA, in which they are multiplied.
    """
    num_seqs, num_rows, width = q.shape
    heads = 0 if weights is None else weights.shape[2]
    rows = padded(heads or min(num_rows, MOST_ROWS))
    plan = _Plan(
        spec=kv.spec,
        width=width,
        heads=heads,
        rows=rows,
        steps=-(-num_rows // (heads or rows)),
        keys=KEYS if width <= KEYS and rows <= MOST_ROWS else FEW_KEYS,
        dtype=dtype,
    )
    num_keys = span.most * span.size
    operands = q.astype(dtype), *(() if weights is None else (weights,)), kv.data, batch.page_table, seqs
    first = jnp.reshape(span.first * span.size, (1,)).astype(jnp.int32)

    def body(*refs: Any) -> None:
        _score(plan, _Refs(*(refs if heads else (refs[0], None, *refs[1:]))))

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((num_seqs, plan.steps if heads else num_rows, num_keys), jnp.float32),
        grid=(num_seqs, -(-num_keys // plan.keys)),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="index_scores",
    )(*operands, jnp.max(ends, axis=1), first)


def _score(plan: _Plan, refs: _Refs) -> None:
    """Score a block of keys for all rows of a sequence; the program's numbers are (sequence, block of the span). Writes
    nothing if no row sees a key of the block.
    """
    spec, index = plan.spec, pl.program_id(0)
    number = pl.program_id(1) * plan.keys + jnp.arange(plan.keys, dtype=jnp.int32)
    stop, begin = refs.stop[index], refs.first[0]

    @pl.when(begin + pl.program_id(1) * plan.keys < stop)
    def _():
        key = begin + number
        seen = key < stop
        page = plt.load(refs.page_table.at[refs.seqs[index], key // spec.page_size], mask=seen, other=0)[:, None]
        start = spec.page_size * spec.key_width + key % spec.page_size * spec.value_width
        keys = tile_of(plan.dtype, refs.pool, page, 0, start[:, None], plan.width, seen)
        lane = jnp.arange(plan.rows, dtype=jnp.int32)

        def score_rows(step, _):
            row = step * (plan.heads or plan.rows) + lane
            live = (lane < plan.heads) if plan.heads else (row < refs.q.shape[1])
            columns, mask = masked_columns(plan.width, live)
            q = plt.load(refs.q.at[index, row[:, None], columns], mask=mask, other=0)
            products = plt.dot(q, keys, trans_b=True)
            in_span = number < refs.o.shape[2]
            if not plan.heads:
                target = refs.o.at[index, row[:, None], number[None]]
                plt.store(target, products, mask=live[:, None] & in_span[None])
                return
            weights = plt.load(refs.weights.at[index, step, lane], mask=live, other=0)
            scores = jnp.sum(weights[:, None] * jnp.maximum(products, 0.0), axis=0)
            plt.store(refs.o.at[index, step, number], jnp.where(scores == 0, 0.0, scores), mask=in_span)

        lax.fori_loop(0, plan.steps, score_rows, None)

"""Scores of an indexer's keys for TPUs: a Mosaic kernel that copies the lanes of these keys from pages, and no others.

XLA for TPUs gathers whole rows of the pool, latents and values included. Selection is that of attention.xla; only the
scores of a span of keys come from here. A grid step multiplies one chunk of a sequence's keys, while the next chunk's
pages are copied. Pages that no row of the sequence sees are not copied.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.attention.ragged_batch import RaggedBatch
from jaxengine.pallas_kernels.attention.tpu.tiles import LANES, SUBLANES
from jaxengine.pallas_kernels.attention.xla import selected, selected_blocks
from jaxengine.pallas_kernels.attention.xla.attend import log_once
from jaxengine.pallas_kernels.attention.xla.schedule import Schedule
from jaxengine.pallas_kernels.attention.xla.selected import KeyScores, Span
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params
from jaxengine.pallas_kernels.tuning import TpuAttention, tuning_of


def select_keys(
    q: jax.Array,
    weights: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule,
    *,
    count: int,
    pooling: jax.Array | None,
    sizes: TpuAttention | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return the positions i32 [T, k] of the k = count keys of each token with the highest scores, which are computed
    by a kernel on a TPU.

    Arguments are those of attention.selected.select_keys, which has checked them. sizes: the chip's, None for those of
    the table. interpret: pltpu.InterpretParams to run on a CPU. What the kernel does not support runs as plain XLA, and
    a warning says why.
    """
    reason = _unsupported(q, kv)
    if not reason and pooling is not None:
        reason = "an indexer of pooled keys"
    elif not reason and q.shape[1] % SUBLANES:
        reason = f"an indexer of {q.shape[1]} heads, which is no multiple of {SUBLANES}"
    scores = _scores_of("select_keys", reason, kv, batch, sizes, interpret)
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
    sizes: TpuAttention | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Return the numbers i32 [T, K, k] of the k = count blocks that each KV head of a token selects, by scores that a
    kernel computes on a TPU.

    Arguments are those of attention.selected.select_blocks, which has checked them. sizes, interpret: as in
    `select_keys`. What the kernel does not support runs as plain XLA, and a warning says why.
    """
    scores = _scores_of("select_blocks", _unsupported(q, kv), kv, batch, sizes, interpret)
    options: dict[str, Any] = {"size": size, "count": count, "local": local, "scores": scores}
    return selected_blocks.select_blocks(q, kv, batch, schedule, **options)


def _unsupported(q: jax.Array, kv: KVPages) -> str:
    """Return why the kernel cannot score the pool's keys for queries `q`: float16, or pages of a number of tokens that
    is no multiple of SUBLANES; "" if it can.
    """
    if jnp.float16 in (q.dtype, kv.data.dtype):
        return "float16, which TPUs do not have"
    return f"pages of {kv.page_size} tokens, no multiple of {SUBLANES}" if kv.page_size % SUBLANES else ""


def _scores_of(
    op: str, reason: str, kv: KVPages, batch: RaggedBatch, sizes: TpuAttention | None, interpret: Any
) -> KeyScores | None:
    """Return the function that scores spans with the kernel; None with a `reason` why it cannot, which is logged."""
    if reason:
        log_once(f"TPU kernel of {op}", reason)
        return None
    return functools.partial(
        key_scores, kv=kv, batch=batch, sizes=sizes or tuning_of("tpu").tpu_attention, interpret=interpret
    )


class _Plan(NamedTuple):
    """Static sizes of a call.

    Attributes:
      lanes: range of lanes of a row of the pool that are copied.
      pages: pages of a chunk.
      page_size: tokens of a page.
      chunks: chunks of a sequence.
      cores: TensorCores that share the sequences in turn.
      group: rows of queries whose products are added up, 1 for products as they are.
      dtype: dtype of both operands of the products.
    """

    lanes: tuple[int, int]
    pages: int
    page_size: int
    chunks: int
    cores: int
    group: int
    dtype: Any

    @property
    def keys(self) -> int:
        """Number of keys of a chunk."""
        return self.pages * self.page_size


def key_scores(
    q: jax.Array,
    weights: jax.Array | None,
    seqs: jax.Array,
    ends: jax.Array,
    span: Span,
    *,
    kv: KVPages,
    batch: RaggedBatch,
    sizes: TpuAttention,
    interpret: Any,
) -> jax.Array:
    """Return the scores f32 [B, Q, n] of the n keys of a span, undefined for keys that a row does not see.

    q: [B, Q * I, J] of the I heads of each of Q tokens, in the dtype of the products. weights: f32 [B, Q, I], of the
    sum over heads of relu(q . key); None for the products themselves, [B, Q * I, n]. seqs, ends: sequences i32 [B], and
    how many keys their rows see i32 [B, Q].
    """
    num_rows, width = q.shape[1:]
    first = kv.lanes_of_page[0] + kv.spec.value_column
    begin = first // LANES * LANES
    lanes = begin, -(-(first + width) // LANES) * LANES
    unit = LANES // math.gcd(kv.page_size, LANES)
    wanted = max(min(sizes.single_keys, sizes.score_bytes // (4 * num_rows)) // kv.page_size // unit, 1) * unit
    num_pages = -(-span.most * span.size // kv.page_size)
    pages = min(wanted, -(-num_pages // unit) * unit)
    chunks = -(-num_pages // pages)
    group = 1 if weights is None else weights.shape[2]
    plan = _Plan(lanes, pages, kv.page_size, chunks, sizes.cores, group, q.dtype)
    num_seqs = -(-len(q) // sizes.cores) * sizes.cores
    q = jnp.pad(q, ((0, num_seqs - len(q)), (0, 0), (first - begin, lanes[1] - first - width)))
    column = span.first * (span.size // kv.page_size) + jnp.arange(chunks * pages, dtype=jnp.int32)
    table = batch.page_table[seqs[:, None], jnp.minimum(column, batch.page_table.shape[1] - 1)]
    counts = -(-jnp.max(ends, axis=1) // kv.page_size) - span.first * (span.size // kv.page_size)
    more = (0, num_seqs - len(seqs))
    scores = _call(
        jnp.pad(jnp.clip(counts, 0, chunks * pages), more),
        jnp.pad(table, (more, (0, 0))).reshape(-1),
        q,
        None if weights is None else jnp.pad(weights.reshape(len(seqs), -1, 1), (more, (0, 0), (0, 0))),
        kv.data,
        plan=plan,
        buffer_limit=sizes.vmem_limit_bytes,
        interpret=interpret,
    )
    return scores[: len(seqs), :, : span.most * span.size]


def _call(
    counts: jax.Array,
    table: jax.Array,
    q: jax.Array,
    weights: jax.Array | None,
    pool: jax.Array,
    *,
    plan: _Plan,
    buffer_limit: int,
    interpret: Any,
) -> jax.Array:
    """Call the kernel; return scores f32 [B, Q, chunks * keys of a chunk].

    counts: i32 [B], pages to read of each sequence. table: i32 [B * n], ids of the pages of all chunks. q: [B, Q * I,
    lanes]. weights: f32 [B, Q * I, 1] or None. buffer_limit: VMEM that the kernel may use.
    """
    num_seqs, num_rows, width = q.shape
    steps = num_seqs // plan.cores

    def of_sequence(core, step, chunk, *_):
        return step * plan.cores + core, 0, 0

    def of_chunk(core, step, chunk, *_):
        return step * plan.cores + core, 0, chunk

    out_rows = num_rows // plan.group
    return pl.pallas_call(
        functools.partial(_score_chunk, plan=plan, steps=steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.cores, steps, plan.chunks),
            in_specs=[
                pl.BlockSpec((1, num_rows, width), of_sequence),
                None if weights is None else pl.BlockSpec((1, num_rows, 1), of_sequence),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, out_rows, plan.keys), of_chunk),
            scratch_shapes=[
                pltpu.VMEM((2, plan.pages, plan.page_size, width), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_seqs, out_rows, plan.chunks * plan.keys), jnp.float32),
        compiler_params=compiler_params(interpret, "parallel", "arbitrary", "arbitrary", vmem_limit_bytes=buffer_limit),
        interpret=interpret,
        name="index_scores",
    )(counts, table, q, weights, pool)


def _score_chunk(counts, table, q, weights, pool, o, buffer, arrived, *, plan: _Plan, steps: int) -> None:
    """Write the scores of the keys of a grid step's chunk to `o`, once its pages have arrived; write nothing for a
    chunk without pages to read. Start the copies of the core's next chunk, and in its first step those of its own.
    Operands are those of `_call`, then the scratch. steps: grid steps of a core.
    """
    core, step, chunk = (pl.program_id(axis) for axis in range(3))
    index = step * plan.chunks + chunk  # of the core's chunks

    def live(index):
        """Return how many pages of the core's index-th chunk are read, and the index of the first in `table`."""
        seq, own = index // plan.chunks * plan.cores + core, lax.rem(index, plan.chunks)
        count = jnp.clip(counts[seq] - own * plan.pages, 0, plan.pages)
        return count, (seq * plan.chunks + own) * plan.pages

    def start(index):
        count, first = live(index)
        slot = lax.rem(index, 2)

        def copy(page: jax.Array, _: None) -> None:
            source = pool.at[table[first + page], :, pl.ds(plan.lanes[0], plan.lanes[1] - plan.lanes[0])]
            pltpu.make_async_copy(source, buffer.at[slot, page], arrived.at[slot]).start()

        lax.fori_loop(0, count, copy, None)

    pl.when(index == 0)(lambda: start(index))
    pl.when(index + 1 < steps * plan.chunks)(lambda: start(index + 1))
    count = live(index)[0]
    slot = lax.rem(index, 2)

    @pl.when(count > 0)
    def _():
        pages = buffer.at[slot, pl.ds(0, count)]
        pltpu.make_async_copy(pages, pages, arrived.at[slot]).wait()
        o[0] = _scores(q, weights, buffer[slot], plan)


def _scores(q: Any, weights: Any, pages: jax.Array, plan: _Plan) -> jax.Array:
    """Return the scores f32 [Q, keys] of the keys in `pages` [pages, page_size, lanes]. q, weights: references to the
    queries and weights of a sequence; without weights (None) scores are the dot products. A weighted score of zero is
    +0.
    """
    keys = pages.reshape(plan.keys, -1).astype(plan.dtype)
    precision = lax.Precision.HIGHEST if plan.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract_last = (((1,), (1,)), ((), ()))
    products = lax.dot_general(q[0], keys, contract_last, precision, preferred_element_type=jnp.float32)
    if weights is None:
        return products
    weighted = jax.nn.relu(products) * weights[0]
    scores = jnp.sum(weighted.reshape(-1, plan.group, plan.keys), axis=1)
    return jnp.where(scores == 0, 0.0, scores)

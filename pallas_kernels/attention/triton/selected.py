"""Sparse attention on NVIDIA GPUs in a Pallas-Triton kernel: attention to listed slots of a pool.

What a token, or a KV head of it, selected is a list of slots of the pool, and the kernel reads these rows and no
others. A list is cut into parts of a fixed number of keys, each of which is a program's: so a few tokens fill a card,
and a token's sums are taken in the order of its own list, whatever else is in the batch. XLA adds the parts up, in
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.triton.attend import why_not_pool
from jaxengine.pallas_kernels.attention.triton.kernel import LOG2E, NOTHING, masked_columns, no_keys, tile_of
from jaxengine.pallas_kernels.attention.xla import selected, selected_blocks
from jaxengine.pallas_kernels.attention.xla.attend import log_once
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.triton import LEAST, padded
from jaxengine.pallas_kernels.tuning import TritonAttention, Tuning

MOST_PARTS = 16  # of a list
MOST_VALUE, MOST_KEY = 512, 256  # elements of a value, and of a key, where values lie in keys of what follows them
NARROW = 256  # most elements of a key and its value of which a program has `selected_keys` at a time


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
    interpret: bool = False,
) -> jax.Array:
    """Compute the attention of q [T, N, Hv] with q_rest [T, N, H - Hv] over the keys at `positions` i32 [T, k] on an
    NVIDIA GPU: return o [T, N, Hv] in q's dtype.

    Arguments are those of attention.selected.selected_attention, which has checked them. interpret: run the kernel on
    the CPU. What the kernel does not support runs as plain XLA, and a warning says why.
    """
    reason = why_not_pool(q.dtype, kv, interpret=interpret) or _why_not(spec, *spec.query_dims)
    if reason:
        log_once("Triton kernel of selected_attention", reason)
        rest: dict[str, Any] = {"spec": spec, "sinks": sinks, "tuning": tuning}
        return selected.selected_attention(q, q_rest, kv, batch, positions, **rest)
    plan = _plan(q, kv, spec, positions.shape[1], tuning.triton_attention, from_value=True)

    def attend(q: jax.Array, q_rest: jax.Array, positions: jax.Array, seqs: jax.Array, ends: jax.Array) -> jax.Array:
        seen = (positions >= 0) & (ends > 0)[:, None]
        slots = _slots(positions, seen, batch.page_table[seqs], kv.page_size)
        return _attend_slots((q, q_rest), kv, slots, sinks, plan, interpret)

    return selected.over_tokens(kv, batch, (q, q_rest, positions), attend, plan.tokens)


def block_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    blocks: jax.Array,
    *,
    spec: AttentionSpec,
    size: int,
    tuning: Tuning,
    interpret: bool = False,
) -> jax.Array:
    """Compute the attention of q [T, N, H] over the keys of `blocks` i32 [T, K, k] on an NVIDIA GPU: return o [T, N,
    Hv] in q's dtype.

    Arguments are those of attention.selected.block_attention, which has checked them. interpret: run the kernel on the
    CPU. What the kernel does not support runs as plain XLA, and a warning says why.
    """
    if reason := why_not_pool(q.dtype, kv, interpret=interpret) or _why_not(spec, spec.v_head_dim, spec.head_dim):
        log_once("Triton kernel of block_attention", reason)
        return selected_blocks.block_attention(q, kv, batch, blocks, spec=spec, size=size, tuning=tuning)
    plan = _plan(q, kv, spec, blocks.shape[2] * size, tuning.triton_attention, from_value=False)

    def attend(q: jax.Array, blocks: jax.Array, seqs: jax.Array, ends: jax.Array) -> jax.Array:
        positions = blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)
        seen = (blocks >= 0)[..., None] & (positions < ends[:, None, None, None])
        positions, seen = (each.reshape(len(q), -1) for each in (positions, seen))
        slots = _slots(positions, seen, batch.page_table[seqs], kv.page_size)
        return _attend_slots((q,), kv, slots.reshape(-1, blocks.shape[2] * size), None, plan, interpret)

    return selected.over_tokens(kv, batch, (q, blocks), attend, plan.tokens)


def _why_not(spec: AttentionSpec, value: int, key: int) -> str:
    """Return why the kernel does not support values and keys of so many columns, where values lie in keys those that
    follow; "" if it does.
    """
    if value % 8 or key % 8 or not 0 < value <= MOST_VALUE or not 0 < key <= MOST_KEY:
        return f"head dims {spec.head_dim}/{spec.v_head_dim} are not multiples of 8 within the kernel's sizes"
    return ""


def _slots(positions: jax.Array, seen: jax.Array, page_table: jax.Array, page_size: int) -> jax.Array:
    """Return the slots i32 [T, n], page * page_size + offset, of positions i32 [T, n] of sequences with the pages
    page_table i32 [T, W]; -1 where `seen` is False.
    """
    positions = jnp.where(seen, positions, 0)
    pages = jnp.take_along_axis(page_table, positions // page_size, axis=1)
    return jnp.where(seen, pages * page_size + positions % page_size, -1)


@dataclass(frozen=True)
class _Plan:
    """Static sizes of a call.

    Attributes:
      spec: its heads are those of this device.
      page_size, stride: tokens of a page, and elements of a token in its tile of keys.
      columns: for each operand of queries, the first column of its keys and their number.
      value: the same of values. They are the keys of the first operand if `from_value`.
      rows: query heads of a program, which share a KV head.
      part, block: keys of a part, and keys that are multiplied at a time; powers of two.
      tokens: tokens that attend at a time, which bounds the partial results.
      dtype: dtype of queries and operands of products.
      stages: Triton's stages.
    """

    spec: AttentionSpec
    page_size: int
    stride: int
    columns: tuple[tuple[int, int], ...]
    value: tuple[int, int]
    from_value: bool
    rows: int
    part: int
    block: int
    tokens: int
    dtype: Any
    stages: int


def _plan(
    q: jax.Array, kv: KVPages, spec: AttentionSpec, count: int, sizes: TritonAttention, *, from_value: bool
) -> _Plan:
    """Return the sizes of a call for lists of `count` keys. The more query heads share a KV head, the longer are parts,
    from sizes.least_part to sizes.most_part keys; of long lists there are at most MOST_PARTS. from_value: whether
    values are the first columns of keys, whose other columns a second operand of queries meets.
    """
    inner, key = spec.v_head_dim, spec.head_dim
    columns = ((0, inner), (inner, key - inner)) if from_value else ((0, key),)
    block = sizes.selected_keys // (1 if key + (0 if from_value else inner) <= NARROW else 2)
    # Partial results, which are written and read in float32, are about a quarter of the keys' bytes at most.
    part = min(max(LEAST * padded(spec.group_size), sizes.least_part), sizes.most_part)
    part = max(min(part, padded(count)), padded(-(-count // MOST_PARTS)), block)
    token_bytes = 4 * -(-count // part) * spec.num_q_heads * (inner + 2)
    return _Plan(
        spec=spec,
        page_size=kv.page_size,
        stride=kv.spec.key_width,
        columns=columns,
        value=columns[0] if from_value else (key, inner),
        from_value=from_value,
        rows=min(padded(spec.group_size), sizes.selected_rows),
        part=part,
        block=block,
        tokens=max(sizes.partial_bytes // token_bytes, 1),
        dtype=q.dtype,
        stages=sizes.selected_stages,
    )


class _Refs(NamedTuple):
    """References that the kernel gets, in order: operands, then partial results.

    Attributes:
      q: [T, N, columns] for each operand of queries.
      pool: [P, K, C].
      slots: i32 [T * K, n], -1 for none.
      scale: f32 [1] factor of the products.
      o: f32 [parts, T * K, G, Hv] sums of value codes.
      largest: f32 [parts, T * K, G] in base 2.
      total: f32 [parts, T * K, G].
    """

    q: tuple[Any, ...]
    pool: Any
    slots: Any
    scale: Any
    o: Any
    largest: Any
    total: Any


def _attend_slots(
    q: tuple[jax.Array, ...],
    kv: KVPages,
    slots: jax.Array,
    sinks: jax.Array | None,
    plan: _Plan,
    interpret: bool,
) -> jax.Array:
    """Return the attention [T, N, Hv], in q's dtype, of each KV head of a token over the keys in its slots i32 [T * K,
    n], -1 for none. q: an array [T, N, columns] for each of `plan.columns`.
    """
    spec, (entries, count) = plan.spec, slots.shape
    parts, group, width = -(-count // plan.part), spec.group_size, spec.v_head_dim
    scale = jnp.full((1,), spec.sm_scale, jnp.float32)
    if kv.k_scale is not None:
        scale = scale * kv.k_scale[:1]
    shape = parts, entries, group
    operands = len(q)
    partial = pl.pallas_call(
        lambda *refs: _attend(plan, _Refs(refs[:operands], *refs[operands:])),
        out_shape=[jax.ShapeDtypeStruct(each, jnp.float32) for each in ((*shape, width), shape, shape)],
        grid=(entries, -(-group // plan.rows), parts),
        compiler_params=plt.CompilerParams(num_warps=8 if plan.rows > LEAST else 4, num_stages=plan.stages),
        interpret=interpret,
        name="selected_rows",
    )(*q, kv.data, slots, scale)
    rows = len(q[0]), spec.num_q_heads
    sums, largest, total = (x.reshape(parts, *rows, *x.shape[3:]) for x in partial)
    return _merged(sums, largest, total, sinks, kv.k_scale).astype(plan.dtype)


def _merged(
    sums: jax.Array, largest: jax.Array, total: jax.Array, sinks: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """Return the attention f32 [T, N, Hv] from its parts: sums of values f32 [parts, T, N, Hv], undefined where a part
    has no key, maxima in base 2 and denominators f32 [parts, T, N]. sinks: f32 [N]. scale: f32 [1] of values' codes.

    Parts are added one after the other, so that the order does not depend on how XLA cuts a sum.
    """
    top = reduce(jnp.maximum, largest)
    if sinks is not None:
        sinks = jnp.maximum(sinks * LOG2E, NOTHING)
        top = jnp.maximum(top, sinks)
    # NaN stays NaN.
    weights = [jnp.where(own != 0, jnp.exp2(most - top), 0.0) for own, most in zip(total, largest, strict=True)]
    divisor = reduce(add, (weight * own for weight, own in zip(weights, total, strict=True)))
    if sinks is not None:
        divisor = divisor + jnp.where(sinks > NOTHING, jnp.exp2(sinks - top), 0.0)
    live = (total != 0)[..., None]
    shares = (jnp.where(live[part], sums[part], 0.0) * weight[..., None] for part, weight in enumerate(weights))
    o = reduce(add, shares) / jnp.where(divisor == 0, 1.0, divisor)[..., None]
    return o if scale is None else o * scale[0]


def _attend(plan: _Plan, refs: _Refs) -> None:
    """Compute a part of the softmax of some query heads that share a KV head; the program's numbers are (token * K +
    KV head, group of query heads, part). Sums of values are not written if the part has no key.
    """
    spec, entry, part = plan.spec, pl.program_id(0), pl.program_id(2)
    token, head = entry // spec.num_kv_heads, entry % spec.num_kv_heads
    lane = pl.program_id(1) * plan.rows + jnp.arange(plan.rows, dtype=jnp.int32)
    live = lane < spec.group_size
    number, count = jnp.arange(plan.part, dtype=jnp.int32), refs.slots.shape[1]
    first = part * plan.part
    listed = plt.load(refs.slots.at[entry, first + number], mask=first + number < count, other=-1)
    stop = jnp.max(jnp.where(listed >= 0, number + 1, 0))

    def queries(operand: int):
        columns, mask = masked_columns(plan.columns[operand][1], live)
        query_head = head * spec.group_size + lane
        return plt.load(refs.q[operand].at[token, query_head[:, None], columns], mask=mask, other=0)

    q = [queries(operand) for operand in range(len(refs.q))]
    scale = refs.scale[0] * LOG2E

    def attend_block(block, carry):
        largest, total, acc = carry
        number = first + block * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
        slot = plt.load(refs.slots.at[entry, number], mask=number < count, other=-1)
        seen = slot >= 0
        slot = jnp.maximum(slot, 0)[:, None]
        page, start = slot // plan.page_size, slot % plan.page_size * plan.stride

        def tile(first: int, width: int):
            return tile_of(plan.dtype, refs.pool, page, head, start + first, width, seen)

        keys = [tile(*columns) for columns in plan.columns]
        values = keys[0] if plan.from_value else tile(*plan.value)
        products = reduce(add, (plt.dot(rows, own, trans_b=True) for rows, own in zip(q, keys, strict=True)))
        logits = jnp.where(seen[None], products * scale, -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(logits, axis=1))
        decay, weights = jnp.exp2(largest - new_largest), jnp.exp2(logits - new_largest[:, None])
        total = total * decay + jnp.sum(weights, axis=1)
        acc = acc * decay[:, None] + plt.dot(weights.astype(plan.dtype), values)
        return new_largest, total, acc

    softmax = lax.fori_loop(0, pl.cdiv(stop, plan.block), attend_block, no_keys(plan.rows, spec.v_head_dim))
    largest, total, acc = softmax
    plt.store(refs.largest.at[part, entry, lane], largest, mask=live)
    plt.store(refs.total.at[part, entry, lane], total, mask=live)

    @pl.when(stop > 0)
    def _():
        columns, mask = masked_columns(spec.v_head_dim, live)
        plt.store(refs.o.at[part, entry, lane[:, None], columns], acc, mask=mask)

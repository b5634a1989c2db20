"""Paged attention on CPUs as machine code: the registry's functions of kind "native".

Dispatches the public operation to the handlers of code.py. Attention that they do not support (`why_not`) runs as plain
XLA, which reads the same pool.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.xla import attend as attend_xla
from jaxengine.pallas_kernels.attention.xla import schedule as schedule_xla
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec
from jaxengine.pallas_kernels.native.library import has_feature, target_name
from jaxengine.pallas_kernels.tuning import Tuning

logger = logging.getLogger(__name__)

LANES, MAX_HEAD_DIM = 16, 512  # LANES: of code.py, as WORDS
WORDS = "attention_words"
_ROWS = 48  # most rows, tokens times query heads of a KV head, of an item
_SMALL = 1 << 19  # multiplications of a step up to which one thread is as fast as several


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Work list of one step's attention, a pytree, for T tokens in at most n tiles. A tile is up to block_q consecutive
    tokens of a sequence; an item of work is a tile and a KV head.

    Attributes:
      tiles: i32 [3, n] sequence, first token and number of tokens of each tile.
      ranges: i32 [2, T] first key that a token sees, and one past the last, 0 for padding.
      sizes: i32 [4] tiles in use, tokens of a page, block_q, whether one thread suffices.
      tuning, kv_limits: for calls that run as plain XLA.
    """

    tiles: jax.Array
    ranges: jax.Array
    sizes: jax.Array
    tuning: Tuning = field(metadata={"static": True})
    kv_limits: jax.Array | None = None


def why_not(spec: AttentionSpec, page_size: int, *, tree_mask: bool = False) -> str | None:
    """Return the reason why the handlers do not support an attention; None if they support it.
    Not supported: values in keys, head dims that are not multiples of LANES up to MAX_HEAD_DIM, page sizes that are not
    multiples of LANES, more than 48 query heads per KV head, `spec.xla_only`, `spec.mutual`, and a tree mask.
    tree_mask: whether there is one.
    """
    if spec.values_in_keys:
        return "values that lie in keys"
    if spec.head_dim % LANES or spec.v_head_dim % LANES or max(spec.head_dim, spec.v_head_dim) > MAX_HEAD_DIM:
        return f"head dims {spec.head_dim}/{spec.v_head_dim} are not multiples of {LANES} up to {MAX_HEAD_DIM}"
    if page_size % LANES:
        return f"pages of {page_size} tokens, which are no multiple of {LANES}"
    if spec.group_size > _ROWS:
        return f"{spec.group_size} query heads per KV head are more than {_ROWS}"
    if spec.xla_only is not None:
        return spec.xla_only
    if spec.mutual or tree_mask:
        return "a tree mask" if tree_mask else "keys that only some tokens see"
    return None


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
) -> Schedule | schedule_xla.Schedule:
    """Return the tiles of the step, or XLA's work list if `spec` or page_size rules the handlers out.

    Arguments are those of attention.op.attention_schedule, which has checked them. kv_spec and q_dtype are not used:
    there are handlers for all.
    """
    del kv_spec, q_dtype
    if why_not(spec, page_size) is not None:
        options = {"num_tokens": num_tokens, "page_size": page_size, "tuning": tuning, "kv_limits": kv_limits}
        return schedule_xla.attention_schedule(batch, spec, **options)
    num_seqs = batch.kv_lens.shape[0]
    live = jnp.arange(num_seqs, dtype=jnp.int32) < batch.num_seqs
    q_lens = jnp.where(live, batch.cu_q_lens[1:] - batch.cu_q_lens[:-1], 0)
    block_q = min(max(_ROWS // spec.group_size, 1), num_tokens)
    tiles = (q_lens + block_q - 1) // block_q
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(num_tokens // block_q + min(num_seqs, num_tokens), dtype=jnp.int32)
    seqs = jnp.minimum(schedule_xla.num_true(index[:, None] >= ends), num_seqs - 1)
    offset = (index - (ends - tiles)[seqs]) * block_q
    counts = jnp.clip(q_lens[seqs] - offset, 0, block_q)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(schedule_xla.num_true(live & (token[:, None] >= batch.cu_q_lens[1:])), num_seqs - 1)
    valid = _in_sequences(batch, num_tokens)
    rule = schedule_xla.KeyRule(batch, q_lens, spec, kv_limits)
    ranges = jnp.stack(schedule_xla.visible_keys(rule, row, token - batch.cu_q_lens[row], valid))
    work = jnp.sum(ranges[1], dtype=jnp.float32) * spec.num_q_heads * (spec.head_dim + spec.v_head_dim)
    used = jnp.minimum(ends[-1], index.size)  # fewer only in a batch that contradicts itself
    sizes = jnp.stack([used, jnp.int32(page_size), jnp.int32(block_q), (work <= _SMALL).astype(jnp.int32)])
    return Schedule(jnp.stack([seqs, batch.cu_q_lens[seqs] + offset, counts]), ranges, sizes, tuning, kv_limits)


def ragged_paged_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule | schedule_xla.Schedule,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    **rest: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of queries over the pages of their sequences on a CPU: return o [T, N, Hv] in q's dtype and
    lse f32 [T, N].

    Arguments are those of attention.op.ragged_paged_attention, which has checked them; sinks, tree_mask and those of
    `rest` may be None. schedule: result of this module's `attention_schedule`. Plain XLA computes what the handlers do
    not support, which is logged once per reason, and calls whose schedule is XLA's.
    """
    num_tokens, heads, _ = q.shape
    reason = why_not(spec, kv.page_size, tree_mask=tree_mask is not None)
    if reason is not None:
        _log_once(reason)
    if reason is not None or not isinstance(schedule, Schedule):  # as of layers that share a schedule
        if isinstance(schedule, Schedule):
            sizes = {"num_tokens": num_tokens, "page_size": kv.page_size, "tuning": schedule.tuning}
            schedule = schedule_xla.attention_schedule(batch, spec, **sizes, kv_limits=schedule.kv_limits)
        options = {"spec": spec, "sinks": sinks, "tree_mask": tree_mask}
        return attend_xla.ragged_paged_attention(q, kv, batch, schedule, **options, **rest)
    sinks = jnp.full((heads,), -jnp.inf, jnp.float32) if sinks is None else sinks
    scale = jnp.full((heads // spec.group_size,), spec.sm_scale, jnp.float32)
    scale = scale if kv.k_scale is None else scale * kv.k_scale
    shapes = [jax.ShapeDtypeStruct((num_tokens, heads, width), jnp.float32) for width in (spec.v_head_dim, 2)]
    in_words = q.dtype == jnp.bfloat16 and kv.spec.kv_dtype == "bfloat16" and has_feature("avx512bf16")
    handler, q_given = (WORDS, q) if in_words else (f"attention_{kv.spec.kv_dtype}", q.astype(jnp.float32))
    call = jax.ffi.ffi_call(target_name(handler), shapes, vmap_method="sequential")
    step, factors = (batch.page_table, schedule.tiles, schedule.ranges), (scale, jnp.float32([spec.soft_cap or 0.0]))
    o, softmax = call(q_given, kv.data, *step, *factors, sinks, schedule.sizes)
    if kv.v_scale is not None:
        o = o * jnp.repeat(kv.v_scale, spec.group_size)[:, None]
    lse = softmax[..., 0] + jnp.log(softmax[..., 1])
    valid = _in_sequences(batch, num_tokens)[:, None]
    o, lse = jnp.where(valid[..., None], o, 0.0), jnp.where(valid, lse, -jnp.inf)
    return o.astype(q.dtype), lse


def _in_sequences(batch: RaggedBatch, num_tokens: int) -> jax.Array:
    """Return bool [num_tokens], whether each token belongs to a sequence."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    return (token >= batch.cu_q_lens[0]) & (token < batch.cu_q_lens[batch.num_seqs])


@functools.cache
def _log_once(reason: str) -> None:
    """Log that attention runs as plain XLA, once per process and reason."""
    logger.info("attention runs as plain XLA, not as machine code: %s", reason)

"""The attention kernels that `benchmarks.tpu_cycles` compares, each bare and with loops of fixed length.

Owns what has to be known of each kernel's inside for that: which loop walks the keys, and which of ours is the work on
one block. Runs in the child process of `benchmarks.tpu_profile`, so it may change the kernels' modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as jax_kernel

from benchmarks.tpu_profile import bare_kernel, drop_copies, fix_trips
from pallas_kernels.attention.op import AttentionSpec, ragged_paged_attention
from pallas_kernels.attention.ragged_batch import RaggedBatch
from pallas_kernels.attention.tpu import kernel as our_kernel
from pallas_kernels.attention.tpu import pages as our_pages
from pallas_kernels.attention.tpu.schedule import block_q_of
from pallas_kernels.kv.pages import KVSpec, alloc
from pallas_kernels.tuning import TpuAttention, tuning_of

Case = tuple[Callable, Any, dict]  # what `tpu_profile.profile` wants of a builder
TILES = 8  # of one token, in a grid step of ours
VMEM_LIMIT_BYTES = 48 << 20  # for jax's kernel, whose default does not fit its own block sizes


def ours(
    *,
    heads: tuple[int, int],
    head_dim: int,
    page_size: int,
    max_pages: int,
    num_tokens: int,
    decode: bool,
    part: str,
    trips: int,
) -> Case:
    """One grid step of our kernel, which does `part` `trips` times, at the block sizes of a step of `num_tokens`.

    part: "block" folds one block of keys that all rows see, "edge" one with a mask, "tile" opens and closes a tile
    around an "edge".
    """

    facts = {}

    def work_item(refs, plan, segment, item, slot, sub):
        if (plan.block_q == 1) == decode:  # both kinds of call are traced
            facts.update(block_q=plan.block_q, block_kv=plan.block_kv)
        first_key = segment.first_page * plan.page_size + item[1] * plan.block_kv
        if part == "tile":
            for statistic, start in ((refs.largest, our_kernel.NOTHING_SEEN), (refs.total, 0.0), (refs.acc, 0.0)):
                statistic[...] = jnp.full_like(statistic, start)
        our_kernel._fold_block(refs, plan, segment, first_key, slot, sub, masked=part != "block")
        if part == "tile":
            for head in range(len(plan.keys)):
                our_kernel._close_head(refs, plan, sub, head)

    our_kernel._work_item = work_item
    drop_copies(our_pages)
    fix_trips(our_kernel, lambda _: trips)
    block_q = block_q_of(TpuAttention(), num_tokens, heads[0] // heads[1])
    num_tokens = TILES if decode else block_q  # what one grid step holds
    num_seqs = num_tokens if decode else 1
    spec = AttentionSpec(*heads, head_dim, head_dim, head_dim**-0.5)
    kv = jax.eval_shape(lambda: alloc(KVSpec(64, page_size, heads[1], head_dim, head_dim, "bfloat16"), layout="tpu"))
    q = jax.ShapeDtypeStruct((num_tokens, heads[0], head_dim), jnp.bfloat16)

    def attend(q, kv, batch):
        table = tuning_of("tpu")  # of the chip that is being traced for
        # Cycles of one core, and tiles of the whole step's size in this part of it.
        sizes = replace(table.tpu_attention, cores=1, min_block_q=block_q, max_block_q=block_q)
        tuning = replace(table, tpu_attention=sizes)
        return ragged_paged_attention(q, kv, batch, spec=spec, tuning=tuning)

    name = "paged_attention_single" if decode else "paged_attention_runs"
    return *bare_kernel(attend, (q, kv, _batch(num_seqs, num_tokens, max_pages)), name), facts


def theirs(
    *, heads: tuple[int, int], head_dim: int, page_size: int, max_pages: int, block_pages: int, block_q: int, trips: int
) -> Case:
    """One grid step of jax's own kernel, which walks `trips` blocks of keys of one sequence."""
    fix_trips(jax_kernel, lambda cond: trips if "kv_blk" in cond.__name__ else 1)
    jax_kernel.MultiPageAsyncCopyDescriptor.start = lambda self: None
    jax_kernel.MultiPageAsyncCopyDescriptor.wait = lambda self: self._vmem_buf
    attend = functools.partial(
        jax_kernel.ragged_paged_attention,
        sm_scale=head_dim**-0.5,
        num_kv_pages_per_block=block_pages,
        num_queries_per_block=block_q,
        vmem_limit_bytes=VMEM_LIMIT_BYTES,
    )
    batch = _batch(block_q, block_q, max_pages)
    args = (
        jax.ShapeDtypeStruct((block_q, heads[0], head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((64, page_size, 2 * heads[1], head_dim), jnp.bfloat16),
        batch.kv_lens,
        batch.page_table,
        batch.cu_q_lens,
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )
    return *bare_kernel(attend, args, "ragged_paged_attention_kernel"), {}


def _batch(num_seqs: int, num_tokens: int, max_pages: int) -> RaggedBatch:
    shapes: tuple[Any, ...] = ((num_seqs + 1,), (num_seqs,), (num_seqs, max_pages), (num_tokens,), (), ())
    return RaggedBatch(*(cast(jax.Array, jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes))

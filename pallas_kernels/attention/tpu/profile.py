"""One block of keys of the TPU attention kernel by itself, repeated, so that a compiler can report its cost.

libtpu's profile counts a loop with a dynamic trip count as about one pass, and gives up on copies that another pass
waits for. So this is the kernel's arithmetic on one tile, at the sizes of a step, without the walk over segments and
without copies. The result is meaningless: the program is compiled and never run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.tpu import kernel
from jaxengine.pallas_kernels.attention.tpu.attend import ragged_paged_attention
from jaxengine.pallas_kernels.attention.tpu.pages import (
    FETCH_BLOCK,
    FETCH_SEGMENT,
    SLOT,
    Plan,
    Refs,
    fetch,
    next_item,
    read_segment,
    segments_before,
    wait_for,
)
from jaxengine.pallas_kernels.attention.tpu.schedule import attention_schedule, block_q_of
from jaxengine.pallas_kernels.attention.tpu.tiles import LANES
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from jaxengine.pallas_kernels.tuning import tuning_of

# Work of a trip: fold a block that all rows see, fold one with a mask, or open and close a tile around the latter.
PARTS = ("block", "edge", "tile")
# Or start or await the copies of a block's pages. Trips are unrolled, because bundles are counted, not cycles.
COPIES = ("fetch", "wait")
WALK = "walk"  # or run the kernel itself over all segments and blocks, without trips
_PAGES = 64  # pages of the pool


class Sizes(NamedTuple):
    """Tokens of a tile, and keys of a block, of the work that a profile repeats.

    Attributes:
      block_q: tokens of a tile.
      block_kv: keys of a block.
    """

    block_q: int
    block_kv: int


def block_profile(
    spec: AttentionSpec,
    *,
    decode: bool,
    num_tokens: int,
    page_size: int,
    max_pages: int,
    dtype: Any,
    kv_dtype: Any,
    part: str,
    trips: int,
) -> tuple[Callable, tuple[Any, ...], list[Sizes]]:
    """Return (function, shapes of its arguments, sizes) for a program of one grid step on one core that repeats a part
    of the kernel. sizes is an empty list, to which tracing the function writes the Sizes of a repetition.

    Call this and trace the function under the mesh of the TPU (`jax.set_mesh`) whose tuning is to be used. For values
    in the keys of one kv head, the profiled head dim is that of `spec` rounded up to a multiple of LANES.

    Args:
      spec, page_size: the layer's heads, and tokens of a page.
      decode: whether to profile tiles of one token, else of a run.
      num_tokens: tokens of the step whose block sizes are used.
      max_pages: width of the page table.
      dtype, kv_dtype: of queries and of the pool.
      part: one of PARTS or COPIES, or WALK, which runs the kernel itself. Raises ValueError for any other.
      trips: repetitions; not used for WALK.
    """
    if part not in (allowed := (*PARTS, *COPIES, WALK)):
        raise ValueError(f"part must be one of {', '.join(allowed)}, got {part!r}")
    sizes: list[Sizes] = []
    if spec.num_kv_heads == 1 and spec.values_in_keys:
        # Keys padded to their window: padding the queries would be a copy within the chip, at which a profile ends.
        spec = replace(spec, head_dim=-(-spec.head_dim // LANES) * LANES)

    def body(*refs: Any, plan: Plan) -> None:
        if (plan.block_q == 1) == decode:  # a step with runs has a kernel for single tokens too
            sizes[:] = [Sizes(plan.block_q, plan.block_kv)]
            if part == WALK:
                return kernel.attention_kernel(*refs, plan=plan)
            (_repeat if part in PARTS else _copy)(Refs(*refs), plan, part, trips)

    def attend(q: jax.Array, kv: Any, batch: RaggedBatch) -> Any:
        table = tuning_of("tpu")  # sizes of the chip that is being traced for
        block_q = block_q_of(table.tpu_attention, num_tokens, spec)
        own = replace(table.tpu_attention, cores=1, min_block_q=block_q, max_block_q=block_q)
        tuning = replace(table, tpu_attention=own)
        schedule = attention_schedule(batch, spec, num_tokens=q.shape[0], page_size=page_size, tuning=tuning)
        return ragged_paged_attention(q, kv, batch, schedule, spec=spec, sinks=None, tree_mask=None, body=body)

    tuning = tuning_of("tpu").tpu_attention
    tokens = tuning.single_tiles if decode else block_q_of(tuning, num_tokens, spec)
    seqs = tokens if decode else 1
    pool = KVSpec(_PAGES, page_size, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, kv_dtype, spec.values_in_keys)
    kv = jax.eval_shape(functools.partial(alloc, pool, platform="tpu"))
    q = jax.ShapeDtypeStruct((tokens, spec.num_q_heads, spec.head_dim), dtype)
    shapes: tuple[Any, ...] = ((seqs + 1,), (seqs,), (seqs, max_pages), (tokens,), (), ())
    batch = RaggedBatch(*(cast(jax.Array, jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes))
    return attend, (q, kv, batch), sizes


def _repeat(refs: Refs, plan: Plan, part: str, trips: int) -> None:
    """Repeat the work of `part`, one of PARTS, `trips` times on the first segment, without copies. "block" folds a
    block of keys without a mask and "edge" with one; "tile" does as "edge", and also resets the running softmax before
    and writes the results after.
    """
    segment = read_segment(refs, (jnp.int32(0), jnp.int32(0)))

    def trip(index: jax.Array, carry: None) -> None:
        first_key = segment.first_page * plan.page_size + index * plan.block_kv
        slot = lax.rem(index, plan.blocks.buffers)
        if part == "tile":
            for statistic, start in ((refs.largest, kernel.NOTHING_SEEN), (refs.total, 0.0), (refs.acc, 0.0)):
                statistic[...] = jnp.full_like(statistic, start)
        kernel._fold_block(refs, plan, segment, first_key, slot, segment.tile, masked=part != "block")
        if part == "tile":
            for head in range(len(plan.keys)):
                kernel._close_head(refs, plan, segment.tile, head)

    lax.fori_loop(0, trips, trip, None)


def _copy(refs: Refs, plan: Plan, part: str, trips: int) -> None:
    """Start (part "fetch") or await ("wait") the copies of the `trips` items from the cursor on, and set the cursor to
    the item after them.
    """
    cursor, end = refs.cursor, segments_before(refs, refs.walk.tile_start.shape[0])
    item = cursor[FETCH_SEGMENT], cursor[FETCH_BLOCK]
    for _ in range(trips):
        if part == "fetch":
            item = fetch(refs, plan, item, cursor[SLOT], end)
        else:
            segment = read_segment(refs, item)
            wait_for(refs, plan, segment, item, cursor[SLOT])
            item = next_item(refs, plan, segment, item)
    cursor[FETCH_SEGMENT], cursor[FETCH_BLOCK] = item

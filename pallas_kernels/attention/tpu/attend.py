"""Ragged paged attention for TPU: prepares the operands of the kernel and calls it for single tokens and for runs.

Contains the arrangement of queries, masks and results around kernel.py. The order of the work is in schedule.py, the
sizes in tiles.py. Reads pools of layout TOKEN_ROWS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.tpu import schedule as schedules
from jaxengine.pallas_kernels.attention.tpu import words
from jaxengine.pallas_kernels.attention.tpu.kernel import LOG2E, NOTHING_SEEN, attention_kernel
from jaxengine.pallas_kernels.attention.tpu.pages import Plan
from jaxengine.pallas_kernels.attention.tpu.schedule import Schedule, Walk
from jaxengine.pallas_kernels.attention.tpu.tiles import (
    LANES,
    SUBLANES,
    Window,
    buffer_lanes,
    check_dtypes,
    check_page_size,
    choose_blocks,
    choose_parts,
    fits_smem,
    key_windows,
    value_windows,
)
from jaxengine.pallas_kernels.attention.xla import schedule as xla_schedule
from jaxengine.pallas_kernels.attention.xla.attend import attend_in_place_of
from jaxengine.pallas_kernels.kv.pages import KVPages, check_token_scales
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params
from jaxengine.pallas_kernels.tuning import TpuAttention


def attention_schedule(batch: RaggedBatch, spec: AttentionSpec, **options: Any) -> Schedule | xla_schedule.Schedule:
    """Return the TPU kernel's work list of the step, or XLA's for what the kernel does not support: slopes and
    biases by distance, and chunks before a token's own (`spec.xla_only`).

    options: as in attention.op.attention_schedule; `tuning` is required. Raises ValueError where the kernel is chosen
    and `kv_limits` or a window without `causal` is given.
    """
    return (schedules if spec.xla_only is None else xla_schedule).attention_schedule(batch, spec, **options)


def ragged_paged_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Schedule | xla_schedule.Schedule,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    q_rest: jax.Array | None = None,
    slopes: jax.Array | None = None,
    biases: jax.Array | None = None,
    interpret: Any = False,
    body: Callable = attention_kernel,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of queries over the pages of their sequences on a TPU: return o [T, N, Hv] in q's dtype and
    lse f32 [T, N].

    Arguments are those of attention.op.ragged_paged_attention, which has checked them; sinks, tree_mask, q_rest, slopes
    and biases may be None. schedule: result of this module's `attention_schedule`; if it is XLA's, XLA computes the
    attention and a warning says so once. Otherwise the leading decodes and the longer runs are one kernel call each.
    interpret: pltpu.InterpretParams to run on a CPU. body: the kernel of a grid step, see profile.py. Raises ValueError
    for dtypes and page sizes that the TPU kernel does not support, and for token scales.
    """
    check_token_scales(kv.platform, kv.spec)
    if isinstance(schedule, xla_schedule.Schedule):
        rest = {"spec": spec, "sinks": sinks, "tree_mask": tree_mask, "q_rest": q_rest, "slopes": slopes}
        rest |= {"biases": biases}
        return attend_in_place_of("TPU kernel", str(spec.xla_only), q, kv, batch, schedule, **rest)
    check_dtypes(q.dtype, kv.data.dtype)
    check_page_size(kv.page_size)
    num_tokens, num_seqs = q.shape[0], batch.kv_lens.shape[0]
    call = functools.partial(
        attend_tiles, kv=kv, batch=batch, spec=spec, sinks=sinks, sizes=schedule.sizes, interpret=interpret, body=body
    )
    if schedule.runs is None:
        assert schedule.single is not None
        return call(q, q_rest, tree_mask, schedule.single, block_q=1)
    block_q = schedules.block_q_of(schedule.sizes, num_tokens, spec)
    o, lse = call(q, q_rest, tree_mask, schedule.runs, block_q=block_q)
    if schedule.single is None or batch.num_decode is None:
        return o, lse
    head_of = functools.partial(lax.slice_in_dim, start_index=0, limit_index=num_seqs)
    # The barrier keeps reads and update apart: XLA would copy an array that it reads and updates in one fusion.
    run_o, run_lse = lax.optimization_barrier((head_of(o), head_of(lse)))
    rest_head, tree_head = (None if x is None else head_of(x) for x in (q_rest, tree_mask))
    single_o, single_lse = call(head_of(q), rest_head, tree_head, schedule.single, block_q=1)
    is_single = (jnp.arange(num_seqs) < jnp.minimum(batch.num_decode, batch.num_seqs))[:, None]
    # Updated in place: a select over all tokens would read and write the results of the runs once more.
    o = o.at[:num_seqs].set(jnp.where(is_single[..., None], single_o, run_o))
    return o, lse.at[:num_seqs].set(jnp.where(is_single, single_lse, run_lse))


def attend_tiles(
    q: jax.Array,
    q_rest: jax.Array | None,
    tree_mask: jax.Array | None,
    walk: Walk,
    *,
    kv: KVPages,
    batch: RaggedBatch,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    block_q: int,
    sizes: TpuAttention,
    interpret: Any,
    body: Callable = attention_kernel,
    seen: jax.Array | None = None,
    in_words: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run one kernel call: return o [T, N, Hv] in q's dtype and lse f32 [T, N] of the tokens of `walk`, 0 and -inf for
    all others, save that those of a tile without segments between two with some may be undefined.

    block_q: tokens per tile of `walk`. sizes: the tuning that `walk` was built with. seen: i32 [T, n], for tiles of one
    token, 0 for those of the first n keys of its sequence that it does not see; None if it sees all up to the end of
    its segment. in_words: whether the data of `kv` are in the form of `words.word_rows`, with pages of the rows that
    share words. The other arguments are those of `ragged_paged_attention`.
    """
    num_tokens, num_q_heads, _ = q.shape
    group = spec.group_size
    num_kv_heads = num_q_heads // group
    # A tile of one token has only the heads of a group as rows: padded to full sublane tiles, even if rows are idle.
    padded_group = group if block_q > 1 else -(-group // SUBLANES) * SUBLANES
    num_tiles = -(-num_tokens // block_q)
    first_lane, end_lane = kv.lanes_of_page
    row_lanes = end_lane - first_lane
    blocks = choose_blocks(
        sizes,
        rows=padded_group * block_q,
        num_kv_heads=num_kv_heads,
        row_bytes=buffer_lanes(row_lanes) * kv.data.dtype.itemsize,
        page_size=kv.page_size,
        max_pages=batch.page_table.shape[1],
        num_tiles=num_tiles,
        single=block_q == 1,
    )
    cores = sizes.cores
    padded_tiles = -(-num_tiles // (blocks.tiles * cores)) * blocks.tiles * cores
    padded_tokens = padded_tiles * block_q
    page_table, far_page_table, table_width = _place_page_table(batch.page_table, sizes)
    plan = Plan(
        spec,
        block_q,
        padded_group,
        kv.page_size,
        blocks,
        key_windows(num_kv_heads, spec),
        value_windows(num_kv_heads, spec),
        jnp.bfloat16 if q.dtype == jnp.bfloat16 and kv.data.dtype != jnp.float32 else jnp.float32,
        sinks is not None,
        0 if tree_mask is None else tree_mask.shape[1],
        cores,
        sizes.mxu_columns,
        choose_parts(
            sizes,
            num_kv_heads=num_kv_heads,
            group=padded_group,
            block_q=block_q,
            pages=blocks.pages,
            page_size=kv.page_size,
        ),
        table_width,
        (first_lane, end_lane),
        seen is not None,
        in_words=in_words,
    )
    if q_rest is not None and num_kv_heads > 1:  # each head has its own offset in its window
        q, q_rest = jnp.concatenate((q, q_rest), axis=-1), None
    arrange = functools.partial(_arrange_queries, plan=plan, num_kv_heads=num_kv_heads, padded_tokens=padded_tokens)
    queries = arrange(q.astype(plan.operand_dtype))
    rest = None if q_rest is None else arrange(q_rest.astype(plan.operand_dtype))
    if seen is not None:
        seen = _pad_rows(_pad_axis(seen, 1, -(-seen.shape[1] // plan.block_kv) * plan.block_kv), padded_tokens)
    o, lse = _call_kernel(
        walk,
        page_table,
        far_page_table,
        *_scales(kv, spec, num_kv_heads),
        None if sinks is None else jnp.maximum(sinks * LOG2E, NOTHING_SEEN).reshape(num_kv_heads, group),
        queries,
        rest,
        None if tree_mask is None else _pad_rows(lax.bitcast_convert_type(tree_mask, jnp.int32), padded_tokens),
        seen,
        kv.data if in_words else words.tile_rows(kv.data),
        plan=plan,
        o_dtype=q.dtype,
        vmem_limit_bytes=sizes.vmem_limit_bytes,
        interpret=interpret,
        body=body,
    )
    return _arrange_results(o, lse, plan, group, num_tokens)


def _place_page_table(page_table: jax.Array, sizes: TpuAttention) -> tuple[jax.Array | None, jax.Array | None, int]:
    """Return the page table [S, W], flattened, as (SMEM operand [S * W], None, W) if it fits (`fits_smem`), else as
    (None, HBM operand [S * W'], W'), padded with zeros to W' columns, W rounded up to a multiple of LANES.
    """
    width = page_table.shape[1]
    if fits_smem(sizes, page_table.shape):
        return page_table.reshape(-1), None, width
    width = -(-width // LANES) * LANES  # a row is copied on its own
    return None, _pad_axis(page_table, 1, width).reshape(-1), width


def _scales(kv: KVPages, spec: AttentionSpec, num_kv_heads: int) -> tuple[jax.Array, jax.Array]:
    """Return two factors f32 [K]: of q.k (the softmax scale of `spec`) and of values (1), each times the pool's scale
    if it has one. num_kv_heads: K, of the device's shard.

    The softmax works in base 2, so the first includes log2(e), unless a soft cap is applied to natural logits first.
    """
    scale = jnp.full((num_kv_heads,), spec.sm_scale * (LOG2E if spec.soft_cap is None else 1.0), jnp.float32)
    of_values = jnp.ones((num_kv_heads,), jnp.float32) if kv.value_scale is None else kv.value_scale
    return (scale if kv.k_scale is None else scale * kv.k_scale), of_values


def _arrange_queries(q: jax.Array, plan: Plan, num_kv_heads: int, padded_tokens: int) -> jax.Array:
    """Return q [T, N, H] in the layout that the kernel reads: [T', K, G', width] if `plan.by_token`, else [K, G', T',
    width].

    T' = padded_tokens, K = num_kv_heads, G' = plan.group; the padding is zeros. If there are several kv heads, their
    queries are moved to the offsets of the heads' windows (`_move_to_windows`).
    """
    q = _pad_rows(q, padded_tokens).reshape(padded_tokens, num_kv_heads, -1, q.shape[-1])
    q = _pad_axis(q, 2, plan.group)
    if num_kv_heads > 1:  # a single head begins where its window does, and the kernel pads its end
        q = _move_to_windows(q, plan.keys)
    return q if plan.by_token else q.transpose(1, 2, 0, 3)


def _move_to_windows(q: jax.Array, windows: tuple[Window, ...]) -> jax.Array:
    """Return q [T, K, G, H] as [T, K, G, width], where the queries of kv head k begin at column windows[k].offset and
    zeros surround them. width is the size of the widest window.
    """
    width = max(window.size for window in windows)
    offsets = [window.offset for window in windows]

    def moved(heads, offset):
        return jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (offset, width - offset - heads.shape[-1])))

    if len(set(offsets)) == 1:
        return moved(q, offsets[0])
    return jnp.concatenate([moved(q[:, head : head + 1], offset) for head, offset in enumerate(offsets)], axis=1)


def _arrange_results(o, lse, plan: Plan, group: int, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return o [T, N, Hv] and lse [T, N], T = num_tokens, from the kernel's results o and lse, which have the shapes in
    `Refs`: by tile, padded to `plan`.

    group: query heads per kv head, without padding.
    """
    tiles, num_kv_heads, _ = lse.shape
    lse = lse[:, :, : plan.rows]
    if plan.by_token:
        lse = lse.reshape(tiles, num_kv_heads, plan.block_q, plan.group).transpose(0, 2, 1, 3)
    else:
        lse = lse.reshape(tiles, num_kv_heads, plan.group, plan.block_q).transpose(0, 3, 1, 2)
        o = o.transpose(2, 0, 1, 3)
    lse = lse.reshape(tiles * plan.block_q, num_kv_heads, plan.group)
    o, lse = o[:num_tokens, :, :group], lse[:num_tokens, :, :group]
    return o.reshape(num_tokens, num_kv_heads * group, -1), lse.reshape(num_tokens, num_kv_heads * group)


def _call_kernel(
    walk: Walk,
    page_table: jax.Array | None,
    far_page_table: jax.Array | None,
    logit_scale: jax.Array,
    value_scale: jax.Array,
    sinks: jax.Array | None,
    q: jax.Array,
    q_rest: jax.Array | None,
    tree: jax.Array | None,
    seen: jax.Array | None,
    pool: jax.Array,
    *,
    plan: Plan,
    o_dtype: jnp.dtype,
    vmem_limit_bytes: int,
    interpret: Any,
    body: Callable,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel over all tiles; return its results o, of `o_dtype`, and lse, in the shapes given in `Refs`.

    The operands have the shapes given in `Refs`, too: `walk`; page_table or far_page_table, the other being None;
    factors f32 [K] of logits and values; sinks f32 [K, G] in base 2 or None; q and q_rest (or None) from
    `_arrange_queries`; tree i32 [T', words] or None; seen i32 [T', keys] or None; and the pool's data. plan: static
    parameters. vmem_limit_bytes: VMEM that the kernel may use. interpret: argument of `pl.pallas_call`. body: the
    kernel of a grid step.
    """
    num_kv_heads, blocks, block_q = len(plan.keys), plan.blocks, plan.block_q
    v_head_dim = plan.spec.v_head_dim
    num_tiles = (q.shape[0] if plan.by_token else q.shape[2]) // block_q
    steps = num_tiles // (blocks.tiles * plan.cores)
    lse_width = -(-plan.rows // LANES) * LANES

    def blocked(shape, axis=0):
        """Return a BlockSpec of `shape` whose block index moves along `axis`; blocks are dealt out to the cores in
        turn.
        """

        def index_map(core, step, *_):
            return tuple(step * plan.cores + core if index == axis else 0 for index in range(len(shape)))

        return pl.BlockSpec(shape, index_map)

    def per_token(width):
        """Return a BlockSpec of queries or results of `width` columns in the layout of `_arrange_queries`."""
        if plan.by_token:
            return blocked((blocks.tiles * block_q, num_kv_heads, plan.group, width))
        return blocked((num_kv_heads, plan.group, block_q, width), axis=2)

    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    is_far = far_page_table is not None
    statistics = pltpu.VMEM((num_kv_heads, plan.rows, LANES), jnp.float32)
    value_width = max(window.size for window in plan.values)
    lanes = buffer_lanes(plan.row_lanes)
    page = words.page_shape(pool, lanes) if plan.in_words else (*pool.shape[1:3], lanes)
    return pl.pallas_call(
        functools.partial(body, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.cores, steps),
            in_specs=[
                hbm if is_far else None,
                smem,
                smem,
                None if sinks is None else smem,
                per_token(q.shape[-1]),
                None if q_rest is None else per_token(q_rest.shape[-1]),
                None if tree is None else blocked((blocks.tiles * block_q, tree.shape[1])),
                None if seen is None else blocked((blocks.tiles * block_q, seen.shape[1])),
                hbm,
            ],
            out_specs=[per_token(v_head_dim), blocked((blocks.tiles, num_kv_heads, lse_width))],
            scratch_shapes=[
                pltpu.VMEM((blocks.buffers, blocks.pages, *page), pool.dtype),
                pltpu.SemaphoreType.DMA((blocks.buffers,)),
                statistics,
                statistics,
                pltpu.VMEM((num_kv_heads, plan.rows, value_width), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SMEM((2 * plan.table_width,), jnp.int32) if is_far else None,
                pltpu.SemaphoreType.DMA((2,)) if is_far else None,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:-1], v_head_dim), o_dtype),
            jax.ShapeDtypeStruct((num_tiles, num_kv_heads, lse_width), jnp.float32),
        ],
        # Steps hand the blocks in flight to each other; cores do not.
        compiler_params=compiler_params(interpret, "parallel", "arbitrary", vmem_limit_bytes=vmem_limit_bytes),
        interpret=interpret,
        name="paged_attention_single" if block_q == 1 else "paged_attention_runs",
    )(walk, page_table, far_page_table, logit_scale, value_scale, sinks, q, q_rest, tree, seen, pool)


def _pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Return x [n, ...] with zeros appended to its first axis until it has `rows` rows."""
    return _pad_axis(x, 0, rows)


def _pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Return x with zeros appended to `axis` until that has `size` elements."""
    return jnp.pad(x, [(0, size - x.shape[axis] if index == axis else 0) for index in range(x.ndim)])

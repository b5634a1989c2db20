"""Paged attention on NVIDIA GPUs of compute capability 9.0 (Hopper): the registry's functions of kind "hopper".

Dispatches the public operation to kernels: rows of few new tokens go to the split-KV decode kernels, longer runs to the
prefill kernel, latents to their own kernel. Attention that no kernel supports (`why_not`) goes to the XLA work list,
which reads the same pool.

The pool's layout is [P, K, page_size * 2 * H] in its own dtype, without the factor 2 where values lie in keys; see
decode.py for the view that the kernels use. Inside shard_map `spec` counts the heads of the shard, for the schedule as
for the attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.hopper import schedule as kernel_schedule
from jaxengine.pallas_kernels.attention.hopper.decode import DecodeShape, decode_partials
from jaxengine.pallas_kernels.attention.hopper.latent import LatentShape, latent_attention, why_not_latent
from jaxengine.pallas_kernels.attention.hopper.merge import merge_partials, merge_parts
from jaxengine.pallas_kernels.attention.hopper.prefill import prefill_attention
from jaxengine.pallas_kernels.attention.hopper.schedule import DECODE_KEYS, tiled_heads
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.xla import schedule as xla_schedule
from jaxengine.pallas_kernels.attention.xla.attend import attend_in_place_of
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, check_token_scales
from jaxengine.pallas_kernels.mosaic_gpu import WARPGROUP_ROWS
from jaxengine.pallas_kernels.tuning import HopperAttention, Tuning

KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
MIN_PAGE_SIZE = 8
MAX_HEAD_DIM = 256
MAX_ONE_BYTE_HEAD_DIM = 192


class Computing(NamedTuple):
    """Functions of the computing warpgroups of a card's kernels; None for Hopper's.

    Attributes:
      decode: argument `attend` of `decode_partials`.
      prefill: argument `body` of `prefill_attention`.
      prefill_rows: the most rows of a prefill tile.
      latents: whether there is a kernel for latents.
    """

    decode: Callable[..., None] | None = None
    prefill: Callable[..., None] | None = None
    prefill_rows: int = 2 * WARPGROUP_ROWS
    latents: bool = True


HOPPER = Computing()


def why_not(
    spec: AttentionSpec,
    page_size: int,
    q_dtype: Any = None,
    kv_dtype: Any = None,
    *,
    tree_mask: bool = False,
    latents: bool = True,
) -> str | None:
    """Return the reason why the kernels do not support an attention, so that XLA computes it; None if they support it.

    Not supported: unequal head dims of keys and values, head dims that are not a multiple of 16 (32 for a pool of one
    byte) or are above MAX_HEAD_DIM (MAX_ONE_BYTE_HEAD_DIM), more than 64 query heads per kv head, page sizes other than
    8, 16, 32 and multiples of 64, tree masks, slopes and biases by distance, chunks, a window without `causal`, queries
    not of two bytes, a pool of a dtype not in KV_DTYPES, or of two bytes and another dtype than the queries. For values
    in keys (latents), `why_not_latent` decides on head dims and query heads instead; a one-byte pool or `latents` False
    rules them out.
    q_dtype, kv_dtype: None if not known yet, because a schedule is built before them; conditions that depend on them
    are then not checked. tree_mask: whether there is one. latents: whether there is a kernel for values that lie in
    keys.
    """
    width = 32 if kv_dtype is not None and jnp.dtype(kv_dtype).itemsize == 1 else 16
    if spec.values_in_keys:
        if (reason := why_not_latent(spec) if latents else "values that lie in keys") is not None:
            return reason
    elif spec.head_dim != spec.v_head_dim:
        return f"head_dim {spec.head_dim} and v_head_dim {spec.v_head_dim} differ"
    elif spec.head_dim % width or spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim} is no multiple of {width} up to {MAX_HEAD_DIM}"
    elif spec.group_size > WARPGROUP_ROWS:
        return f"{spec.group_size} query heads per kv head are more than {WARPGROUP_ROWS}"
    if page_size % DECODE_KEYS and (DECODE_KEYS % page_size or page_size < MIN_PAGE_SIZE):
        return f"page_size {page_size} is neither 8, 16, 32 nor a multiple of {DECODE_KEYS}"
    if tree_mask:
        return "a tree mask"
    if spec.xla_only is not None:
        return spec.xla_only
    if spec.chunk is not None:
        return "attention in chunks"
    if spec.window is not None and not spec.causal:
        return "a window on both sides"
    if q_dtype is not None and jnp.dtype(q_dtype).itemsize != 2:
        return f"queries of {jnp.dtype(q_dtype).name}"
    if kv_dtype is not None:
        name = jnp.dtype(kv_dtype).name
        if name not in KV_DTYPES:
            return f"keys and values of {name}"
        if width == 32 and spec.values_in_keys:
            return f"values that lie in keys of {name}"
        if width == 32 and spec.head_dim > MAX_ONE_BYTE_HEAD_DIM:
            return f"head_dim {spec.head_dim} over {name}, whose blocks do not fit shared memory"
        if jnp.dtype(kv_dtype).itemsize == 2 and q_dtype is not None and kv_dtype != q_dtype:
            return f"queries of {jnp.dtype(q_dtype).name} over keys and values of {name}"
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
    computing: Computing = HOPPER,
) -> kernel_schedule.Schedule | xla_schedule.Schedule:
    """Return the kernels' items of the step, or the XLA work list if shapes or dtypes rule the kernels out or
    `kv_limits` is given.

    Arguments are those of attention.op.attention_schedule, which has checked them. computing: kernels of the card.
    """
    sizes = {"num_tokens": num_tokens, "page_size": page_size, "tuning": tuning}
    if kv_limits is not None:
        return xla_schedule.attention_schedule(batch, spec, **sizes, kv_limits=kv_limits)
    kv_dtype = None if kv_spec is None else kv_spec.dtype
    if why_not(spec, page_size, q_dtype, kv_dtype, latents=computing.latents):
        return xla_schedule.attention_schedule(batch, spec, **sizes)
    return kernel_schedule.attention_schedule(batch, spec, **sizes, most_rows=computing.prefill_rows)


def ragged_paged_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: kernel_schedule.Schedule | xla_schedule.Schedule,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    tree_mask: jax.Array | None,
    q_rest: jax.Array | None = None,
    slopes: jax.Array | None = None,
    biases: jax.Array | None = None,
    interpret: Any = False,
    computing: Computing = HOPPER,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of queries to the pages of their sequences on a Hopper GPU: o [T, N, Hv] in q's dtype and
    lse f32 [T, N].

    Arguments are those of attention.op.ragged_paged_attention, which has checked them; sinks, tree_mask, q_rest, slopes
    and biases may be None. schedule: from this module. XLA computes attention that no kernel supports, and a batch
    whose schedule is XLA's because of `kv_limits`; a warning states the reason, once per reason. interpret: False, or
    True or the Mosaic GPU interpreter's parameters to run the kernels on the CPU. computing: the card's kernels. Raises
    ValueError if `spec` does not count the heads that the pool's shard holds, and for token scales that its platform
    does not read.
    """
    check_token_scales(kv.platform, kv.spec)
    spec.check_shard(kv.data.shape[1], kv.platform)
    unusual = {"tree_mask": tree_mask is not None, "latents": computing.latents}
    reason = why_not(spec, kv.page_size, q.dtype, kv.dtype, **unusual)
    if reason is None and kv.spec.token_scales:
        reason = "scales of single tokens"
    if reason is None and isinstance(schedule, xla_schedule.Schedule):
        reason = "tokens that see some that follow"
    if reason is not None:
        rest = {"spec": spec, "sinks": sinks, "tree_mask": tree_mask, "q_rest": q_rest, "slopes": slopes}
        rest |= {"biases": biases}
        return attend_in_place_of("Mosaic GPU kernels", reason, q, kv, batch, schedule, **rest)
    assert isinstance(schedule, kernel_schedule.Schedule)
    prefill, sizes = schedule.prefill, schedule.tuning.hopper_attention
    options: dict[str, Any] = {"spec": spec, "sinks": sinks, "sizes": sizes, "interpret": interpret}
    o, lse = decode_attention(q, q_rest, kv, batch, schedule.decode, **options, attend=computing.decode)
    if prefill is None:
        return o, lse
    of_card = {"body": computing.prefill, "most_rows": computing.prefill_rows}
    run_o, run_lse = prefill_attention(q, kv, batch, prefill, **options, **of_card)
    in_run = (prefill.token_item < prefill.items.shape[0])[:, None]
    return jnp.where(in_run[..., None], run_o, o), jnp.where(in_run, run_lse, lse)


def decode_attention(
    q: jax.Array,
    q_rest: jax.Array | None,
    kv: KVPages,
    batch: RaggedBatch,
    items: kernel_schedule.DecodeItems,
    *,
    spec: AttentionSpec,
    sinks: jax.Array | None,
    sizes: HopperAttention,
    interpret: Any,
    attend: Callable[..., None] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of the tokens in rows of `items`: o [T, N, Hv] and lse f32 [T, N], 0 and -inf for all other
    tokens.

    q, q_rest, kv, batch: arguments of the public operation; q_rest is None unless values lie in keys. spec: with the
    shard's heads. sinks: f32 [N] or None. sizes: tile sizes of the tuning. interpret: argument of `mosaic_gpu.launch`.
    attend: `Computing.decode`. Raises ValueError if shared memory does not hold two blocks.
    """
    num_tokens, num_q_heads, _ = q.shape
    num_rows, width = items.row_tokens.shape
    stored_heads = spec.num_kv_heads
    if spec.values_in_keys:
        spec = tiled_heads(spec)
        tiles = spec.num_kv_heads // stored_heads
        shape = LatentShape(spec, tiles, kv.page_size, width, q.dtype, sizes.decode_stages)
    else:
        shape = DecodeShape(spec, kv.page_size, width, q.dtype, kv.dtype, sizes.decode_stages, attend is not None)
    num_kv_heads, group = spec.num_kv_heads, spec.group_size
    padding = shape.rows - width * group
    is_identity = num_rows == num_tokens and width == 1  # a row per token, in order

    def by_row(x):
        """Return x [T, N, columns] gathered as rows of the kernel, [R * K * M, columns], with zeros in its padding."""
        rows = x if is_identity else x[jnp.minimum(items.row_tokens, num_tokens - 1)]
        rows = rows.reshape(num_rows, width, num_kv_heads, group, -1).swapaxes(1, 2)
        rows = rows.reshape(num_rows, num_kv_heads, width * group, -1)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, padding), (0, 0))).reshape(-1, rows.shape[-1])

    scale = jnp.full((num_kv_heads,), spec.sm_scale, jnp.float32)
    if kv.k_scale is not None:
        scale = scale * kv.k_scale
    if sinks is not None:
        sinks = jnp.tile(sinks.reshape(num_kv_heads, group), (1, width))
        sinks = jnp.pad(sinks, ((0, 0), (0, padding)), constant_values=-jnp.inf)

    pool = kv.data.reshape(-1, spec.head_dim)
    if isinstance(shape, LatentShape):
        queries, options = (by_row(q), by_row(q_rest)), {"shape": shape, "interpret": interpret}
        results = latent_attention(*queries, pool, batch.page_table, scale, items, **options)
        o, lse = merge_parts(*results, items, sinks, sizes=sizes, interpret=interpret)
    else:
        partials = decode_partials(by_row(q), pool, batch.page_table, scale, items, shape, interpret, attend)
        v_scale = jnp.ones((num_kv_heads,), jnp.float32) if kv.v_scale is None else kv.v_scale
        o, lse = merge_partials(*partials, items.pair_items, sinks, v_scale, q.dtype, sizes=sizes, interpret=interpret)

    def by_token(x, fill):
        """Return results x [R * K, M, ...] of the kernel by token, [T, N, ...]; `fill` for tokens in no row."""
        x = x.reshape(num_rows, num_kv_heads, shape.rows, *x.shape[2:])[:, :, : width * group]
        x = x.reshape(num_rows, num_kv_heads, width, group, *x.shape[3:]).swapaxes(1, 2)
        x = x.reshape(num_rows * width, num_q_heads, *x.shape[4:])
        x = x if is_identity else x[jnp.minimum(items.token_index, num_rows * width - 1)]
        in_rows = items.token_index < num_rows * width
        return jnp.where(in_rows.reshape(-1, *[1] * (x.ndim - 1)), x, fill)

    return by_token(o, 0), by_token(lse, -jnp.inf)

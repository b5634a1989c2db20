"""Paged attention on NVIDIA GPUs of compute capability 8.0 to 8.9 and 12 (Ampere, Ada, RTX Blackwell): the registry's
functions of kind "triton".

Dispatches the public operation to the kernels of kernel.py. Attention that they do not support (`why_not`) goes to the
XLA work list, which reads the same pool: [P, K, page_size * (H + Hv)] in its own dtype, or page_size * H elements a
page where values are the first elements of keys (latents).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.hopper.schedule import DecodeItems, row_items, tiled_heads
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.triton.kernel import Shape, most_rows, rows_attention
from jaxengine.pallas_kernels.attention.xla import schedule as xla_schedule
from jaxengine.pallas_kernels.attention.xla.attend import attend_in_place_of
from jaxengine.pallas_kernels.cards import lowers_triton, no_triton
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, check_token_scales
from jaxengine.pallas_kernels.tuning import Tuning

KV_DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512  # of a value that lies in a key; up to MAX_HEAD_DIM elements of the key follow it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """Work list of one step's attention for the Triton kernels, a pytree.

    Attributes:
      items: work of all new tokens.
      tuning: sizes that the work was cut to.
    """

    items: DecodeItems
    tuning: Tuning = field(metadata={"static": True})


def why_not(
    spec: AttentionSpec, q_dtype: Any = None, kv: KVSpec | None = None, *, tree_mask: bool = False
) -> str | None:
    """Return the reason why the kernels do not support an attention, which XLA then computes; None if they support it.

    Not supported: head dims that are not multiples of 8 or above MAX_HEAD_DIM (of latents, values above MAX_LATENT_DIM,
    or keys that are as wide), more query heads per kv head than `most_rows` without latents, tree masks, slopes and
    biases by distance, chunks before a token's own, queries other than bfloat16 and float16, token scales, pools of a
    dtype outside KV_DTYPES, and two-byte pools of another dtype than the queries.

    q_dtype, kv: None if not known yet (a schedule is built before them); conditions on either are then not checked.
    tree_mask: whether there is one.
    """
    if spec.values_in_keys:
        rest = spec.head_dim - spec.v_head_dim
        if rest % 8 or spec.v_head_dim % 8 or not 0 < rest <= MAX_HEAD_DIM or spec.v_head_dim > MAX_LATENT_DIM:
            return f"values of {spec.v_head_dim} in keys of {spec.head_dim}"
    elif spec.head_dim % 8 or spec.v_head_dim % 8 or max(spec.head_dim, spec.v_head_dim) > MAX_HEAD_DIM:
        return f"head dims {spec.head_dim}/{spec.v_head_dim} are not multiples of 8 up to {MAX_HEAD_DIM}"
    elif spec.group_size > most_rows(spec):
        return f"{spec.group_size} query heads per kv head are more than {most_rows(spec)}"
    if tree_mask:
        return "a tree mask"
    if spec.xla_only is not None:
        return spec.xla_only
    return None if q_dtype is None or kv is None else _why_not_dtypes(q_dtype, kv)


def why_not_pool(q_dtype: Any, kv: KVPages, *, interpret: bool) -> str | None:
    """Return the reason why kernels in Triton do not read the pool for queries of `q_dtype`: the installed jax, unless
    `interpret`, the dtypes, or the pool's size; None if they do.
    """
    if not interpret and not lowers_triton():
        return no_triton()
    return _why_not_dtypes(q_dtype, kv.spec) or _why_not_size(kv)


def _why_not_dtypes(q_dtype: Any, kv: KVSpec) -> str | None:
    """Return the reason why kernels do not take these dtypes of queries and pool, or its token scales; else None."""
    if (name := jnp.dtype(q_dtype).name) not in KV_DTYPES[:2]:
        return f"queries of {name}"
    if kv.token_scales:
        return "scales of single tokens"
    if kv.dtype not in KV_DTYPES or (jnp.dtype(kv.dtype).itemsize == 2 and kv.dtype != name):
        return f"queries of {name} over keys and values of {kv.dtype}"
    return None


def _why_not_size(kv: KVPages) -> str | None:
    """Return the reason why kernels cannot address all elements of the pool, None if they can: one-byte codes that are
    more than 2**31 and at most 2**32.
    """
    if kv.data.dtype.itemsize == 1 and 2**31 < kv.data.size <= 2**32:
        return f"a pool of {kv.data.size} codes, whose offsets jax's lowering keeps in 32 bits"
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
) -> Schedule | xla_schedule.Schedule:
    """Return the kernels' items of the step, or the XLA work list if `spec` or dtypes rule the kernels out or
    `kv_limits` is given. Arguments are those of attention.op.attention_schedule, which has checked them.
    """
    if kv_limits is None and why_not(spec, q_dtype, kv_spec) is None:
        most = _most_heads(spec, tuning)
        sizes = {"num_tokens": num_tokens, "page_size": page_size, "most_rows": most}
        return Schedule(row_items(batch, tiled_heads(spec, most), tuning.triton_attention, **sizes), tuning)
    sizes = {"num_tokens": num_tokens, "page_size": page_size, "tuning": tuning}
    return xla_schedule.attention_schedule(batch, spec, **sizes, kv_limits=kv_limits)


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
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of queries over the pages of their sequences with the Triton kernels: return o [T, N, Hv]
    in q's dtype and lse f32 [T, N].

    Arguments are those of attention.op.ragged_paged_attention, which has checked them; sinks, tree_mask, q_rest, slopes
    and biases may be None. schedule: result of this module's `attention_schedule`. XLA computes what the kernels do not
    support (`why_not`), a one-byte pool of more than 2**31 and at most 2**32 codes, and any batch whose schedule is
    XLA's because of `kv_limits`; a warning gives each reason once. interpret: run the kernels on the CPU. Raises
    ValueError if `spec` does not count the heads that the pool's shard holds, and for token scales that its platform
    does not read.
    """
    check_token_scales(kv.platform, kv.spec)
    spec.check_shard(kv.data.shape[1], kv.platform)
    reason = why_not(spec, q.dtype, kv.spec, tree_mask=tree_mask is not None)
    reason = _why_not_size(kv) or reason
    if reason is None and isinstance(schedule, xla_schedule.Schedule):
        reason = "tokens that see some that follow"
    if reason is not None:
        rest = {"spec": spec, "sinks": sinks, "tree_mask": tree_mask, "q_rest": q_rest, "slopes": slopes}
        rest |= {"biases": biases}
        return attend_in_place_of("Triton kernels", reason, q, kv, batch, schedule, **rest)
    assert isinstance(schedule, Schedule)
    items, ones = schedule.items, jnp.ones((spec.num_kv_heads,), jnp.float32)
    k_scale = spec.sm_scale * (ones if kv.k_scale is None else kv.k_scale)
    scales = k_scale, ones if kv.value_scale is None else kv.value_scale
    sinks = jnp.full((spec.num_q_heads,), -jnp.inf) if sinks is None else sinks
    sizes, tiled = schedule.tuning.triton_attention, tiled_heads(spec, _most_heads(spec, schedule.tuning))
    tiles = tiled.num_kv_heads // spec.num_kv_heads
    shape = Shape(tiled, kv.page_size, items.row_tokens.shape[1], q.dtype, tiles)
    queries = (q,) if q_rest is None else (q, q_rest)
    return rows_attention(queries, kv.data, batch.page_table, scales, sinks, items, shape, sizes, interpret)


def _most_heads(spec: AttentionSpec, tuning: Tuning) -> int:
    """Return the most query rows of a program: of latents as many as of selected keys, as a key is as wide."""
    return tuning.triton_attention.selected_rows if spec.values_in_keys else most_rows(spec)

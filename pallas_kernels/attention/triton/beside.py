"""Paged attention on Hopper and Blackwell GPUs: their own kernels, and those in Triton for what these do not take.

Both read the same pool. Attention in chunks, with values of another width than keys, with a window on both sides, with
wide heads of one-byte codes, and to latents that the card has no kernel of its own for runs in Triton there.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxengine.pallas_kernels.attention.hopper import attend as hopper
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.triton import attend as triton
from jaxengine.pallas_kernels.cards import lowers_triton
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec


def attention_schedule(
    batch: RaggedBatch,
    spec: AttentionSpec,
    *,
    page_size: int,
    kv_limits: jax.Array | None = None,
    kv_spec: KVSpec | None = None,
    q_dtype: Any = None,
    computing: hopper.Computing,
    **sizes: Any,
) -> Any:
    """Return the items of the step for the card's own kernels or, if they do not support the attention, for those in
    Triton; the XLA work list if neither do, or if `kv_limits` is given.

    Arguments are those of attention.op.attention_schedule, which has checked them. computing: the card's own kernels.
    """
    options: dict[str, Any] = {**sizes, "page_size": page_size, "kv_limits": kv_limits}
    options |= {"kv_spec": kv_spec, "q_dtype": q_dtype}
    kv_dtype = None if kv_spec is None else kv_spec.dtype
    reason = hopper.why_not(spec, page_size, q_dtype, kv_dtype, latents=computing.latents)
    if reason is not None and kv_limits is None and lowers_triton():
        return triton.attention_schedule(batch, spec, **options)
    return hopper.attention_schedule(batch, spec, **options, computing=computing)


def ragged_paged_attention(
    q: jax.Array,
    kv: KVPages,
    batch: RaggedBatch,
    schedule: Any,
    *,
    interpret: Any = False,
    computing: hopper.Computing,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return the attention of queries to the pages of their sequences: o [T, N, Hv] in q's dtype and lse f32 [T, N].

    Arguments and errors are those of `hopper.ragged_paged_attention`. schedule: from this module; it decides whose
    kernels run. What these do not support either is plain XLA, and a warning states the reason once.
    """
    if isinstance(schedule, triton.Schedule):
        return triton.ragged_paged_attention(q, kv, batch, schedule, **options, interpret=bool(interpret))
    options |= {"interpret": interpret, "computing": computing}
    return hopper.ragged_paged_attention(q, kv, batch, schedule, **options)

"""Write of the new keys and values of one step into the pool: the public operation.

Checks the arguments and chooses the implementation. Sequences do not occur here: a token is written to its slot.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.kv.pages import KVPages, holds_heads
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import Tuning, tuning_of


def kv_update_schedule(slot_mapping: jax.Array, *, page_size: int, platform: str, tuning: Tuning | None = None) -> Any:
    """Return the grouping of a step's tokens into aligned pieces of pages, a pytree to pass to `kv_cache_update`; None
    on platforms that need none.

    Build it once per step: it depends on the offsets of slot_mapping i32 [T] within their pages and on which of them
    are consecutive, so all layers share it. platform: one of registry.PLATFORMS.
    tuning: sizes, which the update then uses too; None takes the chip's sizes from the table.
    Raises ValueError for a page size that the platform's kernel cannot write.
    """
    build = kernel("kv_update_schedule", platform)
    return build(slot_mapping, page_size=page_size, tuning=tuning or tuning_of(platform))


def kv_cache_update(
    kv: KVPages,
    k: jax.Array,
    v: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    schedule: Any = None,
    tuning: Tuning | None = None,
) -> KVPages:
    """Write k [T, K, H] and v [T, K, Hv] to the slots i32 [T] of the pool and return the new pool. v must be None if
    values lie in keys.

    A slot is page * page_size + offset. Slots outside the pool are dropped, -1 (padding) among them; real slots must
    be distinct. k and v of any float dtype are rounded to the pool's. One-byte pools store x / scale, rounded and
    saturating; token scales are computed here, each from its own token and head alone. Donate `kv` when jitting: the
    update is in place.
    schedule: result of `kv_update_schedule` for the same step, None to build it here with `tuning`. `tuning` may be
        given only if schedule is None.
    Raises ValueError for shapes that do not fit the pool, slots of another dtype, `tuning` with a schedule, and a pool
    that the platform cannot write.
    """
    spec, num_tokens = kv.spec, slot_mapping.shape[0]
    num_heads = k.shape[1] if k.ndim == 3 and holds_heads(kv, k.shape[1]) else spec.num_kv_heads
    for name, array, width in (("k", k, spec.head_dim), ("v", v, 0 if spec.values_in_keys else spec.v_head_dim)):
        wanted = (num_tokens, num_heads, width) if width else None
        shape = None if array is None else array.shape
        if shape != wanted:
            raise ValueError(f"kv_cache_update: {name} must have shape {wanted}, got {shape}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"kv_cache_update: slot_mapping must be int32, got {slot_mapping.dtype}")
    if schedule is None:
        schedule = kv_update_schedule(slot_mapping, page_size=spec.page_size, platform=kv.platform, tuning=tuning)
    elif tuning is not None:
        raise ValueError("kv_cache_update: give tuning to kv_update_schedule: a schedule brings its own")
    return kernel("kv_cache_update", kv.platform)(kv, k, v, slot_mapping, schedule=schedule)

"""Writing the new keys and values of one step into the pool.

Owns the one operation that changes a pool during a step. Knows nothing of sequences: a token goes where its slot says.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_pages import KVPages, to_storage


def kv_cache_update(kv: KVPages, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> KVPages:
    """Write k [T, K, H] and v [T, K, Hv] to the slots i32[T] of the pool and return it.

    A slot is page * page_size + offset. Slots outside the pool are dropped, -1 (padding) among them; real slots must
    be distinct. Quantised pools store round(x / scale), saturating. Donate `kv` when jitting: the update is in place.
    Raises ValueError when shapes or dtypes do not fit the pool.
    """
    spec, num_tokens = kv.spec, slot_mapping.shape[0]
    num_pages, num_heads, _ = kv.data.shape
    for name, array, width in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
        wanted = (num_tokens, num_heads, width)
        if array.shape != wanted:
            raise ValueError(f"kv_cache_update: {name} must have shape {wanted}, got {array.shape}")
    if slot_mapping.dtype != jnp.int32:
        raise ValueError(f"kv_cache_update: slot_mapping must be int32, got {slot_mapping.dtype}")
    keys, values = to_storage(k, spec, kv.k_scale), to_storage(v, spec, kv.v_scale)
    if num_tokens == 1:
        # XLA:CPU copies the whole pool for a scatter of one row; two rows stay in place.
        keys, values = (jnp.pad(rows, ((0, 1), (0, 0), (0, 0))) for rows in (keys, values))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=-1)
    page = jnp.where(slot_mapping < 0, num_pages, slot_mapping // spec.page_size)  # out of range: dropped
    offset = slot_mapping % spec.page_size
    data = _scatter_rows(kv.data, keys, page, offset * spec.head_dim)
    data = _scatter_rows(data, values, page, spec.page_size * spec.head_dim + offset * spec.v_head_dim)
    return replace(kv, data=data)


def _scatter_rows(data: jax.Array, rows: jax.Array, page: jax.Array, column: jax.Array) -> jax.Array:
    """data [P, K, C] with rows [T, K, c] written to page i32[T], columns [column, column + c)."""
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
    )
    index = jnp.stack([page, column], axis=-1)
    return lax.scatter(data, index, rows, dims, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)

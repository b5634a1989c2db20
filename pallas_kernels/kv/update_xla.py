"""Write of new keys and values with XLA: one in-place scatter each, or one of both in rows of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.kv.pages import KVPages, rows_of_tokens, to_storage
from jaxengine.pallas_kernels.registry import TOKEN_ROWS
from jaxengine.pallas_kernels.tuning import Tuning


def kv_update_schedule(slot_mapping: jax.Array, *, page_size: int, tuning: Tuning) -> None:
    """Return None, whatever the arguments: scatters, and writes of whole sequences, need no schedule."""


def kv_cache_update(
    kv: KVPages, k: jax.Array, v: jax.Array | None, slot_mapping: jax.Array, *, schedule: Any
) -> KVPages:
    """Write k [T, K, H] and v [T, K, Hv] (None if values lie in keys) to the slots i32 [T] of the pool by scatters, and
    return the new pool. Slots outside it are dropped.

    Arguments are those of kv.update.kv_cache_update, which has checked them; schedule is not used.
    """
    spec = kv.spec
    page = jnp.where(slot_mapping < 0, kv.data.shape[0], slot_mapping // spec.page_size)  # out of range: dropped
    offset = slot_mapping % spec.page_size
    if kv.layout == TOKEN_ROWS:
        return replace(kv, data=_with_token_rows(kv, k, v, page, offset))
    data = _scatter_rows(kv.data, to_storage(k, spec, kv.layout, kv.k_scale), page, offset * spec.key_width)
    if v is not None:
        column = spec.page_size * spec.key_width + offset * spec.value_width
        data = _scatter_rows(data, to_storage(v, spec, kv.layout, kv.v_scale), page, column)
    return replace(kv, data=data)


def _with_token_rows(kv: KVPages, k: jax.Array, v: jax.Array | None, page: jax.Array, offset: jax.Array) -> jax.Array:
    """Return the data of a pool in TOKEN_ROWS with the rows of k [T, K, H] and v ([T, K, Hv] or None) written at these
    pages and offsets, i32 [T] each. Tokens with a page out of range are dropped.
    """
    keys = to_storage(k, kv.spec, kv.layout, kv.k_scale)
    values = None if v is None else to_storage(v, kv.spec, kv.layout, kv.v_scale)
    rows, (first, end) = rows_of_tokens(keys, values, kv.spec), kv.lanes_of_page
    rows = jnp.pad(rows, ((0, 0), (0, end - first - rows.shape[1])))
    return kv.data.at[page, offset, first:end].set(rows, mode="drop", unique_indices=True)


def _scatter_rows(data: jax.Array, rows: jax.Array, page: jax.Array, column: jax.Array) -> jax.Array:
    """Return data [P, K, C] with row t of rows [T, K, c] written at page page[t] and columns [column[t], column[t] +
    c). page and column are i32 [T].

    Rows with a page of P or more are dropped; others must not overlap.
    """
    if page.shape[0] == 1:
        # XLA:CPU copies the whole pool for a scatter of one row; two rows stay in place.
        rows, column = jnp.pad(rows, ((0, 1), (0, 0), (0, 0))), jnp.pad(column, (0, 1))
        page = jnp.pad(page, (0, 1), constant_values=data.shape[0])
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
    )
    index = jnp.stack([page, column], axis=-1)
    return lax.scatter(data, index, rows, dims, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)

"""Reads of a few neighbouring slots of pages, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.kv.pages import KVPages, from_storage
from jaxengine.pallas_kernels.registry import TOKEN_ROWS


def read_slots(kv: KVPages, pages: jax.Array, offsets: jax.Array, count: int, *, of_values: bool = False) -> jax.Array:
    """Return the keys, or with of_values the values, of `count` neighbouring slots of each page from `offsets` on, as
    f32 [..., count * H], or f32 [..., count * Hv].

    pages, offsets: i32 [...], page ids and the first slot in the page; all of the slots must be in the page. Page ids
    out of range are clipped. kv: a pool of one kv head without scales. Raises ValueError for any other pool, and for
    of_values if values lie in keys.
    """
    spec = kv.spec
    if spec.num_kv_heads != 1 or spec.token_scales or kv.k_scale is not None or (of_values and spec.values_in_keys):
        raise ValueError(f"read_slots: the pool must hold one kv head, no codes, and the values asked for, got {spec}")
    width = spec.value_width if of_values else spec.key_width
    if kv.layout == TOKEN_ROWS:
        lane = kv.lanes_of_page[0] + of_values * spec.value_column
        index, sizes = [pages, offsets, jnp.full_like(pages, lane)], (1, count, width)
    else:
        column = of_values * spec.page_size * spec.key_width
        index, sizes = [pages, jnp.zeros_like(pages), column + offsets * width], (1, 1, count * width)
    dims = lax.GatherDimensionNumbers((pages.ndim, pages.ndim + 1), (0,), (0, 1, 2))
    rows = lax.gather(kv.data, jnp.stack(index, axis=-1), dims, sizes, mode=lax.GatherScatterMode.CLIP)
    return from_storage(rows.reshape(*pages.shape, count * width), spec)


def read_heads(
    kv: KVPages, pages: jax.Array, offsets: jax.Array, num_heads: int, *, of_values: bool = False, first: int = 0
) -> jax.Array:
    """Return the keys, or with of_values the values, of the first `num_heads` KV heads in single slots, without their
    first `first` elements: f32 [..., num_heads, H - first], or f32 [..., num_heads, Hv - first].

    pages, offsets: i32 [...], page ids and slots in the pages. Page ids out of range are clipped. kv: a pool without
    scales, which has as many heads. Raises ValueError for a pool of codes, and for of_values if values lie in keys.
    """
    spec = kv.spec
    if spec.token_scales or kv.k_scale is not None or (of_values and spec.values_in_keys):
        raise ValueError(f"read_heads: the pool must hold no codes, and the values asked for, got {spec}")
    width = spec.value_width if of_values else spec.key_width
    if kv.layout == TOKEN_ROWS:
        index, sizes = [pages, offsets, jnp.full_like(pages, kv.lanes_of_page[0])], (1, 1, num_heads * spec.row_width)
    else:
        column = of_values * spec.page_size * spec.key_width + offsets * width + first
        index, sizes = [pages, jnp.zeros_like(pages), column], (1, num_heads, width - first)
    dims = lax.GatherDimensionNumbers((pages.ndim, pages.ndim + 1), (0,), (0, 1, 2))
    rows = lax.gather(kv.data, jnp.stack(index, axis=-1), dims, sizes, mode=lax.GatherScatterMode.CLIP)
    if kv.layout == TOKEN_ROWS:
        rows = rows.reshape(*pages.shape, num_heads, spec.row_width)
        start = of_values * spec.value_column + first
        rows = rows[..., start : start + width - first]
    return from_storage(rows, spec)

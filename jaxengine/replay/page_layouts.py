"""Converts pages from one layout to another, on the host (see jaxengine.pallas_kernels.kv.pages)."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxengine.models.kernel_rows import TOKEN_ROWS


def converted(pages: np.ndarray, source: str, target: str, spec: Any, like: Any) -> np.ndarray:
    """Convert pages [n, ...] from the layout `source` to the layout `target`, bit for bit.

    HEAD_TILES and HEAD_TILES_AS_BITS differ only in the dtype. spec: KVSpec of one device's pool. like: array with the
    dtype and shape [P, ...] of the target's pool over all devices. Raises ValueError if sizes do not match.
    """
    if (source == TOKEN_ROWS) == (target == TOKEN_ROWS):
        return _as(pages, like.dtype)
    num, size, width = len(pages), spec.page_size, spec.row_width
    if source == TOKEN_ROWS:
        heads = like.shape[1]
        parts = heads // spec.num_kv_heads  # each device's heads end with padding to a lane tile
        rows = pages.reshape(num, size, parts, -1)[..., : spec.num_kv_heads * width].reshape(num, size, heads, width)
        keys, values = rows[..., : spec.key_width], rows[..., width - spec.value_width * (not spec.values_in_keys) :]
        tiles = [each.transpose(0, 2, 1, 3).reshape(num, heads, -1) for each in (keys, values)]
        return _as(np.concatenate(tiles, axis=2), like.dtype)
    heads = pages.shape[1]
    parts, split = heads // spec.num_kv_heads, size * spec.key_width
    keys = pages[..., :split].reshape(num, heads, size, spec.key_width)
    values = pages[..., split:].reshape(num, heads, size, -1)
    gap = np.zeros((num, heads, size, width - spec.key_width - values.shape[3]), pages.dtype)
    rows = np.concatenate([keys, gap, values], axis=3).transpose(0, 2, 1, 3).reshape(num, size, parts, -1)
    padded = np.zeros((num, size, parts, like.shape[2] // parts), rows.dtype)
    padded[..., : rows.shape[-1]] = rows
    return _as(padded.reshape(num, size, -1), like.dtype)


def _as(pages: np.ndarray, dtype: Any) -> np.ndarray:
    """Return pages in C order, reinterpreted as numbers of `dtype`, bit for bit. Raises ValueError if the sizes do not
    match.
    """
    pages = np.ascontiguousarray(pages)
    return pages if pages.dtype == dtype else pages.view(dtype)

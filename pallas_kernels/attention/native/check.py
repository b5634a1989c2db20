"""Test of the machine code of attention on this processor, before it is used."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from jaxengine.pallas_kernels.attention.native.code import BLOCK, HANDLERS, JOB
from jaxengine.pallas_kernels.native.library import UnfitError

_WIDTH, _VALUE_WIDTH, _GROUP, _KV_HEADS, _PAGE_SIZE = 48, 80, 3, 2, 16
_TILES = 3, 2, 1  # tokens: 9, 6 and 3 rows, of which 4, 3, 2 and 1 are multiplied at once


def check(address_of: Callable[[str], int]) -> None:
    """Test every handler's function NAME_items with tiles of one sequence. address_of(name): its address. Raises
    UnfitError if a result differs from numpy's.
    """
    for handler, size in HANDLERS.items():
        _check(handler, size, address_of(f"{handler}_items"))


def _check(handler: str, size: int, address: int) -> None:
    """Test the function at `address`, whose pool has elements of `size` bytes. Raises UnfitError if it is wrong."""
    rng = np.random.default_rng(0)
    num_tokens, num_keys = sum(_TILES), BLOCK + 21
    pages = num_keys // _PAGE_SIZE + 1
    q = rng.standard_normal((num_tokens, _KV_HEADS * _GROUP, _WIDTH)).astype(np.float32)
    bits = rng.standard_normal((pages, _KV_HEADS, _PAGE_SIZE * (_WIDTH + _VALUE_WIDTH))).astype(np.float32)
    bits = bits.view(np.uint32) & 0xFFFF0000
    pool = bits.view(np.float32) if size == 4 else (bits >> 16).astype(np.uint16)
    tiles = np.array([[0] * len(_TILES), np.cumsum((0, *_TILES[:-1])), _TILES], np.int32)
    ends = np.arange(num_keys - num_tokens, num_keys) + 1
    ranges = np.array([np.where(ends % 2, 0, ends - 40), ends], np.int32)
    page_table = np.arange(pages, dtype=np.int32)[None, ::-1].copy()
    scale, sinks = np.array([0.2], np.float32), rng.standard_normal(q.shape[1]).astype(np.float32)
    o = np.full((*q.shape[:2], _VALUE_WIDTH), np.nan, np.float32)
    softmax = np.full((*q.shape[:2], 2), np.nan, np.float32)
    arrays = {"q": q, "pool": pool, "page_table": page_table, "tiles": tiles, "ranges": ranges, "scale": scale}
    arrays |= {"sinks": sinks, "o": o, "softmax": softmax}
    numbers = {"blocks": len(_TILES) * _KV_HEADS, "num_tokens": num_tokens, "heads": q.shape[1], "width": _WIDTH}
    numbers |= {"num_pages": pages, "kv_heads": _KV_HEADS, "columns": pages, "num_tiles": len(_TILES)}
    numbers |= {"value_width": _VALUE_WIDTH, "tiles_in_use": len(_TILES), "page_size": _PAGE_SIZE}
    numbers |= {"block_q": max(_TILES)} | {name: own.ctypes.data for name, own in arrays.items()}
    job = (ctypes.c_int64 * len(JOB.fields))(*(numbers.get(name, 0) for name in JOB.fields))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(job))
    exact, lse = _exact(q, bits.view(np.float32)[page_table[0]], ranges, float(scale[0]), sinks)
    right = np.allclose(o, exact, rtol=0, atol=2e-6)
    if not right or not np.allclose(softmax[..., 0] + np.log(softmax[..., 1]), lse, rtol=1e-6, atol=1e-6):
        raise UnfitError(f"results of {handler} are wrong on this processor")


def _exact(
    q: np.ndarray, pages: np.ndarray, ranges: np.ndarray, scale: float, sinks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention [T, N, Hv] of tokens q [T, N, H] over the pages of one sequence, in order, and its
    log-sum-exp [T, N], in float64.
    """
    keys = pages[..., : _PAGE_SIZE * _WIDTH].reshape(len(pages), _KV_HEADS, _PAGE_SIZE, _WIDTH)
    values = pages[..., _PAGE_SIZE * _WIDTH :].reshape(len(pages), _KV_HEADS, _PAGE_SIZE, _VALUE_WIDTH)
    found, lse = np.zeros((*q.shape[:2], _VALUE_WIDTH)), np.zeros(q.shape[:2])
    for token, (start, end) in enumerate(ranges.T):
        for head in range(q.shape[1]):
            own = keys[:, head // _GROUP].reshape(-1, _WIDTH)[start:end].astype(np.float64)
            weights = np.exp(own @ q[token, head] * scale)
            total = weights.sum() + np.exp(np.float64(sinks[head]))
            found[token, head] = weights @ values[:, head // _GROUP].reshape(-1, _VALUE_WIDTH)[start:end] / total
            lse[token, head] = np.log(total)
    return found, lse

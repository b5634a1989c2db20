"""Test of the machine code of attention on this processor, before it is used."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.native.code import BLOCK, HANDLERS, JOB, WORDS
from jaxengine.pallas_kernels.kv.pages import PER_TOKEN
from jaxengine.pallas_kernels.native.library import UnfitError

_WIDTH, _VALUE_WIDTH, _GROUP, _KV_HEADS, _PAGE_SIZE = 48, 80, 3, 2, 16
_CAPS = {"bfloat16": 2.5}  # soft cap of the logits, by kv_dtype
_INT8 = 40  # size of codes of int8
_ROUNDED = 2e-3  # error by weights rounded to bfloat16, each to 2^-9 of it; a key alone has at least 1e-2 of the output
_TILES = 3, 2, 1  # tokens: 9, 6 and 3 rows, of which 4, 3, 2 and 1 are multiplied at once


def check(address_of: Callable[[str], int]) -> None:
    """Test every handler's function NAME_items with tiles of one sequence. address_of(name): its address. Raises
    UnfitError if a result differs from numpy's.
    """
    for handler, kv_dtype in HANDLERS.items():
        _check(handler, kv_dtype, address_of(f"{handler}_items"))


def _check(handler: str, kv_dtype: str, address: int) -> None:
    """Test the function at `address`, whose pool is of `kv_dtype`. Raises UnfitError if it is wrong."""
    rng = np.random.default_rng(0)
    num_tokens, num_keys = sum(_TILES), BLOCK + 21
    pages = num_keys // _PAGE_SIZE + 1
    q = rng.standard_normal((num_tokens, _KV_HEADS * _GROUP, _WIDTH)).astype(np.float32)
    q = q.astype(jnp.bfloat16) if handler == WORDS else q
    parts = [_stored(rng, kv_dtype, (pages, _KV_HEADS, _PAGE_SIZE, width)) for width in (_WIDTH, _VALUE_WIDTH)]
    pool = np.concatenate([stored.reshape(pages, _KV_HEADS, -1) for stored, _ in parts], axis=2)
    tiles = np.array([[0] * len(_TILES), np.cumsum((0, *_TILES[:-1])), _TILES], np.int32)
    ends = np.arange(num_keys - num_tokens, num_keys) + 1
    ranges = np.array([np.where(ends % 2, 0, ends - 40), ends], np.int32)
    page_table = np.arange(pages, dtype=np.int32)[None, ::-1].copy()
    size = _INT8 if kv_dtype == "int8" else 1
    scale, sinks = np.array([0.2 / size, 0.1 / size], np.float32), rng.standard_normal(q.shape[1]).astype(np.float32)
    cap = np.array([_CAPS.get(kv_dtype, 0.0)], np.float32)
    o = np.full((*q.shape[:2], _VALUE_WIDTH), np.nan, np.float32)
    softmax = np.full((*q.shape[:2], 2), np.nan, np.float32)
    arrays = {"q": q, "pool": pool, "page_table": page_table, "tiles": tiles, "ranges": ranges, "scale": scale}
    arrays |= {"soft_cap": cap, "sinks": sinks, "o": o, "softmax": softmax}
    numbers = {"blocks": len(_TILES) * _KV_HEADS, "num_tokens": num_tokens, "heads": q.shape[1], "width": _WIDTH}
    numbers |= {"num_pages": pages, "kv_heads": _KV_HEADS, "columns": pages, "num_tiles": len(_TILES)}
    numbers |= {"value_width": _VALUE_WIDTH, "tiles_in_use": len(_TILES), "page_size": _PAGE_SIZE}
    numbers |= {"block_q": max(_TILES)}
    JOB.run(address, numbers, arrays)
    keys, values = (exact[page_table[0]] for _, exact in parts)
    exact, lse = _exact(q.astype(np.float64), keys, values, ranges, scale, float(cap[0]), sinks)
    error = _ROUNDED if handler == WORDS else 2e-6 * size
    right = np.allclose(o, exact, rtol=0, atol=error)
    if not right or not np.allclose(softmax[..., 0] + np.log(softmax[..., 1]), lse, rtol=1e-6, atol=1e-6):
        raise UnfitError(f"results of {handler} are wrong on this processor")


def _stored(rng: np.random.Generator, kv_dtype: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return drawn numbers [..., C] of `shape` as bytes of a pool of `kv_dtype` [..., bytes of a token], and what they
    stand for, float64 [..., C].
    """
    dtype = jnp.dtype(PER_TOKEN.get(kv_dtype, kv_dtype))
    drawn = rng.standard_normal(shape, np.float32)
    stored = np.rint(drawn * _INT8).clip(-127, 127).astype(dtype) if dtype == np.int8 else drawn.astype(dtype)
    exact, rows = stored.astype(np.float64), stored.view(np.uint8)
    if kv_dtype in PER_TOKEN:
        scales = (rng.random((*shape[:-1], 1)) / 32).astype(np.float32)
        exact, rows = exact * scales, np.concatenate([rows, scales.view(np.uint8)], axis=-1)
    return rows, exact


def _exact(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    ranges: np.ndarray,
    scale: np.ndarray,
    cap: float,
    sinks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention [T, N, Hv] of tokens q [T, N, H] over the keys [n, K, page size, H] and values [n, K, page
    size, Hv] of one sequence's pages, and its log-sum-exp [T, N], in float64. ranges: [2, T], first key that each token
    sees, and one past the last. scale: factor of logits, [K]. cap: soft cap, 0 for none. sinks: [N].
    """
    found, lse = np.zeros((*q.shape[:2], _VALUE_WIDTH)), np.zeros(q.shape[:2])
    for head in range(q.shape[1]):
        own_keys, own_values = (each[:, head // _GROUP].reshape(-1, each.shape[-1]) for each in (keys, values))
        for token, (start, end) in enumerate(ranges.T):
            logits = own_keys[start:end] @ q[token, head] * scale[head // _GROUP]
            weights = np.exp(cap * np.tanh(logits / cap) if cap else logits)
            total = weights.sum() + np.exp(np.float64(sinks[head]))
            found[token, head] = weights @ own_values[start:end] / total
            lse[token, head] = np.log(total)
    return found, lse

"""The physical layouts written down a second time, in numpy: pools for the tests, and what a kernel left in one.

Shares no code with jaxengine.pallas_kernels.kv.pages, whose docstring is what both follow.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec

PER_TOKEN = {"int8_per_token_head": "int8", "fp8_per_token_head": "float8_e4m3fn"}
QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8", *PER_TOKEN)


def token_scale(values: np.ndarray, dtype: str) -> np.ndarray:
    """f32 [..., K] of values f32 [..., K, C]: with it the largest of each C is the largest code; 2**-126 of zeros."""
    most = 127.0 if PER_TOKEN[dtype] == "int8" else 448.0
    return np.maximum(np.abs(values).max(-1).astype(np.float32) * np.float32(1 / most), np.float32(2.0**-126))


def codes(values: np.ndarray, dtype: str, scale: np.ndarray | None) -> np.ndarray:
    """values f32 [..., K, C] as a pool of `dtype` holds them; with scale [K] or [..., K] divided by it first, and
    saturated."""
    dtype = PER_TOKEN.get(dtype, dtype)
    if scale is None:
        return np.asarray(values, jnp.dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(values, np.float32) / scale[..., None]
        if dtype == "int8":
            return np.clip(np.rint(np.nan_to_num(scaled, nan=127.0)), -127, 127).astype(np.int8)
        limit = float(jnp.finfo(dtype).max)
        return np.clip(scaled, -limit, limit).astype(jnp.dtype(dtype))


def values_of(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """What codes [..., K, C] stand for, float32."""
    values = stored.astype(np.float32)
    return values if scale is None else values * scale[..., None]


def with_scale(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Codes [..., K, C] with the bytes of their token's scale f32 [..., K] behind them, [..., K, C + 4]; as they are
    where scales are those of heads."""
    if scale is None or scale.ndim == 1:
        return stored
    return np.concatenate([stored, scale[..., None].view(stored.dtype)], axis=-1)


def make_pool(
    k: np.ndarray, v: np.ndarray, platform: str, k_scale=None, v_scale=None, values_in_keys=False, aligned_values=False
) -> KVPages:
    """A pool that holds codes k [P, page_size, K, H] and v [P, page_size, K, Hv], unless these lie in k.

    Scales are those of heads [K] or of tokens [P, page_size, K]. aligned_values: as in KVSpec; what lies between a key
    and its value on a TPU is zeros.
    """
    num_pages, page_size, num_heads, head_dim = k.shape
    by_token = k_scale is not None and k_scale.ndim > 1
    spec = KVSpec(num_pages, page_size, num_heads, head_dim, v.shape[-1], k.dtype.name, values_in_keys, by_token)
    spec = replace(spec, aligned_values=aligned_values)
    held = [with_scale(*each) for each in ((k, k_scale), (v, v_scale))[: 1 if values_in_keys else 2]]
    if by_token:
        k_scale = v_scale = None
    if platform == "tpu":
        if aligned_values:
            held[0] = np.pad(held[0], ((0, 0), (0, 0), (0, 0), (0, -held[0].shape[3] % 128)))
        data = np.concatenate(held, axis=-1).reshape(num_pages, page_size, -1)
        data = np.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % 128)))
    else:
        tiles = [x.transpose(0, 2, 1, 3).reshape(num_pages, num_heads, -1) for x in held]
        data = np.concatenate(tiles, axis=-1)
    if platform == "cpu" and data.dtype.itemsize < 4:
        data = data.view(f"uint{8 * data.dtype.itemsize}")
    scales = (None if scale is None else jnp.asarray(scale, jnp.float32) for scale in (k_scale, v_scale))
    return KVPages(jnp.asarray(data), *scales, spec, platform)


def read_pool(kv: KVPages) -> tuple[np.ndarray, np.ndarray]:
    """The codes of all keys and values, as unsigned integers so that NaNs compare by their bits; with the bytes of
    scales of tokens."""
    spec, data = kv.spec, np.asarray(kv.data)
    if spec.token_scales:
        spec = replace(spec, head_dim=spec.head_dim + 4, v_head_dim=spec.v_head_dim + 4 * (not spec.values_in_keys))
    data = data.view(f"uint{8 * data.dtype.itemsize}")
    if spec.values_in_keys:
        shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        if kv.platform == "tpu":
            keys = data[..., : spec.num_kv_heads * spec.head_dim].reshape(*data.shape[:2], -1, spec.head_dim)
        else:
            keys = data.reshape(shape).transpose(0, 2, 1, 3)
        return keys, keys[..., : spec.v_head_dim]
    if kv.platform == "tpu":
        first = spec.head_dim + (-spec.head_dim % 128 if spec.aligned_values else 0)
        width = first + spec.v_head_dim
        rows = data[..., : spec.num_kv_heads * width].reshape(*data.shape[:2], spec.num_kv_heads, width)
        return rows[..., : spec.head_dim], rows[..., first:]
    width = spec.page_size * spec.head_dim
    parts = (data[..., :width], spec.head_dim), (data[..., width:], spec.v_head_dim)
    keys, values = (
        part.reshape(spec.num_pages, spec.num_kv_heads, spec.page_size, dim).transpose(0, 2, 1, 3)
        for part, dim in parts
    )
    return keys, values


def unsigned(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.dtype.itemsize}")

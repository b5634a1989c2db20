"""The physical layouts written down a second time, in numpy: pools for the tests, and what a kernel left in one.

Shares no code with pallas_kernels.kv.pages, whose docstring is what both follow.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv.pages import KVPages, KVSpec

QUANTIZED = ("float8_e4m3fn", "float8_e5m2", "int8")


def codes(values: np.ndarray, dtype: str, scale: np.ndarray | None) -> np.ndarray:
    """values f32 [..., K, C] as a pool of `dtype` holds them; with scale [K] divided by it first, and saturated."""
    if scale is None:
        return np.asarray(values, jnp.dtype(dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(values, np.float32) / scale[:, None]
        if dtype == "int8":
            return np.clip(np.rint(np.nan_to_num(scaled, nan=127.0)), -127, 127).astype(np.int8)
        limit = float(jnp.finfo(dtype).max)
        return np.clip(scaled, -limit, limit).astype(jnp.dtype(dtype))


def values_of(stored: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """What codes [..., K, C] stand for, float32."""
    values = stored.astype(np.float32)
    return values if scale is None else values * scale[:, None]


def make_pool(
    k: np.ndarray, v: np.ndarray, layout: str, k_scale=None, v_scale=None, values_in_keys: bool = False
) -> KVPages:
    """A pool that holds codes k [P, page_size, K, H] and v [P, page_size, K, Hv], unless these lie in k."""
    num_pages, page_size, num_heads, head_dim = k.shape
    spec = KVSpec(num_pages, page_size, num_heads, head_dim, v.shape[-1], k.dtype.name, values_in_keys)
    held = (k,) if values_in_keys else (k, v)
    if layout == "tpu":
        data = np.concatenate(held, axis=-1).reshape(num_pages, page_size, -1)
        data = np.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % 128)))
    else:
        tiles = [x.transpose(0, 2, 1, 3).reshape(num_pages, num_heads, -1) for x in held]
        data = np.concatenate(tiles, axis=-1)
    if layout == "cpu" and data.dtype.itemsize < 4:
        data = data.view(f"uint{8 * data.dtype.itemsize}")
    scales = (None if scale is None else jnp.asarray(scale, jnp.float32) for scale in (k_scale, v_scale))
    return KVPages(jnp.asarray(data), *scales, spec, layout)


def read_pool(kv: KVPages) -> tuple[np.ndarray, np.ndarray]:
    """The codes of all keys and values, as unsigned integers so that NaNs compare by their bits."""
    spec, data = kv.spec, np.asarray(kv.data)
    data = data.view(f"uint{8 * data.dtype.itemsize}")
    if spec.values_in_keys:
        shape = (spec.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        if kv.layout == "tpu":
            keys = data[..., : spec.num_kv_heads * spec.head_dim].reshape(*data.shape[:2], -1, spec.head_dim)
        else:
            keys = data.reshape(shape).transpose(0, 2, 1, 3)
        return keys, keys[..., : spec.v_head_dim]
    if kv.layout == "tpu":
        width = spec.head_dim + spec.v_head_dim
        rows = data[..., : spec.num_kv_heads * width].reshape(*data.shape[:2], spec.num_kv_heads, width)
        return rows[..., : spec.head_dim], rows[..., spec.head_dim :]
    width = spec.page_size * spec.head_dim
    parts = (data[..., :width], spec.head_dim), (data[..., width:], spec.v_head_dim)
    keys, values = (
        part.reshape(spec.num_pages, spec.num_kv_heads, spec.page_size, dim).transpose(0, 2, 1, 3)
        for part, dim in parts
    )
    return keys, values


def unsigned(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.dtype.itemsize}")

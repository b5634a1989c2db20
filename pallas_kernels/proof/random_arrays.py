"""Random values for the inputs of a proof: arrays of any dtype that kernels take, from a seed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jnp.ndarray:
    """Return normally distributed values times `scale`, of `shape` and `dtype`; of an integer dtype, uniform values of
    its whole range, without the least one of a signed dtype and without `scale`.
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        least = int(limits.min) + (limits.min < 0)  # codes are symmetric
        return jnp.asarray(rng.integers(least, int(limits.max) + 1, shape, dtype=np.int64).astype(dtype))
    return jnp.asarray((rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype))


def uniform(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jnp.ndarray:
    """Return uniform values from `scale` / 2 to 3 `scale` / 2, of `shape` and `dtype`."""
    return jnp.asarray((rng.uniform(0.5, 1.5, shape) * scale).astype(np.float32)).astype(dtype)


def typical(dtype: Any) -> float:
    """Return about the standard deviation of `normal`'s values of a dtype: 1 for floats, the largest integer by the
    square root of 3 for integers.
    """
    dtype = jnp.dtype(dtype)
    return 1.0 if not jnp.issubdtype(dtype, jnp.integer) else float(jnp.iinfo(dtype).max) / 3**0.5

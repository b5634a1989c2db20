"""Random values for the inputs of a proof: arrays of any dtype that kernels take, from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.core
import jax.numpy as jnp
import numpy as np

# Number of values that are drawn for an array; a larger array repeats them. A prime, so that rows and columns differ.
_MOST_DRAWN = (1 << 20) - 3


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jnp.ndarray:
    """Return normally distributed values times `scale`, of `shape` and `dtype`. For an integer dtype, return uniform
    values of its whole range, except the least one of a signed dtype, without `scale`.
    """
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        least = int(limits.min) + (limits.min < 0)  # codes are symmetric
        return _repeated(lambda count: rng.integers(least, int(limits.max) + 1, count, dtype=np.int64), shape, dtype)
    return _repeated(lambda count: rng.standard_normal(count, np.float32) * np.float32(scale), shape, dtype)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jnp.ndarray:
    """Return uniformly distributed values from 0.5 * `scale` to 1.5 * `scale`, of `shape` and `dtype`."""
    return _repeated(lambda count: (rng.uniform(0.5, 1.5, count) * scale).astype(np.float32), shape, jnp.dtype(dtype))


def _repeated(draw: Callable[[int], np.ndarray], shape: tuple[int, ...], dtype: Any) -> jnp.ndarray:
    """Return an array of `shape` and `dtype` filled with draw(n), n random values; at most _MOST_DRAWN are drawn, and
    repeated for a larger array.

    Within a trace (`jax.eval_shape`) nothing is drawn: only the shape counts there, and a matrix may have gigabytes.
    """
    if isinstance(jnp.zeros(()), jax.core.Tracer):
        return jnp.zeros(shape, dtype)
    values = draw(min(math.prod(shape), _MOST_DRAWN)).astype(dtype)
    return jax.device_put(np.resize(values, shape))  # jnp.asarray would compile a program for each shape


def typical(dtype: Any) -> float:
    """Return about the standard deviation of `normal`'s values of a dtype: 1 for floats, the largest integer divided by
    the square root of 3 for integers.
    """
    dtype = jnp.dtype(dtype)
    return 1.0 if not jnp.issubdtype(dtype, jnp.integer) else float(jnp.iinfo(dtype).max) / 3**0.5

"""Sums along rows whose rounding is the same whatever the number of rows.

XLA picks the order of a reduction's additions by the shape of the whole array, so a row's jnp.sum changes in its last
bit with the batch it runs in, and with it, now and then, a sampled token. Here every addition is an elementwise one,
between operands that depend on the row's length alone.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

BLOCK = 128
# Operands added in one kernel: enough for few kernels, which is what compile time goes by.
_FAN_IN = 8


def block_sums(x: jax.Array) -> jax.Array:
    """[S, V] -> [S, ceil(V / BLOCK)], the sums of consecutive blocks."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(x.shape[0], -1, BLOCK)
    while x.shape[2] > 1:
        half = x.shape[2] // 2
        x = x[:, :, :half] + x[:, :, half:]
    return x[:, :, 0]


def row_sums(x: jax.Array) -> jax.Array:
    """[S, V] -> [S, 1]."""
    while x.shape[1] > 1:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % _FAN_IN)))
        x = functools.reduce(operator.add, jnp.split(x, _FAN_IN, axis=1))
    return x

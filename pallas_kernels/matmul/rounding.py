"""Rows rounded to eight bits before they are multiplied with quantised weights: the codes and their scales.

Which rows are rounded how is said by the checkpoint. Knows nothing of layers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Largest code of each dtype, and the least. No scale made of a largest value leads to -128; a static one may.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
LEAST = {"int8": -128.0, "float8_e4m3fn": -448.0}
_TILE = 8, 128  # rows and columns that a TPU stores together


class RoundedRows(NamedTuple):
    """Rows as codes * scales.

    Attributes:
      codes: int8 or float8_e4m3fn [M, in].
      scales: f32 [M, n], each for in / n neighbouring codes of its row.
    """

    codes: jax.Array
    scales: jax.Array

    def widened(self, dtype: Any) -> jax.Array:
        """The rounded rows, [M, in]: exact in float32."""
        codes = _by_group(self.codes.astype(jnp.float32), self.scales.shape[1])
        return _as_rows(codes * _of_groups(self.scales, codes)).astype(dtype)


def largest_values(x: jax.Array, group: int) -> jax.Array:
    """Of each group of `group` neighbouring entries of rows [M, in], the largest magnitude: f32 [M, in / group]."""
    return _as_rows(jnp.max(jnp.abs(_by_group(x.astype(jnp.float32), x.shape[1] // group)), axis=3, keepdims=True))


def dynamic_scales(largest: jax.Array, dtype: str, *, powers: bool = False) -> jax.Array:
    """The scales with which the largest values just fit into codes of `dtype`; 1 for zeros. powers: of two only."""
    scales = jnp.where(largest > 0, largest / LARGEST[dtype], 1.0)
    if not powers:
        return scales
    # Up to the next number without a mantissa; one that has none stays.
    bits = lax.bitcast_convert_type(scales, jnp.uint32) + jnp.uint32(0x7FFFFF)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)


def rounded_rows(x: jax.Array, scales: jax.Array, dtype: str) -> RoundedRows:
    """Rows x [M, in] with scales f32 [M, n] or [1, 1] to the nearest codes, ties to even. Too large values saturate."""
    scales = jnp.broadcast_to(scales, (x.shape[0], scales.shape[1]))
    values = _by_group(x.astype(jnp.float32), scales.shape[1])
    values = _as_rows(jnp.clip(values / _of_groups(scales, values), LEAST[dtype], LARGEST[dtype]))
    return RoundedRows((jnp.round(values) if dtype == "int8" else values).astype(dtype), scales)


def _by_group(x: jax.Array, num_groups: int) -> jax.Array:
    """Rows [M, in] as [M / rows, n, rows, in / n]: where these are whole tiles of a TPU's memory nothing moves, and XLA
    rounds in one pass. With groups before rows it brings all into another order first."""
    size = x.shape[1] // num_groups
    rows = math.gcd(len(x), _TILE[0]) if size % _TILE[1] == 0 else 1
    return x.reshape(-1, rows, num_groups, size).swapaxes(1, 2)


def _as_rows(x: jax.Array) -> jax.Array:
    """The rows again of what `_by_group` gave."""
    blocks, groups, rows, size = x.shape
    return x.swapaxes(1, 2).reshape(blocks * rows, groups * size)


def _of_groups(scales: jax.Array, values: jax.Array) -> jax.Array:
    """Scales [M, n] beside values of `_by_group`."""
    blocks, groups, rows, _ = values.shape
    return scales.reshape(blocks, rows, groups, 1).swapaxes(1, 2)

"""Rows rounded to eight bits before they are multiplied with quantised weights: the codes and their scales.

Which rows are rounded how is said by the checkpoint. Knows nothing of layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Largest code of each dtype. int8 is symmetric, without -128.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


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
        num_rows, num_scales = self.scales.shape
        codes = self.codes.astype(jnp.float32).reshape(num_rows, num_scales, -1)
        return (codes * self.scales[:, :, None]).reshape(self.codes.shape).astype(dtype)


def largest_values(x: jax.Array, group: int) -> jax.Array:
    """Of each group of `group` neighbouring entries of rows [M, in], the largest magnitude: f32 [M, in / group]."""
    return jnp.max(jnp.abs(x.astype(jnp.float32)).reshape(x.shape[0], -1, group), axis=2)


def dynamic_scales(largest: jax.Array, dtype: str) -> jax.Array:
    """The scales with which the largest values just fit into codes of `dtype`; 1 for zeros."""
    return jnp.where(largest > 0, largest / LARGEST[dtype], 1.0)


def rounded_rows(x: jax.Array, scales: jax.Array, dtype: str) -> RoundedRows:
    """Rows x [M, in] with scales f32 [M, n] or [1, 1] to the nearest codes, ties to even. Too large values saturate."""
    scales = jnp.broadcast_to(scales, (x.shape[0], scales.shape[1]))
    values = x.astype(jnp.float32).reshape(*scales.shape, -1) / scales[:, :, None]
    values = jnp.clip(values, -LARGEST[dtype], LARGEST[dtype]).reshape(x.shape)
    return RoundedRows((jnp.round(values) if dtype == "int8" else values).astype(dtype), scales)

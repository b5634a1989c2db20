"""Rows rounded to eight or four bits before they are multiplied with quantised weights: the codes and their scales.

Which rows are rounded how is said by the checkpoint. Knows nothing of layers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Largest code of each dtype, and the least. No scale made of a largest value leads to -128; a static one may.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}
LEAST = {"int8": -128.0, "float8_e4m3fn": -448.0, "float4_e2m1fn": -6.0}
# What dynamic scales are rounded to: not at all; up to powers of two (DeepSeek-V3.1); to powers of two that are the
# largest code's for the largest value (OCP Microscaling 1.0, 6.3, where a value that is nearly the next power counts as
# that, as compressed-tensors has it); to e4m3 beside a scale of all rows (NVFP4).
FLOAT32, UE8M0, E8M0, E4M3 = SCALES = "float32", "ue8m0", "e8m0", "e4m3"
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


def dynamic_scales(largest: jax.Array, dtype: str, *, kind: str = FLOAT32, whole: jax.Array | None = None) -> jax.Array:
    """The scales with which the largest values just fit into codes of `dtype`; 1 for zeros.

    kind: one of SCALES. whole: with E4M3, what divides all scales, f32 [M, 1] or [1, 1].
    """
    if kind == E8M0:
        # A mantissa of one bit is nearer to the next power from 1.75 on.
        power = _without_mantissa(jnp.minimum(largest, 2.0**127), 1 << 21)
        scales = power * 2.0 ** -(int(LARGEST[dtype]).bit_length() - 1)
        return jnp.where(scales > 0, scales, 1.0)
    scales = largest / LARGEST[dtype]
    if kind == E4M3:
        assert whole is not None, "scales of e4m3 are parts of one for all"
        held = _held_scales(largest, dtype, whole)
        return jnp.where(held > 0, held / whole, 1.0)
    scales = jnp.where(largest > 0, scales, 1.0)
    # Up to the next number without a mantissa; one that has none stays.
    return scales if kind == FLOAT32 else _without_mantissa(scales, 0x7FFFFF)


def _held_scales(largest: jax.Array, dtype: str, whole: jax.Array) -> jax.Array:
    """Scales of E4M3 as they are held: times `whole`, rounded; 0 for what is less than half of the least."""
    held = jnp.minimum(largest / LARGEST[dtype] * whole, LARGEST["float8_e4m3fn"])
    return held.astype(jnp.float8_e4m3fn).astype(jnp.float32)


def microscaled_rows(x: jax.Array, group: int, dtype: str, *, kind: str, whole: jax.Array | None = None) -> jax.Array:
    """Rows [M, in] with the values that codes of `dtype` and scales of `group` inputs each stand for, in x's dtype.

    Powers of two, or with E4M3 scales as they are held: the values are those times `whole`. So they are exact in
    bfloat16, and a product need not know of their scales, which are as many as it would take.
    """
    largest = largest_values(x, group)
    rows = rounded_rows(x, dynamic_scales(largest, dtype, kind=kind, whole=whole), dtype)
    if kind == E4M3 and whole is not None:
        rows = rows._replace(scales=_held_scales(largest, dtype, whole) * 0.5)
    return rows.widened(x.dtype)


def _without_mantissa(x: jax.Array, added: int) -> jax.Array:
    """x >= 0 rounded down to a power of two, after `added` has been added to its bits."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(added)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFF800000), jnp.float32)


def rounded_rows(x: jax.Array, scales: jax.Array, dtype: str) -> RoundedRows:
    """Rows x [M, in] with scales f32 [M, n] or [1, 1] to the nearest codes, ties to even. Too large values saturate.

    Codes of float4_e2m1fn are int8 twice as large, and their scales half of those given.
    """
    scales = jnp.broadcast_to(scales, (x.shape[0], scales.shape[1]))
    values = _by_group(x.astype(jnp.float32), scales.shape[1])
    values = _as_rows(jnp.clip(values / _of_groups(scales, values), LEAST[dtype], LARGEST[dtype]))
    if dtype == "float4_e2m1fn":
        return RoundedRows(_doubled_e2m1(values).astype(jnp.int8), scales * 0.5)
    return RoundedRows((jnp.round(values) if dtype == "int8" else values).astype(dtype), scales)


def _doubled_e2m1(values: jax.Array) -> jax.Array:
    """Twice the numbers of two bits of exponent and one of mantissa that are nearest, of values of at most 6: steps are
    a half below 2, one below 4, else two."""
    size = jnp.abs(values)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return 2 * step * jnp.round(values / step)


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

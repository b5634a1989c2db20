"""Rounding of rows to eight or four bits before a product with quantised weights: codes and their scales.

Which rows are rounded, and how, follows from the checkpoint and is decided in jaxengine.models.quantization.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Largest code of each dtype, and the least. A dynamic scale never leads to -128; a static one may.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float4_e2m1fn": 6.0}
LEAST = {"int8": -128.0, "float8_e4m3fn": -448.0, "float4_e2m1fn": -6.0}
MOST_CODE = 512  # no code of any dtype is as large
# For floats: bits of the mantissa, and the power of two below which the steps between numbers get no smaller.
_SHORT = {"float8_e4m3fn": (3, 2.0**-6), "float4_e2m1fn": (1, 1.0)}
# Rounding of dynamic scales: none; up to a power of two (DeepSeek-V3.1); to the power of two of the largest value
# divided by that of the largest code (OCP Microscaling 1.0, 6.3; a value just below the next power counts as that
# power, as in compressed-tensors); to e4m3 with a global scale (NVFP4).
FLOAT32, UE8M0, E8M0, E4M3 = SCALES = "float32", "ue8m0", "e8m0", "e4m3"
_EXPONENT = 0x7F800000  # bits of the exponent of a float32
_LEAST_NORMAL = 2.0**-126  # of float32
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
        """Return the values codes * scales, [M, in] in `dtype`; they are exact in float32."""
        codes = by_group(self.codes.astype(jnp.float32), self.scales.shape[1])
        return as_rows(codes * of_groups(self.scales, codes)).astype(dtype)

    def in_units(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Return the values divided by a unit of their row, rounded to `dtype` once, and the units f32 [M, 1], powers
        of two: see `units_of`.
        """
        units = units_of(self.scales, 1)
        return RoundedRows(self.codes, self.scales / units).widened(dtype), units


def largest_values(x: jax.Array, group: int) -> jax.Array:
    """Return the largest magnitude in each group of `group` neighbouring entries of rows x [M, in]: f32 [M, in /
    group].

    NaN counts as infinity: XLA's maximum on CPUs may pass over it, and int8 has no code for it, so the scale carries
    it.
    """
    values = by_group(x.astype(jnp.float32), x.shape[1] // group)
    return as_rows(largest_of(jnp.where(jnp.isnan(values), jnp.inf, values)))


def largest_of(values: jax.Array) -> jax.Array:
    """Return the largest magnitude per group of values shaped by `by_group`; the last dimension becomes 1."""
    return jnp.max(jnp.abs(values), axis=3, keepdims=True)


def dynamic_scales(largest: jax.Array, dtype: str, *, kind: str = FLOAT32) -> jax.Array:
    """Return scales f32, of the shape of `largest`, for which these largest values just fit into codes of `dtype`.

    A scale is 1 for 0, and for values so small that it would be subnormal. UE8M0 scales are rounded up to powers of
    two. An E8M0 scale is the largest value's power of two (the next one if the mantissa is at least 1.75) over that of
    the largest code; a value may then exceed the largest code, and saturates. kind: any of SCALES but E4M3
    (AssertionError).
    """
    assert kind != E4M3, "scales of e4m3 are parts of one for all: held_scales"
    if kind == E8M0:
        # With one bit of mantissa, values from 1.75 on are nearer to the next power.
        largest = jnp.minimum(largest, 2.0**127)
        power = _power(largest)
        power = jnp.where(largest >= 1.75 * power, 2 * power, power)
        scales = power * 2.0 ** -(int(LARGEST[dtype]).bit_length() - 1)
        return jnp.where(scales > 0, scales, 1.0)
    # A subnormal scale may count as 0 when it is a divisor.
    scales = _in_largest(largest, dtype)
    scales = jnp.where(scales < _LEAST_NORMAL, 1.0, scales)
    if kind == FLOAT32:
        return scales
    # Round up to the next number without a mantissa; a number that has none is unchanged.
    power = _power(scales)
    return jnp.where(scales > power, 2 * power, power)


def static_scales(x: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
    """Return the scales for rows x [M, in] rounded to codes of `dtype` with given `scales`, f32 [M, 1] or [1, 1]:
    `scales` itself for float codes.

    For integer codes, which cannot express NaN, the result is [M, 1], with NaN for rows that hold a NaN.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return scales
    return jnp.where(jnp.any(jnp.isnan(x), axis=1, keepdims=True), jnp.nan, scales)


def held_scales(largest: jax.Array, dtype: str, *, kind: str, global_scale: jax.Array | None) -> jax.Array:
    """Return scales as the format `kind` stores them: f32, of the shape of `largest`, the largest magnitudes of the
    values that share a scale.

    E4M3: (largest / the largest code of `dtype`) * f32 `global_scale`, at most 448, rounded to the nearest e4m3 number,
    which is 0 below half of the least one; AssertionError if `global_scale` is None. Other kinds: `dynamic_scales`, and
    `global_scale` is not used.
    """
    if kind != E4M3:
        return dynamic_scales(largest, dtype, kind=kind)
    assert global_scale is not None, "scales of e4m3 are parts of one for all"
    return _short(jnp.minimum(_in_largest(largest, dtype) * global_scale, LARGEST["float8_e4m3fn"]), "float8_e4m3fn")


def microscaled(values: jax.Array, held: jax.Array, dtype: str, *, global_scale: jax.Array | None) -> jax.Array:
    """Round f32 values, shaped by `by_group`, to numbers of `dtype` times the scales `held`, results of `held_scales`;
    return f32 of the same shape. Values beyond the least and the largest number become that.

    global_scale: that of E4M3 scales, by which the results are then too large; None for scales that are powers of two.
    """
    if global_scale is None:
        # The inverse of a power of two is half of the number with the complemented exponent.
        bits = lax.bitcast_convert_type(held, jnp.int32) ^ jnp.int32(_EXPONENT)
        values = values * (0.5 * lax.bitcast_convert_type(bits, jnp.float32))
    else:
        values = values / jnp.where(held > 0, held / global_scale, 1.0)
    return _short(jnp.clip(values, LEAST[dtype], LARGEST[dtype]), dtype) * held


def _in_largest(largest: jax.Array, dtype: str) -> jax.Array:
    """Return `largest` divided by the largest code of `dtype`. It is multiplied by the inverse, as XLA does for a
    constant divisor and kernels do not.
    """
    return largest * (1 / LARGEST[dtype])


def _short(values: jax.Array, dtype: str) -> jax.Array:
    """Return f32 values rounded to the nearest numbers of a short float, "float8_e4m3fn" or "float4_e2m1fn", ties to
    even, its subnormal numbers included. The values must be in its range. Raises KeyError for another dtype.
    """
    mantissa, least = _SHORT[dtype]
    # After the addition of a number this much larger, float32 has no smaller steps.
    magnifier = jnp.maximum(_power(values), least) * (1.5 * 2.0 ** (23 - mantissa))
    return (values + magnifier) - magnifier


def _power(x: jax.Array) -> jax.Array:
    """Return the largest power of two up to |x|, f32; 0 for a subnormal x, infinite where x is not finite."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(_EXPONENT), jnp.float32)


def units_of(scales: jax.Array, axis: int) -> jax.Array:
    """Return powers of two, f32, in units of which any code times the scales [..., n, ...] along `axis` is below 2^15.
    The result has size 1 along `axis`; it is 1 for scales of 0.

    In such units float16 holds codes as well as bfloat16 does, and eight times as finely, unless a scale is very small:
    codes of a scale 2^20 times smaller than the largest are still normal numbers.
    """
    power = _power(jnp.max(jnp.abs(scales.astype(jnp.float32)), axis=axis, keepdims=True))
    # The divisor must not be subnormal, which would count as 0.
    return jnp.where(power > 0, jnp.maximum(power * (MOST_CODE / 2**14), _LEAST_NORMAL), 1.0)


def rounded_rows(x: jax.Array, scales: jax.Array, dtype: str) -> RoundedRows:
    """Return rows x [M, in] divided by scales f32 [M, n] or [1, 1] and rounded to the nearest codes of `dtype`, int8 or
    float8_e4m3fn, ties to even, with those scales as [M, n]. Too large values saturate.
    """
    scales = jnp.broadcast_to(scales, (x.shape[0], scales.shape[1]))
    values = by_group(x.astype(jnp.float32), scales.shape[1])
    values = as_rows(jnp.clip(values / of_groups(scales, values), LEAST[dtype], LARGEST[dtype]))
    return RoundedRows((jnp.round(values) if dtype == "int8" else values).astype(dtype), scales)


def by_group(x: jax.Array, num_groups: int) -> jax.Array:
    """Return rows x [M, in] reshaped to [M / rows, n, rows, in / n], n = num_groups. If in / n is a multiple of 128,
    rows is the largest of 8, 4, 2 and 1 that divides M, else 1.

    Where these are full tiles of a TPU's memory no data moves, and XLA rounds in one pass; with groups before rows it
    would reorder everything first.
    """
    size = x.shape[1] // num_groups
    rows = math.gcd(len(x), _TILE[0]) if size % _TILE[1] == 0 else 1
    return x.reshape(-1, rows, num_groups, size).swapaxes(1, 2)


def as_rows(x: jax.Array) -> jax.Array:
    """Return values x shaped by `by_group` as rows [M, in] again."""
    blocks, groups, rows, size = x.shape
    return x.swapaxes(1, 2).reshape(blocks * rows, groups * size)


def of_groups(scales: jax.Array, values: jax.Array) -> jax.Array:
    """Return scales [M, n] reshaped to broadcast with values shaped by `by_group`."""
    blocks, groups, rows, _ = values.shape
    return scales.reshape(blocks, rows, groups, 1).swapaxes(1, 2)

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
MOST_CODE = 512  # no code of any dtype is as large
# Of floats, bits of the mantissa and the power of two below which steps get no smaller.
_SHORT = {"float8_e4m3fn": (3, 2.0**-6), "float4_e2m1fn": (1, 1.0)}
# What dynamic scales are rounded to: not at all; up to powers of two (DeepSeek-V3.1); to powers of two that are the
# largest code's for the largest value (OCP Microscaling 1.0, 6.3, where a value that is nearly the next power counts as
# that, as compressed-tensors has it); to e4m3 beside a scale of all rows (NVFP4).
FLOAT32, UE8M0, E8M0, E4M3 = SCALES = "float32", "ue8m0", "e8m0", "e4m3"
_EXPONENT = 0x7F800000  # the bits of a float32's
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
        """The rounded rows, [M, in]: exact in float32."""
        codes = by_group(self.codes.astype(jnp.float32), self.scales.shape[1])
        return as_rows(codes * of_groups(self.scales, codes)).astype(dtype)

    def in_units(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The rounded rows in units of their own, rounded to `dtype` once, and those f32 [M, 1]: see `units_of`."""
        units = units_of(self.scales, 1)
        return RoundedRows(self.codes, self.scales / units).widened(dtype), units


def largest_values(x: jax.Array, group: int) -> jax.Array:
    """Of each group of `group` neighbouring entries of rows [M, in], the largest magnitude: f32 [M, in / group].

    NaN counts as infinity: XLA's maximum on CPUs may pass over it, and int8 has no code for it: the scale tells.
    """
    values = by_group(x.astype(jnp.float32), x.shape[1] // group)
    return as_rows(largest_of(jnp.where(jnp.isnan(values), jnp.inf, values)))


def largest_of(values: jax.Array) -> jax.Array:
    """The same of values of `by_group`, beside them."""
    return jnp.max(jnp.abs(values), axis=3, keepdims=True)


def dynamic_scales(largest: jax.Array, dtype: str, *, kind: str = FLOAT32) -> jax.Array:
    """The scales with which the largest values just fit into codes of `dtype`; 1 for zeros, and for what is so small
    that its scale would be no normal number. kind: any but E4M3."""
    assert kind != E4M3, "scales of e4m3 are parts of one for all: held_scales"
    if kind == E8M0:
        # A mantissa of one bit is nearer to the next power from 1.75 on.
        largest = jnp.minimum(largest, 2.0**127)
        power = _power(largest)
        power = jnp.where(largest >= 1.75 * power, 2 * power, power)
        scales = power * 2.0 ** -(int(LARGEST[dtype]).bit_length() - 1)
        return jnp.where(scales > 0, scales, 1.0)
    # A subnormal scale may count as 0 where it divides.
    scales = _in_largest(largest, dtype)
    scales = jnp.where(scales < _LEAST_NORMAL, 1.0, scales)
    if kind == FLOAT32:
        return scales
    # Up to the next number without a mantissa; one that has none stays.
    power = _power(scales)
    return jnp.where(scales > power, 2 * power, power)


def static_scales(x: jax.Array, scales: jax.Array, dtype: str) -> jax.Array:
    """Scales f32 [M, 1] or [1, 1] that rows x [M, in] are told; NaN of rows with NaN, which no integer is."""
    if jnp.issubdtype(dtype, jnp.floating):
        return scales
    return jnp.where(jnp.any(jnp.isnan(x), axis=1, keepdims=True), jnp.nan, scales)


def held_scales(largest: jax.Array, dtype: str, *, kind: str, whole: jax.Array | None) -> jax.Array:
    """Scales of few bits as they are held: those of E4M3 times `whole`, f32 that goes with them, and 0 for what is less
    than half of the least."""
    if kind != E4M3:
        return dynamic_scales(largest, dtype, kind=kind)
    assert whole is not None, "scales of e4m3 are parts of one for all"
    return _short(jnp.minimum(_in_largest(largest, dtype) * whole, LARGEST["float8_e4m3fn"]), "float8_e4m3fn")


def microscaled(values: jax.Array, held: jax.Array, dtype: str, *, whole: jax.Array | None) -> jax.Array:
    """f32 values rounded to numbers of `dtype` times `held` scales; whole: of those of E4M3, None for powers of two."""
    if whole is None:
        # One over a power of two, half of the number whose exponent has all other bits.
        bits = lax.bitcast_convert_type(held, jnp.int32) ^ jnp.int32(_EXPONENT)
        values = values * (0.5 * lax.bitcast_convert_type(bits, jnp.float32))
    else:
        values = values / jnp.where(held > 0, held / whole, 1.0)
    return _short(jnp.clip(values, LEAST[dtype], LARGEST[dtype]), dtype) * held


def _in_largest(largest: jax.Array, dtype: str) -> jax.Array:
    """Largest values in units of the largest code: multiplied, as XLA does with what is divided by a constant, and
    kernels do not."""
    return largest * (1 / LARGEST[dtype])


def _short(values: jax.Array, dtype: str) -> jax.Array:
    """The nearest numbers of a float of few bits, ties to even, of f32 values that are none too large."""
    mantissa, least = _SHORT[dtype]
    # Beside a number so much larger float32 has no smaller steps.
    beside = jnp.maximum(_power(values), least) * (1.5 * 2.0 ** (23 - mantissa))
    return (values + beside) - beside


def _power(x: jax.Array) -> jax.Array:
    """The power of two in f32 x, without its sign; infinite where x is not finite."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(_EXPONENT), jnp.float32)


def units_of(scales: jax.Array, axis: int) -> jax.Array:
    """The powers of two of which any code times the scales [..., n, ...] along `axis` is less than 2^15: f32, 1 there.

    In such units float16 holds codes as well as bfloat16 does, and eight times as finely, where a scale is none too
    small: codes of a scale 2^20 times smaller than the largest are normal numbers still.
    """
    power = _power(jnp.max(jnp.abs(scales.astype(jnp.float32)), axis=axis, keepdims=True))
    # What divides is no subnormal number, which would count as 0.
    return jnp.where(power > 0, jnp.maximum(power * (MOST_CODE / 2**14), _LEAST_NORMAL), 1.0)


def rounded_rows(x: jax.Array, scales: jax.Array, dtype: str) -> RoundedRows:
    """Rows x [M, in] with scales f32 [M, n] or [1, 1] to the nearest codes, ties to even. Too large values saturate."""
    scales = jnp.broadcast_to(scales, (x.shape[0], scales.shape[1]))
    values = by_group(x.astype(jnp.float32), scales.shape[1])
    values = as_rows(jnp.clip(values / of_groups(scales, values), LEAST[dtype], LARGEST[dtype]))
    return RoundedRows((jnp.round(values) if dtype == "int8" else values).astype(dtype), scales)


def by_group(x: jax.Array, num_groups: int) -> jax.Array:
    """Rows [M, in] as [M / rows, n, rows, in / n]: where these are whole tiles of a TPU's memory nothing moves, and XLA
    rounds in one pass. With groups before rows it brings all into another order first."""
    size = x.shape[1] // num_groups
    rows = math.gcd(len(x), _TILE[0]) if size % _TILE[1] == 0 else 1
    return x.reshape(-1, rows, num_groups, size).swapaxes(1, 2)


def as_rows(x: jax.Array) -> jax.Array:
    """The rows again of what `by_group` gave."""
    blocks, groups, rows, size = x.shape
    return x.swapaxes(1, 2).reshape(blocks * rows, groups * size)


def of_groups(scales: jax.Array, values: jax.Array) -> jax.Array:
    """Scales [M, n] beside values of `by_group`."""
    blocks, groups, rows, _ = values.shape
    return scales.reshape(blocks, rows, groups, 1).swapaxes(1, 2)

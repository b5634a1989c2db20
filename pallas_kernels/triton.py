"""Functions that kernels in Pallas-Triton share: sizes that Triton accepts, and codes as operands of tensor cores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LEAST = 16  # rows and columns of operands of a tensor-core product


def padded(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least LEAST."""
    return max(1 << (size - 1).bit_length(), LEAST)


def widened(codes: jax.Array, dtype: Any) -> jax.Array:
    """Return one-byte codes, int8, float8_e5m2 or float8_e4m3fn, converted to `dtype`. Floats are converted by their
    bits.
    """
    if codes.dtype == jnp.int8:
        return codes.astype(dtype)
    bits = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int16)  # with 8 more bits of the sign
    if codes.dtype == jnp.float8_e5m2:  # the upper half of a float16
        return lax.bitcast_convert_type(bits << 8, jnp.float16).astype(dtype)
    # Sign, exponent and mantissa of e4m3, as they lie in a float16, whose exponent counts from 8 less.
    halves = lax.bitcast_convert_type((bits << 7) & jnp.int16(-0x4080), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, halves.astype(jnp.float32) * 256.0).astype(dtype)


def widened_pairs(codes: jax.Array) -> jax.Array:
    """Return pairs of four-bit codes, uint8 [out, in / 2] with the first of a pair in the low bits, as bfloat16 [out,
    in]: signed integers from -8 to 7.
    """
    bits = codes.astype(jnp.uint16)
    # A code plus 8 in the low bits of 128: bfloat16 has no others between 128 and 256, and conversions are slow.
    parts = [lax.bitcast_convert_type((part & 15) ^ 0x4308, jnp.bfloat16) for part in (bits, bits >> 4)]
    low, high = ((part - jnp.bfloat16(136))[..., None] for part in parts)
    return jnp.concatenate([low, high], axis=-1).reshape(codes.shape[0], -1)

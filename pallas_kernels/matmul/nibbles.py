"""Pairs of signed four-bit codes in a byte: those of two neighbouring inputs, the even one in the low bits.

Arrays of jax's own int4 are not passed between programs, because an executable compiled ahead of time refuses them (jax
0.10.2 on a CPU reports a layout for such an argument that differs from the array's). A product with pairs is the sum of
two products, one of the even and one of the odd inputs, so that codes need not be reordered.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def per_byte(dtype: Any) -> int:
    """Return the number of codes in an element of an array of this dtype: 2 for uint8, else 1."""
    return 2 if dtype == jnp.uint8 else 1


def code_parts(codes: jax.Array) -> list[jax.Array]:
    """Return a list of the factors of successive products: the codes [..., n, out] themselves, or for uint8 pairs the
    codes of the even and those of the odd inputs, int8 [..., n, out] each.
    """
    if codes.dtype != jnp.uint8:
        return [codes]
    pairs = lax.bitcast_convert_type(codes, jnp.int8)
    four = jnp.int8(4)
    return [lax.shift_right_arithmetic(lax.shift_left(pairs, four), four), lax.shift_right_arithmetic(pairs, four)]


def row_parts(x: jax.Array, dtype: Any) -> list[jax.Array]:
    """Return a list of the parts of rows x [..., in] that match `code_parts` of codes of this dtype: the rows
    themselves, or for uint8 pairs their even and their odd inputs, [..., in / 2] each.
    """
    count = per_byte(dtype)
    return [x[..., first::count] for first in range(count)]

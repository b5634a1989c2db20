"""Two signed codes of four bits in a byte: those of two neighbouring inputs, the even one in the low bits.

Arrays of jax's own int4 are not used between programs: an executable compiled ahead of time refuses them (jax 0.10.2
on a CPU calls the layout of such an argument another one than its own). A product with pairs is the sum of two
products, of every second input each, so that codes need not be brought into order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def per_byte(dtype: Any) -> int:
    """Codes in an entry of an array of this dtype."""
    return 2 if dtype == jnp.uint8 else 1


def code_parts(codes: jax.Array) -> list[jax.Array]:
    """Codes [..., n, out] as the factors of one product after the other: themselves, or int8 of even and odd inputs."""
    if codes.dtype != jnp.uint8:
        return [codes]
    pairs = lax.bitcast_convert_type(codes, jnp.int8)
    four = jnp.int8(4)
    return [lax.shift_right_arithmetic(lax.shift_left(pairs, four), four), lax.shift_right_arithmetic(pairs, four)]


def row_parts(x: jax.Array, dtype: Any) -> list[jax.Array]:
    """Rows [..., in] as they meet the parts of codes of this dtype."""
    count = per_byte(dtype)
    return [x[..., first::count] for first in range(count)]

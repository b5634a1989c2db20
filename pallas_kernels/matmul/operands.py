"""Operands of products with quantised matrices, as implementations get them from the public operations."""

from __future__ import annotations

from typing import NamedTuple

import jax


class QuantizedOperands(NamedTuple):
    """Rows, and a quantised matrix, codes * scales - zeros, or one for each of G groups; checked.

    Attributes:
      x: [M, in], or the codes of rounded rows (see `rounding.RoundedRows`).
      x_scales: f32 [M, n] of rounded rows; None for others.
      codes: [in, out], or [in / 2, out] in pairs (see `nibbles`); of groups [G, in, out].
      scales: [n, out], of n groups of inputs; of groups of rows [G, n, out].
      zeros: as scales; None for none.
    """

    x: jax.Array
    x_scales: jax.Array | None
    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None

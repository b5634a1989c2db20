"""Operands of products with quantised matrices, as implementations get them from the public operations."""

from __future__ import annotations

from typing import NamedTuple

import jax


class QuantizedOperands(NamedTuple):
    """Checked operands: rows, and a quantised matrix, codes * scales - zeros, or one for each of G groups of rows.

    Attributes:
      x: [M, in], or the codes of rounded rows (see `rounding.RoundedRows`).
      x_scales: f32 [M, n] of rounded rows; None for others.
      codes: [in, out], or [in / 2, out] in pairs (see `nibbles`); with a first axis of G for groups.
      scales: [n, out], for n groups of inputs; with a first axis of G for groups of rows.
      zeros: the zero points times their scales, of the shape of scales; None for none.
    """

    x: jax.Array
    x_scales: jax.Array | None
    codes: jax.Array
    scales: jax.Array
    zeros: jax.Array | None

"""Alignment of rows of one-byte numbers in VMEM to the beginning of registers.

Memory holds 32 such rows as a register, four to a word. Unaligned rows are read as words and rotated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS = 32  # rows of a register
_WORDS = ROWS // 4


def move_rows(x: Any, begin: Any, size: int, to: Any) -> None:
    """Copy `size` rows of `x`, from `begin` on, to the first rows of `to`. The rows of `to` after them, up to a full
    register, become undefined.

    x, to: references [M, in] and [at least size, in] of one-byte numbers, with multiples of ROWS rows. begin: a
    multiple of four.
    """
    low = lax.div(begin, ROWS) * ROWS
    skipped = lax.div(begin - low, 4)

    def rotated(index: int) -> jax.Array:
        """Return the rows of register `index` as i32 [ROWS / 4, in], rotated so that the skipped ones come last."""
        # A register past the end is clamped: nothing of it is used.
        at = pl.multiple_of(jnp.minimum(low + index * ROWS, x.shape[0] - ROWS), ROWS)
        return pltpu.roll(pltpu.bitcast(x[pl.ds(at, ROWS), :], jnp.int32), lax.rem(_WORDS - skipped, _WORDS), 0)

    is_first = lax.broadcasted_iota(jnp.int32, (_WORDS, x.shape[1]), 0) < _WORDS - skipped
    this = rotated(0)
    for index in range(pl.cdiv(size, ROWS)):
        following = rotated(index + 1)
        to[pl.ds(index * ROWS, ROWS), :] = pltpu.bitcast(jnp.where(is_first, this, following), to.dtype)
        this = following

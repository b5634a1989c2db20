"""Rows of a ragged batch's states: the argument that all operations on states share.

States are arrays [R, ...]. An operation reads the row that holds a sequence's state, computes all of the sequence's new
tokens, and writes the state after the last of them.

Shape letters: T new tokens, S sequences, R rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

# Fields of StateRows that are arrays.
ARRAYS = "cu_q_lens", "reads", "writes", "saves", "num_seqs", "num_decode"


@partial(jax.tree_util.register_dataclass, data_fields=ARRAYS, meta_fields=("width",))
@dataclass(frozen=True)
class StateRows:
    """New tokens of S sequences, concatenated, and the rows of their states; every array is int32.

    Sequences from `num_seqs` on have no new tokens. A sequence without new tokens reads and writes nothing. No row may
    be written twice, or read by one sequence and written by another.

    Attributes:
      cu_q_lens: [S + 1] first token of each sequence.
      reads: [S] row of the state before the first new token, -1: zeros.
      writes: [S] row of the state after the last new token; R or more: kept nowhere.
      saves: [S] second row for that state, used by sequences of several new tokens; R or more: none.
      num_seqs: [] live sequences.
      num_decode: [] sequences [0, num_decode) have exactly one new token.
      width: if above 1, no sequence has more new tokens, and they are computed one after the other instead of in
        chunks.
    """

    cu_q_lens: jax.Array
    reads: jax.Array
    writes: jax.Array
    saves: jax.Array
    num_seqs: jax.Array
    num_decode: jax.Array
    width: int = 1

    def at(self, rows: Callable[[jax.Array], jax.Array]) -> StateRows:
        """Return the same tokens with other rows: those that `rows` maps reads (without -1), writes and saves to."""
        reads = jnp.where(self.reads < 0, -1, rows(self.reads))
        return replace(self, reads=reads, writes=rows(self.writes), saves=rows(self.saves))


def check_rows(rows: StateRows) -> None:
    """Raise ValueError, with the field's name, unless the arrays of `rows` are int32, cu_q_lens has S + 1 entries,
    num_seqs and num_decode are scalars, and the others have S = rows.reads.size entries.
    """
    num_seqs = rows.reads.size
    shapes = {"cu_q_lens": (num_seqs + 1,), "num_seqs": (), "num_decode": ()}
    for field in ARRAYS:
        array = getattr(rows, field)
        shape = shapes.get(field, (num_seqs,))
        if array.dtype != jnp.int32 or array.shape != shape:
            raise ValueError(f"StateRows.{field} must be int32{list(shape)}, got {array.dtype}{list(array.shape)}")


def read_rows(state: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows `index` i32 [n] of state [R, ...] as float32 [n, ...]: zeros for -1, the last row for R or more."""
    found = state[jnp.clip(index, 0, state.shape[0] - 1)].astype(jnp.float32)
    return jnp.where((index >= 0).reshape(-1, *(1,) * (state.ndim - 1)), found, 0.0)


def write_rows(state: jax.Array, index: jax.Array, values: jax.Array, keep: Any = True) -> jax.Array:
    """Return state [R, ...] with rows `index` i32 [n], none of them negative, set to values [n, ...]. Rows for which
    `keep` (bool [n] or one bool) is False, and indices of R or more, are dropped.
    """
    index = jnp.where(keep, index, state.shape[0])
    return state.at[index].set(values.astype(state.dtype), mode="drop")

"""Whole sequences without pages: B rows of T tokens, each cut into runs of consecutive tokens that see each other.

The unpaged operations take the B * T tokens one row after the other, and the first token of each run (`cu_q_lens`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def run_numbers(cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """Return the index of the run of each token, i32 [num_tokens].

    cu_q_lens: i32 [S + 1], first tokens of runs, then `num_tokens`.
    """
    starts = jnp.zeros((num_tokens,), jnp.int32).at[cu_q_lens[:-1]].add(1, mode="drop")
    return jnp.cumsum(starts, dtype=jnp.int32) - 1


def run_indexes(cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """Return the index of each token in its run, i32[num_tokens]. cu_q_lens: i32[S + 1], first tokens of runs, then
    `num_tokens`.
    """
    return jnp.arange(num_tokens, dtype=jnp.int32) - cu_q_lens[run_numbers(cu_q_lens, num_tokens)]


def run_starts(segment_ids: jax.Array | None, num_rows: int, length: int) -> jax.Array:
    """Return bool [num_rows, length], whether each token is the first of its run.

    segment_ids: i32 [num_rows, length]; neighbours of a row with equal ids form a run. None: each row is one run.
    """
    is_first = jnp.zeros((num_rows, length), bool).at[:, 0].set(True)
    if segment_ids is None:
        return is_first
    return is_first.at[:, 1:].set(segment_ids[:, 1:] != segment_ids[:, :-1])

"""Recurrences over ragged batches with XLA: single tokens one by one, several tokens of a sequence in chunks.

Single tokens are processed a few sequences at a time, and longer runs one chunk after the other, so that the cost
follows the real lengths and a step holds few states in addition to the stored ones. The rule itself is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.state.rows import StateRows, read_rows, write_rows
from jaxengine.pallas_kernels.zeros import zeros_in_layer

SEQS = 16  # single-token sequences processed together
CHUNK = 64  # tokens of one sequence processed together

# Per-token inputs of a rule: its own tuple of arrays [T, n, ...], each with some number of heads n.
Tokens = Any
# A rule: (tokens, f32 states before) to (outputs, f32 states after).
Rule = Callable[[Tokens, jax.Array], tuple[jax.Array, jax.Array]]


class ChunkRuns(NamedTuple):
    """Runs of consecutive tokens of one sequence in a chunk of C tokens, for chunks with tokens of several sequences.

    Attributes:
      same: bool [C, C], whether two tokens belong to one run.
      goes_on: bool [C], whether a token belongs to the run that continues from the chunk's initial state.
    """

    same: jax.Array
    goes_on: jax.Array


def sums_between(decay: jax.Array) -> jax.Array:
    """Return the logarithm of the decay between any two of C tokens, f32 [n, C, C, ...], of f32 [n, C, ...], that of
    each token: entry [:, i, j] is the sum of the tokens after j up to i, and 0 unless j is before i.

    Each is a sum by itself. A difference of two sums from the first token would lose digits: the more, the more the
    tokens before have decayed, other sequences' included.
    """
    later = jnp.tril(jnp.ones((decay.shape[1],) * 2, bool), -1).reshape(*decay.shape[1:2] * 2, *(1,) * (decay.ndim - 2))
    return jnp.cumsum(jnp.where(later, decay[:, :, None], 0.0), axis=1)


def sums_after(decay: jax.Array, axis: int) -> jax.Array:
    """Return for each token, along `axis`, the sum of `decay` over the tokens after it; 0 for the last."""
    later = lax.slice_in_dim(decay, 1, None, axis=axis)
    widths = [(0, int(each == axis)) for each in range(decay.ndim)]
    return lax.cumsum(jnp.pad(later, widths), axis=axis, reverse=True)


def recurrence(
    tokens: Tokens, shape: tuple[int, ...], state: jax.Array, rows: StateRows, *, single: Rule, chunk: Rule
) -> tuple[jax.Array, jax.Array]:
    """Run a recurrence over a ragged batch: return its outputs f32 [T, *shape], and the states after the step.

    The first num_decode sequences, or all if T is S, have one token at most and use the rule `single`; the others use
    `chunk`. If rows.width is above 1, all sequences use `single`, token by token. Zeros as a chunk's last tokens must
    leave the state unchanged.

    Args:
      tokens: a tuple of arrays [T, n, ...]; the rules get them as float32.
      shape: heads, and the output of each head.
      state: [R, ...].
      rows: row of `state` that each sequence reads, writes and saves to.
      single: tokens [S, n, ...] of S sequences and their states [S, ...] to f32 [S, *shape] and the states.
      chunk: tokens [n, CHUNK, ...] of one sequence and its state [...] to f32 [heads, CHUNK, ...] and the state.
    """
    num_tokens, num_seqs = tokens[0].shape[0], rows.reads.shape[0]
    o = zeros_in_layer(tokens[-1], (num_tokens + CHUNK, *shape))
    all_single = num_tokens == num_seqs or rows.width > 1
    # Accelerators would multiply float32 in fewer bits.
    with jax.default_matmul_precision("float32"):
        o, state = _single_tokens(tokens, o, state, rows, rows.num_seqs if all_single else rows.num_decode, single)
        if not all_single:
            o, state = _chunks(tokens, o, state, rows, chunk)
    return o[:num_tokens], state


def _single_tokens(
    tokens: Tokens, o: jax.Array, state: jax.Array, rows: StateRows, end: jax.Array, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Run `rule` over sequences [0, end), each of at most rows.width new tokens, token by token and a few sequences at
    a time, and return the updated (o, state). A state is read and written once. tokens, state, rows: see `recurrence`,
    whose `single` is the rule. o: f32 [T + CHUNK, *shape]. rows.saves is not used.
    """
    num_tokens, num_seqs = tokens[0].shape[0], rows.reads.shape[0]
    block = max(2, min(SEQS, num_seqs))  # see _chunks: never a single row

    def work(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        first, o, state = carry
        seq = first + jnp.arange(block, dtype=jnp.int32)
        live, seq = seq < end, jnp.minimum(seq, num_seqs - 1)
        begin, stop = rows.cu_q_lens[seq], rows.cu_q_lens[seq + 1]
        live = live & (stop > begin)

        def one(index: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            (o, m), token = carry, begin + index
            has_token = live & (stop > token)
            own = jax.tree.map(lambda part: part[jnp.minimum(token, num_tokens - 1)].astype(jnp.float32), tokens)
            out, after = rule(own, m)
            o = o.at[jnp.where(has_token, token, o.shape[0])].set(out, mode="drop")
            return o, jnp.where(has_token.reshape(-1, *(1,) * (m.ndim - 1)), after, m) if rows.width > 1 else after

        m = read_rows(state, jnp.where(live, rows.reads[seq], -1))
        o, m = one(0, (o, m)) if rows.width == 1 else lax.fori_loop(0, rows.width, one, (o, m))
        return first + block, o, write_rows(state, rows.writes[seq], m, live)

    _, o, state = lax.while_loop(lambda carry: carry[0] < end, work, (jnp.int32(0), o, state))
    return o, state


def _chunks(tokens: Tokens, o: jax.Array, state: jax.Array, rows: StateRows, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Run `rule` over the sequences from num_decode on, chunk by chunk in order, and return the updated (o, state). A
    sequence of several tokens writes its state to rows.saves, too. Arguments: see `recurrence`, whose `chunk` is the
    rule. o: f32 [T + CHUNK, *shape].
    """
    num_tokens = tokens[0].shape[0]
    seq = jnp.arange(rows.reads.shape[0], dtype=jnp.int32)
    mine = (seq >= rows.num_decode) & (seq < rows.num_seqs)
    counts = jnp.where(mine, jnp.diff(rows.cu_q_lens), 0)
    ends = jnp.cumsum(-(-counts // CHUNK))  # chunks of the sequences up to each

    def work(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        index, o, state = carry
        seq = jnp.sum(ends <= index, dtype=jnp.int32)
        offset = (index - jnp.where(seq > 0, ends[seq - 1], 0)) * CHUNK  # of the chunk in its sequence
        left = counts[seq] - offset
        first = rows.cu_q_lens[seq] + offset
        token = jnp.minimum(first + jnp.arange(CHUNK, dtype=jnp.int32), num_tokens - 1)
        valid = jnp.arange(CHUNK) < left

        def taken(part: jax.Array) -> jax.Array:
            """Return the chunk's tokens of `part` [T, n, ...] as f32 [n, CHUNK, ...], with zeros after the sequence's
            last token.
            """
            part = part[token].astype(jnp.float32)
            return jnp.moveaxis(jnp.where(valid.reshape(-1, *(1,) * (part.ndim - 1)), part, 0.0), 0, 1)

        source = jnp.where(offset == 0, rows.reads[seq], rows.writes[seq])[None]
        out, m = rule(jax.tree.map(taken, tokens), read_rows(state, source)[0])
        # The rows past the sequence's end get zeros, and the next sequence's chunks come later.
        o = lax.dynamic_update_slice_in_dim(o, jnp.moveaxis(out, 0, 1), first, axis=0)
        saves = jnp.where((left <= CHUNK) & (counts[seq] > 1), rows.saves[seq], state.shape[0])
        # Two rows at once: XLA fuses a write of one row with the reads of others, and copies all states for it.
        return index + 1, o, write_rows(state, jnp.stack([rows.writes[seq], saves]), jnp.stack([m, m]))

    _, o, state = lax.while_loop(lambda carry: carry[0] < ends[-1], work, (jnp.int32(0), o, state))
    return o, state

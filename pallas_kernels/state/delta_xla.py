"""gated_delta_rule as XLA does it: single tokens by the recurrence, several of a sequence in chunks.

Of single tokens a few sequences are worked on at a time, and of longer runs one chunk after the other, so that the cost
follows the real lengths and a step works on few states beside those that are kept. Within a chunk the rule is a
triangular system (section 3.2 of Yang et al. 2024, arXiv:2406.06484).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.state.rows import StateRows, read_rows, write_rows
from pallas_kernels.zeros import zeros_in_layer

SEQS = 16  # sequences of single tokens that are worked on together
CHUNK = 64  # tokens of one sequence that are worked on together
BLOCK = 16  # of them, those whose triangular system is solved token by token


class _Tokens(NamedTuple):
    """What the rule gets of tokens, each [n, N, ...] in float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """See pallas_kernels.state.delta."""
    num_tokens, num_seqs, tokens = v.shape[0], rows.reads.shape[0], _Tokens(q, k, v, decay, beta)
    o = zeros_in_layer(beta, (num_tokens + CHUNK, *v.shape[1:]))
    all_single = num_tokens == num_seqs
    # Accelerators would multiply float32 in fewer bits.
    with jax.default_matmul_precision("float32"):
        o, state = _single_tokens(tokens, o, state, rows, rows.num_seqs if all_single else rows.num_decode)
        if not all_single:
            o, state = _chunks(tokens, o, state, rows)
    return o[:num_tokens], state


def _heads(part: jax.Array, num_heads: int) -> jax.Array:
    """Of q and k for each head of v, in float32."""
    return jnp.repeat(part.astype(jnp.float32), num_heads // part.shape[1], axis=1)


def _single_tokens(
    tokens: _Tokens, o: jax.Array, state: jax.Array, rows: StateRows, end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sequences [0, end), each of at most one new token."""
    num_tokens, num_heads = tokens.beta.shape
    block = max(2, min(SEQS, rows.reads.shape[0]))  # see _chunks: never a single row

    def work(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        first, o, state = carry
        seq = first + jnp.arange(block, dtype=jnp.int32)
        live = seq < end
        seq = jnp.minimum(seq, rows.reads.shape[0] - 1)
        token = rows.cu_q_lens[seq]
        live = live & (rows.cu_q_lens[seq + 1] > token)
        q, k, v, decay, beta = (part[jnp.minimum(token, num_tokens - 1)] for part in tokens)
        q, k, v = _heads(q, num_heads), _heads(k, num_heads), v.astype(jnp.float32)
        m = read_rows(state, jnp.where(live, rows.reads[seq], -1)) * jnp.exp(decay)[:, :, None, None]
        change = beta[:, :, None] * (v - jnp.sum(m * k[:, :, :, None], axis=2))
        m = m + k[:, :, :, None] * change[:, :, None, :]
        o = o.at[jnp.where(live, token, o.shape[0])].set(jnp.sum(m * q[:, :, :, None], axis=2), mode="drop")
        return first + block, o, write_rows(state, rows.writes[seq], m, live)

    _, o, state = lax.while_loop(lambda carry: carry[0] < end, work, (jnp.int32(0), o, state))
    return o, state


def _chunks(tokens: _Tokens, o: jax.Array, state: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """The sequences from num_decode on, a chunk at a time: those of a sequence one after the other, from its first."""
    num_tokens, num_heads = tokens.beta.shape
    seq = jnp.arange(rows.reads.shape[0], dtype=jnp.int32)
    mine = (seq >= rows.num_decode) & (seq < rows.num_seqs)
    counts = jnp.where(mine, jnp.diff(rows.cu_q_lens), 0)
    ends = jnp.cumsum(-(-counts // CHUNK))  # chunks of the sequences up to each

    def work(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        index, o, state = carry
        seq = jnp.sum(ends <= index, dtype=jnp.int32)
        place = (index - jnp.where(seq > 0, ends[seq - 1], 0)) * CHUNK  # of its first token in the sequence
        left = counts[seq] - place
        first = rows.cu_q_lens[seq] + place
        token = jnp.minimum(first + jnp.arange(CHUNK, dtype=jnp.int32), num_tokens - 1)
        valid = jnp.arange(CHUNK) < left

        def taken(part: jax.Array) -> jax.Array:
            """[N, CHUNK, ...], zeros behind the sequence's last token: these change nothing."""
            part = part[token]
            part = _heads(part, num_heads) if part.ndim == 3 else part
            return jnp.moveaxis(jnp.where(valid.reshape(-1, *(1,) * (part.ndim - 1)), part, 0.0), 0, 1)

        source = jnp.where(place == 0, rows.reads[seq], rows.writes[seq])[None]
        out, m = _chunk(_Tokens(*map(taken, tokens)), read_rows(state, source)[0])
        # What this writes behind the sequence are zeros, and the next sequence's chunks come later.
        o = lax.dynamic_update_slice_in_dim(o, jnp.moveaxis(out, 0, 1), first, axis=0)
        saves = jnp.where((left <= CHUNK) & (counts[seq] > 1), rows.saves[seq], state.shape[0])
        # Two rows at once: XLA fuses a write of one row with what is read of others, and copies all states for it.
        return index + 1, o, write_rows(state, jnp.stack([rows.writes[seq], saves]), jnp.stack([m, m]))

    _, o, state = lax.while_loop(lambda carry: carry[0] < ends[-1], work, (jnp.int32(0), o, state))
    return o, state


def _chunk(tokens: _Tokens, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One chunk: what the rule gets [N, C, ...] and the state before, f32[N, H, Hv]; what comes out, f32[N, C, Hv], and
    the state behind."""
    q, k, v, decay, beta = tokens
    until = jnp.cumsum(decay, axis=1)  # [N, C]
    size = until.shape[1]
    causal = jnp.tril(jnp.ones((size, size), bool))
    # Of what token j left, the share that token i finds.
    share = jnp.exp(jnp.where(causal, until[:, :, None] - until[:, None, :], -jnp.inf))
    system = beta[:, :, None] * jnp.einsum("nik,njk->nij", k, k) * share * ~jnp.eye(size, dtype=bool)
    faded = jnp.exp(until)[:, :, None]
    wanted = beta[:, :, None] * (v - faded * jnp.einsum("nik,nkv->niv", k, m))
    change = solve_unit_lower(system, wanted)
    seen = jnp.einsum("nik,njk->nij", q, k) * share
    out = faded * jnp.einsum("nik,nkv->niv", q, m) + jnp.einsum("nij,njv->niv", seen, change)
    rest = jnp.exp(until[:, -1:] - until)[:, :, None]
    return out, m * faded[:, -1:] + jnp.einsum("nik,niv->nkv", k * rest, change)


def solve_unit_lower(a: jax.Array, b: jax.Array) -> jax.Array:
    """x of (I + a) x = b, for a f32[N, C, C] that is zero on and above its diagonal: f32[N, C, D].

    By substitution, which powers of `a` are no match for: of keys that are all alike these grow beyond float32. Tokens
    of the blocks on the diagonal are substituted one by one, of all blocks at once, then blocks.
    """
    size = a.shape[1]
    firsts = range(0, size, BLOCK)
    diagonal = jnp.stack([a[:, first : first + BLOCK, first : first + BLOCK] for first in firsts], axis=1)

    def substitute(row: jax.Array, inverse: jax.Array) -> jax.Array:
        factors = lax.dynamic_index_in_dim(diagonal, row, axis=2, keepdims=False)
        return inverse.at[:, :, row].add(-jnp.einsum("nbj,nbjk->nbk", factors, inverse))

    inverse = jnp.broadcast_to(jnp.eye(BLOCK, dtype=a.dtype), diagonal.shape)
    inverse = lax.fori_loop(1, BLOCK, substitute, inverse)
    found = b[:, :0]
    for block, first in enumerate(firsts):
        rest = b[:, first : first + BLOCK] - a[:, first : first + BLOCK, :first] @ found
        found = jnp.concatenate([found, inverse[:, block] @ rest], axis=1)
    return found

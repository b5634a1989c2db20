"""state_space as XLA does it: single tokens by the recurrence, several of a sequence in chunks.

Within a chunk every token reads those up to itself as linear attention does, and what was before the chunk from the
state (section 6 of Dao & Gu 2024, arXiv:2405.21060). What groups share is computed once for all heads of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.state.recurrence_xla import recurrence
from pallas_kernels.state.rows import StateRows


class _Tokens(NamedTuple):
    """What the recurrence gets of tokens, each [n, N, ...], or [n, G, ...] of b and c."""

    x: jax.Array
    b: jax.Array
    c: jax.Array
    decay: jax.Array
    dt: jax.Array


def state_space(
    x: jax.Array,
    b: jax.Array,
    c: jax.Array,
    decay: jax.Array,
    dt: jax.Array,
    state: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """See pallas_kernels.state.space."""
    return recurrence(_Tokens(x, b, c, decay, dt), x.shape[1:], state, rows, single=_single, chunk=_chunk)


def _single(tokens: _Tokens, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One token of each of some sequences."""
    x, b, c, decay, dt = tokens
    b, c = (jnp.repeat(part, x.shape[1] // part.shape[1], axis=1)[:, :, None, :] for part in (b, c))
    m = m * jnp.exp(decay)[:, :, None, None] + (x * dt[:, :, None])[..., None] * b
    return jnp.sum(m * c, axis=-1), m


def _chunk(tokens: _Tokens, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One chunk: what the recurrence gets [n, C, ...] and the state before, f32[N, P, H]; what comes out, f32[N, C, P],
    and the state behind."""
    x, b, c, decay, dt = tokens
    (num_heads, size, _), num_groups = x.shape, b.shape[0]
    causal = jnp.tril(jnp.ones((size, size), bool))
    # Decay between any two tokens, summed up by itself: a difference of sums from the first would lose digits.
    between = jnp.cumsum(jnp.where(jnp.tril(causal, -1), decay[:, :, None], 0.0), axis=1)
    # Of what token j left, the share that token i finds.
    share = jnp.exp(jnp.where(causal, between, -jnp.inf))
    until = jnp.exp(jnp.cumsum(decay, axis=1))

    def grouped(part: jax.Array) -> jax.Array:
        return part.reshape(num_groups, num_heads // num_groups, *part.shape[1:])

    written = grouped(x * dt[:, :, None])
    seen = jnp.einsum("gih,gjh->gij", c, b)[:, None] * grouped(share)
    before = grouped(until)[..., None] * jnp.einsum("gih,gnph->gnip", c, grouped(m))
    y = before + jnp.einsum("gnij,gnjp->gnip", seen, written)
    added = jnp.einsum("gnjp,gjh->gnph", written * grouped(share[:, -1])[..., None], b)
    # By itself, or it is made where it is written, from states that are being changed. XLA:CPU drops the barrier and
    # copies the layer's states once a chunk.
    return y.reshape(x.shape), lax.optimization_barrier(m * until[:, -1, None, None] + added.reshape(m.shape))

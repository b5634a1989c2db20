"""XLA implementation of state_space: single tokens by the recurrence, several tokens of a sequence in chunks.

Within a chunk every token attends linearly to those up to itself, and reads earlier tokens from the state (section 6 of
Dao & Gu 2024, arXiv:2405.21060). Products of b and c are computed once for all heads of a group.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.state.recurrence_xla import ChunkRuns, recurrence, sums_between
from jaxengine.pallas_kernels.state.rows import StateRows


class Tokens(NamedTuple):
    """Per-token inputs of the recurrence for n tokens; the fields are arguments of state.space.state_space.

    Attributes:
      x: [n, N, P].
      b, c: [n, G, H].
      decay, dt: [n, N].
    """

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
    """Apply Mamba-2's recurrence to a ragged batch: return y f32 [T, N, P] and the states f32 [R, N, P, H] after the
    step.

    Arguments are those of state.space.state_space, which has checked them: x [T, N, P], b, c [T, G, H], decay, dt [T,
    N], and the rows of the states.
    """
    return recurrence(Tokens(x, b, c, decay, dt), x.shape[1:], state, rows, single=single, chunk=chunk)


def single(tokens: Tokens, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to one token of each of n sequences with states m f32 [n, N, P, H]: return outputs f32 [n,
    N, P], and the new states.
    """
    x, b, c, decay, dt = tokens
    b, c = (jnp.repeat(part, x.shape[1] // part.shape[1], axis=1)[:, :, None, :] for part in (b, c))
    m = m * jnp.exp(decay)[:, :, None, None] + (x * dt[:, :, None])[..., None] * b
    return jnp.sum(m * c, axis=-1), m


def chunk(tokens: Tokens, m: jax.Array, runs: ChunkRuns | None = None) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to a chunk of C tokens of one sequence: return outputs f32 [N, C, P], and the state after
    it.

    tokens: fields [heads or groups, C, ...]; m: f32 [N, P, H], the state before the chunk. runs: runs of the tokens, if
    they are of several sequences; None if all tokens continue from that state.
    """
    x, b, c, decay, dt = tokens
    (num_heads, size, _), num_groups = x.shape, b.shape[0]
    causal = jnp.tril(jnp.ones((size, size), bool))
    between = sums_between(decay)
    causal = causal if runs is None else causal & runs.same
    # share[i, j]: the part of token j's contribution that has not decayed at token i.
    share = jnp.exp(jnp.where(causal, between, -jnp.inf))
    until = jnp.exp(jnp.cumsum(decay, axis=1))
    until = until if runs is None else until * runs.goes_on

    def grouped(part: jax.Array) -> jax.Array:
        return part.reshape(num_groups, num_heads // num_groups, *part.shape[1:])

    written = grouped(x * dt[:, :, None])
    seen = jnp.einsum("gih,gjh->gij", c, b)[:, None] * grouped(share)
    before = grouped(until)[..., None] * jnp.einsum("gih,gnph->gnip", c, grouped(m))
    y = before + jnp.einsum("gnij,gnjp->gnip", seen, written)
    added = jnp.einsum("gnjp,gjh->gnph", written * grouped(share[:, -1])[..., None], b)
    # The barrier keeps the new state out of the fusion that writes it, which reads states that are being changed.
    # XLA:CPU drops the barrier and copies the layer's states once a chunk.
    return y.reshape(x.shape), lax.optimization_barrier(m * until[:, -1, None, None] + added.reshape(m.shape))

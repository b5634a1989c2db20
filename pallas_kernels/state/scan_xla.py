"""XLA implementation of selective_scan: token by token, and for several sequences at once if each has one token.

Every channel decays differently, so a chunk cannot be computed as a product of matrices, as in space_xla.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.state.recurrence_xla import ChunkRuns, recurrence
from jaxengine.pallas_kernels.state.rows import StateRows


class Tokens(NamedTuple):
    """Per-token inputs of the recurrence for n tokens; the fields are arguments of state.scan.selective_scan.

    Attributes:
      x, dt: [n, C].
      b, c: [n, H].
    """

    x: jax.Array
    b: jax.Array
    c: jax.Array
    dt: jax.Array


def selective_scan(
    x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, a: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba's recurrence to a ragged batch: return y f32 [T, C] and the states f32 [R, C, H] after the step.

    Arguments are those of state.scan.selective_scan, which has checked them: x, dt [T, C], b, c [T, H], a [C, H], and
    the rows of the states.
    """
    rules = {"single": partial(single, a), "chunk": partial(chunk, a)}
    return recurrence(Tokens(x, b, c, dt), x.shape[1:], state, rows, **rules)


def single(a: jax.Array, tokens: Tokens, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to one token of each of n sequences with states m f32 [n, C, H]: return outputs f32 [n, C],
    and the new states. a: f32 [C, H].
    """
    x, b, c, dt = tokens
    m = m * jnp.exp(dt[..., None] * a) + (x * dt)[..., None] * b[:, None, :]
    return jnp.sum(m * c[:, None, :], axis=-1), m


def chunk(a: jax.Array, tokens: Tokens, m: jax.Array, runs: ChunkRuns | None = None) -> tuple[jax.Array, jax.Array]:
    """Apply the recurrence to a chunk of n tokens of one sequence, token by token: return outputs f32 [C, n], and the
    state after it.

    a: f32 [C, H]. tokens: fields [channels or H, n]; m: f32 [C, H], the state before the chunk. runs: runs of the
    tokens, if they are of several sequences; None if all tokens continue from that state.
    """
    size = tokens.x.shape[1]
    goes_on = jnp.ones((size,), bool)
    if runs is not None:
        goes_on = jnp.concatenate([runs.goes_on[:1], jnp.diagonal(runs.same, -1)])

    def take(m: jax.Array, own: tuple[Tokens, jax.Array]) -> tuple[jax.Array, jax.Array]:
        token, goes_on = own
        y, m = single(a, jax.tree.map(lambda part: part[None], token), jnp.where(goes_on, m, 0.0)[None])
        return m[0], y[0]

    m, y = lax.scan(take, m, (jax.tree.map(jnp.transpose, tokens), goes_on))
    return y.T, m

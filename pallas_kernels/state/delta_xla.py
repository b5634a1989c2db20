"""XLA implementation of gated_delta_rule: single tokens by the recurrence, several tokens of a sequence in chunks.

Within a chunk the rule is a triangular system (section 3.2 of Yang et al. 2024, arXiv:2406.06484).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.state.recurrence_xla import ChunkRuns, recurrence, sums_after, sums_between
from jaxengine.pallas_kernels.state.rows import StateRows

BLOCK = 16  # tokens of a chunk whose triangular system is solved token by token


class Tokens(NamedTuple):
    """Per-token inputs of the rule for n tokens; the fields are arguments of state.delta.gated_delta_rule.

    Attributes:
      q, k: [n, K, H].
      v: [n, N, Hv].
      decay: [n, N] or [n, N, H].
      beta: [n, N].
    """

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
    """Apply the gated delta rule to a ragged batch: return o f32 [T, N, Hv] and the states f32 [R, N, H, Hv] after the
    step.

    Arguments are those of state.delta.gated_delta_rule, which has checked them: q, k [T, K, H], v [T, N, Hv], decay [T,
    N] or [T, N, H], beta [T, N], and the rows of the states.
    """
    return recurrence(Tokens(q, k, v, decay, beta), v.shape[1:], state, rows, single=single, chunk=chunk)


def _heads(part: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    """Return q or k (`part`) with its heads, along `axis`, repeated to the number that `like` has along that axis."""
    return jnp.repeat(part, like.shape[axis] // part.shape[axis], axis=axis)


def single(tokens: Tokens, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to one token of each of n sequences with states m f32 [n, N, H, Hv]: return outputs f32 [n, N,
    Hv], and the new states.
    """
    q, k, v, decay, beta = tokens
    q, k = _heads(q, v, 1), _heads(k, v, 1)
    m = m * jnp.exp(decay).reshape(*m.shape[:2], -1, 1)
    change = beta[:, :, None] * (v - jnp.sum(m * k[:, :, :, None], axis=2))
    m = m + k[:, :, :, None] * change[:, :, None, :]
    return jnp.sum(m * q[:, :, :, None], axis=2), m


def chunk(tokens: Tokens, m: jax.Array, runs: ChunkRuns | None = None) -> tuple[jax.Array, jax.Array]:
    """Apply the rule to a chunk of C tokens of one sequence: return outputs f32 [N, C, Hv], and the state after it.

    tokens: fields [heads, C, ...]; m: f32 [N, H, Hv], the state before the chunk. runs: runs of the tokens, if they are
    of several sequences; None if all tokens continue from that state.
    """
    q, k, v, decay, beta = tokens
    q, k = _heads(q, v, 0), _heads(k, v, 0)
    decay = decay.reshape(*v.shape[:2], -1)  # [N, C, H], or [N, C, 1] for one decay of all H
    size = decay.shape[1]
    causal = jnp.tril(jnp.ones((size, size), bool))
    causal = causal if runs is None else causal & runs.same
    of_keys, of_queries = (_products(part, k, decay, causal) for part in (k, q))
    system = beta[:, :, None] * of_keys * ~jnp.eye(size, dtype=bool)
    faded = jnp.exp(jnp.cumsum(decay, axis=1))
    faded = faded if runs is None else faded * runs.goes_on[:, None]
    wanted = beta[:, :, None] * (v - jnp.einsum("nik,nkv->niv", k * faded, m))
    change = solve_unit_lower(system, wanted)
    out = jnp.einsum("nik,nkv->niv", q * faded, m) + jnp.einsum("nij,njv->niv", of_queries, change)
    rest = jnp.exp(sums_after(decay, axis=1))
    rest = rest if runs is None else rest * runs.same[-1, :, None]
    return out, m * faded[:, -1][:, :, None] + jnp.einsum("nik,niv->nkv", k * rest, change)


def _products(x: jax.Array, k: jax.Array, decay: jax.Array, causal: jax.Array) -> jax.Array:
    """Return f32 [N, C, C], the products of x [N, C, H] and earlier tokens' k [N, C, H], in which each element is
    multiplied by its decay between the two tokens; 0 where `causal` bool [C, C] is False, as it is for all later
    tokens.

    decay: f32 [N, C, 1 or H], logarithm of each token's decay. With H decays, C is a multiple of BLOCK.
    """
    if decay.shape[2] == 1:
        between = sums_between(decay[..., 0])
        return jnp.einsum("nik,njk->nij", x, k) * jnp.exp(jnp.where(causal, between, -jnp.inf))
    # Each element has its own decay. Written as a product of one factor per token, the factors would overflow. So pairs
    # within BLOCK tokens are computed one by one; for earlier tokens the factors are relative to the block's start.
    num_heads, size = x.shape[:2]
    blocks = (num_heads, size // BLOCK, BLOCK, -1)
    own_x, own_k, own = (part.reshape(blocks) for part in (x, k, decay))
    within = causal.reshape(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
    within = jnp.moveaxis(jnp.diagonal(within, axis1=0, axis2=2), 2, 0)[:, :, :, None]  # [blocks, BLOCK, BLOCK, 1]
    between = jnp.exp(jnp.where(within, jax.vmap(sums_between)(own), -jnp.inf))
    near = jnp.einsum("nbih,nbjh,nbijh->nbij", own_x, own_k, between)
    since, rest = jnp.exp(jnp.cumsum(own, axis=2)), sums_after(own, axis=2)
    skipped = sums_between(jnp.sum(own, axis=2))  # [N, blocks, blocks, H]: of the blocks after j, up to i
    rows = []
    for block in range(size // BLOCK):
        first = block * BLOCK
        faded = jnp.exp(rest[:, :block] + skipped[:, block - 1, :block, None]).reshape(k[:, :first].shape)
        before = jnp.einsum("nih,njh->nij", own_x[:, block] * since[:, block], k[:, :first] * faded)
        after = jnp.zeros((num_heads, BLOCK, size - first - BLOCK), x.dtype)
        rows.append(jnp.concatenate([before, near[:, block], after], axis=2))
    return jnp.concatenate(rows, axis=1) * causal


def solve_unit_lower(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the solution x f32 [N, C, D] of (I + a) x = b, with a f32 [N, C, C] zero on and above its diagonal; BLOCK
    must divide C.

    Uses substitution, because powers of `a` overflow float32 if keys are all alike. The blocks on the diagonal are
    inverted token by token, all blocks at once; then blocks are substituted in order.
    """
    size = a.shape[1]
    firsts = range(0, size, BLOCK)
    diagonal = jnp.stack([a[:, first : first + BLOCK, first : first + BLOCK] for first in firsts], axis=1)

    def substitute(row: jax.Array, inverse: jax.Array) -> jax.Array:
        factors = lax.dynamic_index_in_dim(diagonal, row, axis=2, keepdims=False)
        return inverse.at[:, :, row].add(-jnp.einsum("nbj,nbjk->nbk", factors, inverse))

    inverse = jnp.broadcast_to(jnp.eye(BLOCK, dtype=a.dtype), diagonal.shape)
    inverse = lax.fori_loop(1, BLOCK, substitute, inverse)
    solved = b[:, :0]
    for block, first in enumerate(firsts):
        rest = b[:, first : first + BLOCK] - a[:, first : first + BLOCK, :first] @ solved
        solved = jnp.concatenate([solved, inverse[:, block] @ rest], axis=1)
    return solved

"""Operations on states over whole sequences: plain XLA that has a gradient (see jaxengine.pallas_kernels.runs).

Every run starts from zeros, and no state is kept: rows are read as -1 and written nowhere. `state` has a row for each
of the B rows of tokens. A recurrence scans a row in chunks, which may hold tokens of several runs, and computes each
again for its gradient: so one state for each chunk is kept, and not one for each token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.runs import run_indexes, run_numbers
from jaxengine.pallas_kernels.state import delta_xla, scan_xla, space_xla
from jaxengine.pallas_kernels.state.recurrence_xla import CHUNK, ChunkRuns
from jaxengine.pallas_kernels.state.rows import StateRows


def causal_conv(x: jax.Array, weight: jax.Array, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Convolve x [B * T, C] causally with weight [C, k] along runs (rows.cu_q_lens) that start from zeros: return y f32
    [B * T, C], and `windows` itself. Arguments are those of state.conv.causal_conv.
    """
    num_tokens, before = x.shape[0], weight.shape[1] - 1
    index = run_indexes(rows.cu_q_lens, num_tokens)[:, None]
    x, y = x.astype(jnp.float32), jnp.zeros(x.shape, jnp.float32)
    for i, tap in enumerate(weight.astype(jnp.float32).T):
        lag = before - i
        shifted = jnp.pad(x, ((lag, 0), (0, 0)))[:num_tokens]
        y = y + jnp.where(index >= lag, tap * shifted, 0.0)
    return y, windows


def gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule to runs (rows.cu_q_lens) that start from zeros: return o f32 [B * T, N, Hv], and
    `state` [B, N, H, Hv] itself, of which only the shape is used.

    Arguments are those of state.delta.gated_delta_rule: q, k [B * T, K, H], v [B * T, N, Hv], decay [B * T, N] or [B *
    T, N, H], beta [B * T, N].
    """
    return _recurrence(delta_xla.Tokens(q, k, v, decay, beta), state, rows, delta_xla.chunk), state


def state_space(
    x: jax.Array, b: jax.Array, c: jax.Array, decay: jax.Array, dt: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba-2's recurrence to runs (rows.cu_q_lens) that start from zeros: return y f32 [B * T, N, P], and
    `state` [B, N, P, H] itself, of which only the shape is used.

    Arguments are those of state.space.state_space: x [B * T, N, P], b, c [B * T, G, H], decay, dt [B * T, N].
    """
    return _recurrence(space_xla.Tokens(x, b, c, decay, dt), state, rows, space_xla.chunk), state


def selective_scan(
    x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, a: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba's recurrence to runs (rows.cu_q_lens) that start from zeros: return y f32 [B * T, C], and `state` [B,
    C, H] itself, of which only the shape is used.

    Arguments are those of state.scan.selective_scan: x, dt [B * T, C], b, c [B * T, H], a [C, H].
    """
    return _recurrence(scan_xla.Tokens(x, b, c, dt), state, rows, partial(scan_xla.chunk, a)), state


def _recurrence(tokens: Any, state: jax.Array, rows: StateRows, rule: Any) -> jax.Array:
    """Apply a chunk rule of recurrence_xla to B rows of tokens, from states of zeros: return outputs f32 [B * T, heads,
    ...].

    state: [B, ...], of which only the shape is used. rule: function of (tokens of a chunk, state, ChunkRuns) that
    returns outputs and the state.
    """
    num_tokens, num_rows = tokens[0].shape[0], state.shape[0]
    length = num_tokens // num_rows

    def cut(part: jax.Array, mode: Any) -> jax.Array:
        """Return `part` [B * T, ...] as [chunks, B, CHUNK, ...], with T padded to whole chunks. mode: padding mode of
        jnp.pad.
        """
        part = part.reshape(num_rows, length, *part.shape[1:])
        part = jnp.pad(part, ((0, 0), (0, -length % CHUNK), *((0, 0),) * (part.ndim - 2)), mode=mode)
        return jnp.moveaxis(part.reshape(num_rows, -1, CHUNK, *part.shape[2:]), 1, 0)

    chunks = jax.tree.map(lambda part: jnp.moveaxis(cut(part.astype(jnp.float32), "constant"), 3, 2), tokens)
    runs = cut(run_numbers(rows.cu_q_lens, num_tokens), "edge")

    @jax.checkpoint
    def step(carry: tuple[jax.Array, jax.Array], given: tuple[Any, jax.Array]):
        (m, last), (own, run) = carry, given
        same = run[:, :, None] == run[:, None, :]
        out, m = jax.vmap(rule)(own, m, ChunkRuns(same, run == last[:, None]))
        return (m, run[:, -1]), out

    # Accelerators would multiply float32 in fewer bits.
    with jax.default_matmul_precision("float32"):
        start = jnp.zeros(state.shape, jnp.float32), jnp.full((num_rows,), -1, jnp.int32)
        _, out = lax.scan(step, start, (chunks, runs))
    out = jnp.moveaxis(out, (0, 3), (1, 2))  # [B, chunks, CHUNK, heads, ...]
    return out.reshape(num_rows, -1, *out.shape[3:])[:, :length].reshape(num_tokens, *out.shape[3:])

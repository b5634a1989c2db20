"""Operations on states, one token after the other: a sequence's results have the same bits however its tokens come.

For steps in which every token has a row of `StateRows` of its own; otherwise they raise ValueError. A token may read
what an earlier one of the same step has written, so the rows of several tokens may be consecutive tokens of one
sequence. `saves` of every token are written, and cu_q_lens is not read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.state import delta_xla, scan_xla, space_xla
from jaxengine.pallas_kernels.state.recurrence_xla import Rule
from jaxengine.pallas_kernels.state.rows import StateRows, read_rows, write_rows
from jaxengine.pallas_kernels.zeros import zeros_in_layer


def causal_conv(x: jax.Array, weight: jax.Array, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Convolve x [T, C] causally with weight [C, k], one token after the other: return y f32 [T, C] and the windows [R,
    k - 1, C] after them. Arguments are those of state.conv.causal_conv, for rows of one token each. Raises ValueError
    unless `rows` has T rows.
    """
    taps = weight.astype(jnp.float32).T  # [k, C]

    def rule(own: jax.Array, window: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = jnp.concatenate([window, own[:, None]], axis=1)  # [1, k, C]
        y = taps[0] * seen[:, 0]
        for i in range(1, len(taps)):
            y = y + taps[i] * seen[:, i]
        return y, seen[:, 1:]

    return _one_by_one(x, x.shape[1:], windows, rows, rule)


def gated_delta_rule(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule to one token after the other: return o f32 [T, N, Hv] and the states [R, N, H, Hv]
    after them.

    Arguments are those of state.delta.gated_delta_rule: q, k [T, K, H], v [T, N, Hv], decay [T, N] or [T, N, H], beta
    [T, N]. Raises ValueError unless `rows` has T rows.
    """
    return _one_by_one(delta_xla.Tokens(q, k, v, decay, beta), v.shape[1:], state, rows, delta_xla.single)


def state_space(
    x: jax.Array, b: jax.Array, c: jax.Array, decay: jax.Array, dt: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba-2's recurrence to one token after the other: return y f32 [T, N, P] and the states [R, N, P, H] after
    them.

    Arguments are those of state.space.state_space: x [T, N, P], b, c [T, G, H], decay, dt [T, N]. Raises ValueError
    unless `rows` has T rows.
    """
    return _one_by_one(space_xla.Tokens(x, b, c, decay, dt), x.shape[1:], state, rows, space_xla.single)


def selective_scan(
    x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, a: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply Mamba's recurrence to one token after the other: return y f32 [T, C] and the states [R, C, H] after them.

    Arguments are those of state.scan.selective_scan: x, dt [T, C], b, c [T, H], a [C, H]. Raises ValueError unless
    `rows` has T rows.
    """
    return _one_by_one(scan_xla.Tokens(x, b, c, dt), x.shape[1:], state, rows, partial(scan_xla.single, a))


def _one_by_one(
    tokens: Any, shape: tuple[int, ...], state: jax.Array, rows: StateRows, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """Apply a rule of recurrence_xla to one token after the other: return outputs f32 [T, *shape], zeros from
    rows.num_seqs on, and the states after the step, written to both rows.writes and rows.saves.

    tokens: an array [T, ...] or a tuple of them. state: [R, ...]. rule: function of tokens [1, ...] and states [1,
    ...], in float32, that returns outputs and new states. Raises ValueError unless `rows` has T rows.
    """
    like = jax.tree.leaves(tokens)[-1]
    num_tokens = like.shape[0]
    if rows.reads.shape[0] != num_tokens:
        raise ValueError(f"every token must have a row of its own, got {rows.reads.shape[0]} for {num_tokens} tokens")

    def work(token: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o, state = carry
        own = jax.tree.map(lambda part: lax.dynamic_slice_in_dim(part, token, 1).astype(jnp.float32), tokens)
        out, m = rule(own, read_rows(state, rows.reads[token][None]))
        o = lax.dynamic_update_slice_in_dim(o, out, token, axis=0)
        targets = jnp.stack([rows.writes[token], rows.saves[token]])
        return o, write_rows(state, targets, jnp.concatenate([m, m]))

    o = zeros_in_layer(like, (num_tokens, *shape))
    return lax.fori_loop(0, jnp.minimum(rows.num_seqs, num_tokens), work, (o, state))

"""XLA implementation of causal_conv: shifted copies of the tokens, plus the windows' share of the first tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.state.rows import StateRows, read_rows, write_rows


def causal_conv(x: jax.Array, weight: jax.Array, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Convolve x [T, C] causally along each sequence with weight [C, k]: return y f32 [T, C], 0 for tokens of no
    sequence, and the windows [R, k - 1, C] after the step. The window of a sequence of several new tokens is also
    written to its row in rows.saves. Arguments are those of state.conv.causal_conv, which has checked them.
    """
    (num_tokens, _), num_seqs, before = x.shape, rows.reads.shape[0], weight.shape[1] - 1
    taps = weight.astype(jnp.float32).T  # [k, C]
    counts = jnp.diff(rows.cu_q_lens)
    counts = jnp.where(jnp.arange(num_seqs) < rows.num_seqs, counts, 0)
    window = read_rows(windows, rows.reads)  # [S, k - 1, C]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(rows.cu_q_lens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    live = row < rows.num_seqs
    row = jnp.minimum(row, num_seqs - 1)
    index = token - rows.cu_q_lens[row]  # of the token in its sequence
    # The window's share of a sequence's token number 0, 1, ...: [S, k - 1, C].
    added = [sum(taps[i] * window[:, first + i] for i in range(before - first)) for first in range(before)]
    added = jnp.stack(added, axis=1)[row, jnp.minimum(index, before - 1)]
    y = jnp.where((index < before)[:, None], added, 0.0)
    for i, tap in enumerate(taps):
        lag = before - i
        shifted = x.astype(jnp.float32) if lag == 0 else jnp.pad(x, ((lag, 0), (0, 0)))[:num_tokens].astype(jnp.float32)
        y = y + jnp.where((index >= lag)[:, None], tap * shifted, 0.0)
    # The last k - 1 of the window followed by the new tokens.
    last = counts[:, None] + jnp.arange(before, dtype=jnp.int32)
    kept = jnp.take_along_axis(window, jnp.minimum(last, before - 1)[:, :, None], axis=1)
    new = x[jnp.clip(rows.cu_q_lens[:-1, None] + last - before, 0, num_tokens - 1)].astype(jnp.float32)
    kept = jnp.where((last < before)[:, :, None], kept, new)
    windows = write_rows(windows, rows.writes, kept, counts > 0)
    windows = write_rows(windows, rows.saves, kept, counts > 1)
    return jnp.where(live[:, None], y, 0.0), windows

"""The gated delta rule over ragged batches (Yang et al. 2024, arXiv:2412.06464): the public operation.

Checks the arguments and chooses the implementation. Shape letters besides those of rows.py: K heads of queries and
keys, N heads of values, a multiple of K, with keys of H elements and values of Hv.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.registry import kernel, platform_rows
from jaxengine.pallas_kernels.state.rows import StateRows, check_rows


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """Apply o[t] = q[t] M[t], where M[t] = e^decay[t] M[t - 1] + k[t] (x) beta[t] (v[t] - k[t] e^decay[t] M[t - 1]).

    A decay is that of a head's whole matrix, or one of each of its H rows (Kimi Team 2025, arXiv:2510.26692).

    All in float32, in an order that depends on a sequence's own tokens only. Tokens of no sequence give 0; rows that no
    sequence reads may hold NaN.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      q, k: [T, K, H], already normalised and scaled; head h serves the N / K heads from h * N / K on of v.
      v: [T, N, Hv].
      decay: f32 [T, N] or f32 [T, N, H], at most 0; beta: f32 [T, N].
      state: f32 [R, N, H, Hv], M of each row.
      rows: tokens of each sequence, and rows of their states.

    Returns o f32 [T, N, Hv], and the states after the step. Raises ValueError if shapes or dtypes do not fit together.
    """
    check_rows(rows)
    num_tokens, num_heads = v.shape[:2]
    of_decay = num_tokens, num_heads, *q.shape[2:][: decay.ndim - 2]
    wanted = q.shape, of_decay, (num_tokens, num_heads), (num_heads, q.shape[-1], v.shape[-1])
    got = k.shape, decay.shape, beta.shape, state.shape[1:]
    if q.ndim != 3 or v.ndim != 3 or q.shape[0] != num_tokens or num_heads % q.shape[1] or wanted != got:
        shapes = [list(array.shape) for array in (q, k, v, decay, beta, state)]
        text = "q and k [T, K, H], v [T, N, Hv], decay [T, N] or [T, N, H], beta [T, N] and state [R, N, H, Hv]"
        raise ValueError(f"gated_delta_rule: {text} must agree, N a multiple of K, got {shapes}")
    if {decay.dtype, beta.dtype, state.dtype} != {jnp.dtype("float32")}:
        text = f"{decay.dtype}, {beta.dtype} and {state.dtype}"
        raise ValueError(f"gated_delta_rule: decay, beta and state must be float32, got {text}")
    by_platform = {platform: kernel("gated_delta_rule", row) for platform, row in platform_rows().items()}
    return lax.platform_dependent(q, k, v, decay, beta, state, rows, **by_platform)

"""Mamba-2's state space over ragged batches (Dao & Gu 2024, arXiv:2405.21060): the public operation.

Checks the arguments and chooses the implementation. Shape letters besides those of rows.py: N heads with inputs of P
elements, G groups of heads that share b (writes to states) and c (reads from them), N a multiple of G, and H elements
of a state for each of those P.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.registry import kernel, platform_rows
from jaxengine.pallas_kernels.state.rows import StateRows, check_rows


def state_space(
    x: jax.Array,
    b: jax.Array,
    c: jax.Array,
    decay: jax.Array,
    dt: jax.Array,
    state: jax.Array,
    rows: StateRows,
) -> tuple[jax.Array, jax.Array]:
    """Apply y[t] = M[t] c[t], where M[t] = e^decay[t] M[t - 1] + dt[t] x[t] (x) b[t].

    All in float32, in an order that depends on a sequence's own tokens only. Tokens of no sequence give 0; rows that no
    sequence reads may hold NaN.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: [T, N, P].
      b, c: [T, G, H]; group g serves the N / G heads from g * N / G on of x.
      decay: f32 [T, N], at most 0; dt: f32 [T, N].
      state: f32 [R, N, P, H], M of each row.
      rows: tokens of each sequence, and rows of their states.

    Returns y f32 [T, N, P], and the states after the step. Raises ValueError if shapes or dtypes do not fit together.
    """
    check_rows(rows)
    num_tokens, num_heads = x.shape[:2]
    wanted = b.shape, (num_tokens, num_heads), (num_tokens, num_heads), (num_heads, x.shape[-1], b.shape[-1])
    got = c.shape, decay.shape, dt.shape, state.shape[1:]
    if x.ndim != 3 or b.ndim != 3 or b.shape[0] != num_tokens or num_heads % b.shape[1] or wanted != got:
        shapes = [list(array.shape) for array in (x, b, c, decay, dt, state)]
        text = "x [T, N, P], b and c [T, G, H], decay and dt [T, N] and state [R, N, P, H]"
        raise ValueError(f"state_space: {text} must agree, N a multiple of G, got {shapes}")
    if {decay.dtype, dt.dtype, state.dtype} != {jnp.dtype("float32")}:
        text = f"{decay.dtype}, {dt.dtype} and {state.dtype}"
        raise ValueError(f"state_space: decay, dt and state must be float32, got {text}")
    by_platform = {platform: kernel("state_space", row) for platform, row in platform_rows().items()}
    return lax.platform_dependent(x, b, c, decay, dt, state, rows, **by_platform)

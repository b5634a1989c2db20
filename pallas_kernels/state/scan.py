"""Mamba's selective scan over ragged batches (Gu & Dao 2023, arXiv:2312.00752): the public operation.

Checks the arguments and chooses the implementation. Shape letters besides those of rows.py: C channels, each with a
state of H elements.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.registry import kernel, platform_rows
from jaxengine.pallas_kernels.state.rows import StateRows, check_rows


def selective_scan(
    x: jax.Array, b: jax.Array, c: jax.Array, dt: jax.Array, a: jax.Array, state: jax.Array, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """Apply y[t] = M[t] c[t], where M[t] = e^(dt[t] a) * M[t - 1] + (dt[t] * x[t]) (x) b[t]; e^ and * are elementwise.

    All in float32, token by token. Tokens of no sequence give 0; rows that no sequence reads may hold NaN.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: [T, C].
      b, c: [T, H].
      dt: f32 [T, C], at least 0.
      a: f32 [C, H], at most 0.
      state: f32 [R, C, H], M of each row.
      rows: tokens of each sequence, and rows of their states.

    Returns y f32 [T, C], and the states after the step. Raises ValueError if shapes or dtypes do not fit together.
    """
    check_rows(rows)
    fits = x.ndim == 2 and b.ndim == 2 and b.shape[0] == x.shape[0]
    if (
        not fits
        or (c.shape, dt.shape) != (b.shape, x.shape)
        or {a.shape, state.shape[1:]} != {(x.shape[1], b.shape[1])}
    ):
        shapes = [list(array.shape) for array in (x, b, c, dt, a, state)]
        text = "x and dt [T, C], b and c [T, H], a [C, H] and state [R, C, H]"
        raise ValueError(f"selective_scan: {text} must agree, got {shapes}")
    if {dt.dtype, a.dtype, state.dtype} != {jnp.dtype("float32")}:
        text = f"{dt.dtype}, {a.dtype} and {state.dtype}"
        raise ValueError(f"selective_scan: dt, a and state must be float32, got {text}")
    by_platform = {platform: kernel("selective_scan", row) for platform, row in platform_rows().items()}
    return lax.platform_dependent(x, b, c, dt, a, state, rows, **by_platform)

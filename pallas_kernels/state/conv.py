"""Depthwise causal convolution along sequences: the public operation.

Checks the arguments and chooses the implementation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.registry import kernel, platform_rows
from jaxengine.pallas_kernels.state.rows import StateRows, check_rows


def causal_conv(x: jax.Array, weight: jax.Array, windows: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Convolve each channel causally: y[t] = sum over i < k of weight[:, i] * x[t - (k - 1) + i], within each sequence.

    The k - 1 tokens before a sequence's first new token come from its window, or are zeros if it reads none. Tokens of
    no sequence give 0. The sum is taken from i = 0 on, in float32.

    A convolution of one token, k = 1, multiplies; its windows are empty and returned as they are.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: [T, C].
      weight: [C, k].
      windows: [R, k - 1, C], the previous tokens of sequences, the latest last.
      rows: tokens of each sequence, and rows of their windows.

    Returns y f32 [T, C] and the windows after the step. Raises ValueError if shapes or dtypes do not fit together.
    """
    check_rows(rows)
    fits = x.ndim == weight.ndim == 2 and weight.shape[0] == x.shape[1] and weight.shape[1] > 0
    if not fits or windows.shape[1:] != (weight.shape[1] - 1, x.shape[1]):
        text = f"got {list(x.shape)}, {list(weight.shape)} and {list(windows.shape)}"
        raise ValueError(f"causal_conv: x [T, C], weight [C, k >= 1] and windows [R, k - 1, C] must agree, {text}")
    if any(not jnp.issubdtype(array.dtype, jnp.floating) for array in (x, weight, windows)):
        raise ValueError(f"causal_conv: numbers must be floating, got {x.dtype}, {weight.dtype} and {windows.dtype}")
    if weight.shape[1] == 1:
        token = jnp.arange(x.shape[0], dtype=jnp.int32)
        end = rows.cu_q_lens[jnp.minimum(rows.num_seqs, rows.reads.shape[0])]
        mixed = x.astype(jnp.float32) * weight[:, 0].astype(jnp.float32)
        return jnp.where((token < end)[:, None], mixed, 0.0), windows
    by_platform = {platform: kernel("causal_conv", row) for platform, row in platform_rows().items()}
    return lax.platform_dependent(x, weight, windows, rows, **by_platform)

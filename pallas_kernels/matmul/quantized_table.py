"""Product of rows with the transpose of a quantised token table, which has a row per token: the public operation.

Chooses the implementation.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.registry import kernel, platform_rows


def quantized_table_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    dtype: Any = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """Multiply x [M, in] by the transpose of a table [V, in], codes * scales - zeros: return [M, V] in `out_dtype`.

    x: bfloat16 or float32. codes: [V, in] int8, or [V, in / 2] uint8 in pairs. scales, zeros: [n, V], each for in / n
    neighbouring numbers of a token; zeros may be None. dtype: dtype that codes are widened to, default x's. Sums are
    float32, rounded to `out_dtype` once. The implementation is chosen when the program is compiled.

    Raises ValueError if the shapes do not fit together, and for codes of another dtype.
    """
    inputs = codes.shape[1] * per_byte(codes.dtype) if codes.ndim == 2 else 0
    if x.ndim != 2 or inputs != x.shape[1] or codes.dtype not in (jnp.int8, jnp.uint8):
        text = "x [M, in] and codes [V, in], int8 or uint8 of pairs, must agree"
        raise ValueError(f"quantized_table_matmul: {text}, got {x.shape} and {codes.dtype} {codes.shape}")
    if scales.ndim != 2 or scales.shape[1] != len(codes) or not len(scales) or codes.shape[1] % len(scales):
        text = f"scales must be (n, {len(codes)}) where n divides {codes.shape[1]}"
        raise ValueError(f"quantized_table_matmul: {text}, got {scales.shape}")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"quantized_table_matmul: zeros must be {scales.shape} as scales, got {zeros.shape}")
    options = {"dtype": jnp.dtype(x.dtype if dtype is None else dtype), "out_dtype": jnp.dtype(out_dtype)}
    by_platform = {
        platform: partial(kernel("quantized_table_matmul", row), **options) for platform, row in platform_rows().items()
    }
    return lax.platform_dependent(x, codes, scales, zeros, **by_platform)

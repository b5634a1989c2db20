"""Rounding of rows to microscaled formats, four or eight bits with a scale per few inputs: the public operation.

Checks the arguments and chooses the implementation; the arithmetic is in jaxengine.pallas_kernels.matmul.rounding.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.rounding import E4M3, E8M0, UE8M0
from jaxengine.pallas_kernels.registry import kernel, platform_rows

OP = "microscaled_rows"
DTYPES = "float8_e4m3fn", "float4_e2m1fn"
_KINDS = UE8M0, E8M0, E4M3
_GROUPS = 16, 32


def microscaled_rows(
    x: jax.Array, group: int, dtype: str, *, kind: str, global_scale: jax.Array | None = None
) -> jax.Array:
    """Round rows [M, in] to codes of `dtype` with a scale per `group` inputs, and return their values in x's dtype.

    Scales are powers of two; with E4M3 they are e4m3 numbers, and the values are `global_scale` times too large. Either
    way the values are exact in bfloat16, so that a product needs no scales. Results of a group that holds a number that
    is not finite are undefined; other groups are not affected.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: bfloat16 or float32.
      group: 16 or 32; must divide `in`.
      dtype: one of DTYPES.
      kind: UE8M0, E8M0 or E4M3 (jaxengine.pallas_kernels.matmul.rounding).
      global_scale: with E4M3 the divisor of all scales, f32 [M, 1] or [1, 1]; else not used.

    Raises ValueError for other values.
    """
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{OP}: x must be bfloat16 or float32 [M, in], got {x.dtype} {x.shape}")
    if group not in _GROUPS or x.shape[1] % group:
        raise ValueError(f"{OP}: group must be one of {_GROUPS} and divide {x.shape[1]} inputs, got {group}")
    if dtype not in DTYPES or kind not in _KINDS:
        raise ValueError(f"{OP}: dtype must be of {DTYPES} and kind of {_KINDS}, got {dtype} and {kind}")
    global_scale = global_scale if kind == E4M3 else None
    if kind == E4M3 and (
        global_scale is None or global_scale.dtype != jnp.float32 or global_scale.shape not in ((1, 1), (len(x), 1))
    ):
        got = None if global_scale is None else f"{global_scale.dtype} {global_scale.shape}"
        raise ValueError(f"{OP}: global_scale must be float32 [1, 1] or {(len(x), 1)}, got {got}")
    by_platform = {
        platform: partial(kernel(OP, row), group=group, dtype=dtype, kind=kind)
        for platform, row in platform_rows().items()
    }
    return lax.platform_dependent(x, global_scale, **by_platform)

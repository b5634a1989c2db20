"""Plain XLA implementation of microscaled_rows, for CPUs and CUDA cards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.rounding import as_rows, by_group, held_scales, largest_of, microscaled, of_groups


def microscaled_rows(x: jax.Array, global_scale: jax.Array | None, *, group: int, dtype: str, kind: str) -> jax.Array:
    """Round rows x [M, in] to codes of `dtype` with a scale of `kind` per `group` inputs in plain XLA, and return their
    values in x's dtype. matmul.microscaled.microscaled_rows has checked the arguments. global_scale: f32 [M, 1] or [1,
    1] for kind E4M3, else None.
    """
    values = by_group(x.astype(jnp.float32), x.shape[1] // group)
    if global_scale is not None:
        global_scale = of_groups(jnp.broadcast_to(global_scale, (len(x), values.shape[1])), values)
    held = held_scales(largest_of(values), dtype, kind=kind, global_scale=global_scale)
    return as_rows(microscaled(values, held, dtype, global_scale=global_scale)).astype(x.dtype)

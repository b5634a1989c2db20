"""Rows with scales of a few inputs each in plain XLA, for CPUs and CUDA cards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.rounding import as_rows, by_group, held_scales, largest_of, microscaled, of_groups


def microscaled_rows(x: jax.Array, whole: jax.Array | None, *, group: int, dtype: str, kind: str) -> jax.Array:
    """[M, in] in x's dtype; arguments as the public operation has checked them."""
    values = by_group(x.astype(jnp.float32), x.shape[1] // group)
    if whole is not None:
        whole = of_groups(jnp.broadcast_to(whole, (len(x), values.shape[1])), values)
    held = held_scales(largest_of(values), dtype, kind=kind, whole=whole)
    return as_rows(microscaled(values, held, dtype, whole=whole)).astype(x.dtype)

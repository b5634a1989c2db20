"""Products of groups of rows with quantised matrices as plain XLA, for TPUs and CUDA cards: tiles of rows.

As grouped_tiles: a trip gathers the codes of a few matrices. With a scale a channel they are multiplied as they are,
otherwise those of the trip are widened. jax.lax.ragged_dot would widen all matrices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.grouped_tiles import over_tiles
from pallas_kernels.matmul.nibbles import code_parts, per_byte, row_parts
from pallas_kernels.matmul.quantized_xla import multiplied, widened_parts
from pallas_kernels.matmul.rounding import RoundedRows


def quantized_grouped_matmul(
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    out_dtype: Any,
    turned: bool = False,
) -> jax.Array:
    """[M, out] in out_dtype; arguments as the public operation has checked them. turned: see grouped_tiles."""
    out_size = codes.shape[2]
    by_channel = scales.shape[1] == 1 and zeros is None and (x_scales is None or x_scales.shape[1] == 1)
    if not by_channel and x_scales is not None:
        x, x_scales = RoundedRows(x, x_scales).widened(dtype), None
    batched = (((2,), (1,)), ((0,), (0,)))

    def multiply(row: jax.Array, group: jax.Array) -> jax.Array:
        rows = row_parts(x.at[row].get(mode="clip"), codes.dtype)
        picked = jnp.swapaxes(jnp.swapaxes(codes, 1, 2)[group], 1, 2) if turned else codes[group]
        if by_channel:
            matrices = code_parts(picked)
        else:
            matrices = widened_parts(picked, scales[group], None if zeros is None else zeros[group], dtype)
        parts = zip(rows, matrices, strict=True)
        y = sum((multiplied(own, part, batched, dtype) for own, part in parts), jnp.zeros(()))
        if not by_channel:
            return y
        y = y * scales[group].astype(jnp.float32)
        return y if x_scales is None else y * x_scales.at[row].get(mode="clip")

    shape = x.shape[0], out_size
    matrix_bytes = codes[0].size * per_byte(codes.dtype) * jnp.dtype(dtype).itemsize
    return over_tiles(shape, matrix_bytes, group_sizes, multiply, out_dtype)

"""Products with quantised matrices for the CPU: some columns at a time are widened, and multiplied while in cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.nibbles import code_parts, row_parts
from pallas_kernels.matmul.rounding import RoundedRows
from pallas_kernels.zeros import zeros_in_layer

BLOCK_COLUMNS = 128


def quantized_matmul(
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    *,
    dtype: Any,
    out_dtype: Any,
) -> jax.Array:
    """[M, out] in out_dtype; arguments as the public operation has checked them. All in float32, whatever `dtype`."""
    del dtype
    matrix = codes[None], scales[None], None if zeros is None else zeros[None]
    return columns_product(widened_rows(x, x_scales), *matrix, jnp.int32(0)).astype(out_dtype)


def widened_rows(x: jax.Array, x_scales: jax.Array | None) -> jax.Array:
    return x.astype(jnp.float32) if x_scales is None else RoundedRows(x, x_scales).widened(jnp.float32)


def columns_product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, index: jax.Array
) -> jax.Array:
    """x f32[M, in] times matrix `index` of codes [G, in, out]: f32[M, out]."""
    out_size, num_scales = codes.shape[2], scales.shape[1]
    width = min(BLOCK_COLUMNS, out_size)
    rows = row_parts(x, codes.dtype)

    def multiply(block, out):
        # Without the barrier XLA:CPU widens all of the codes before the loop. The last block begins where it must to
        # end with the matrix: slices clamp, and columns made twice are made alike.
        matrices, block = lax.optimization_barrier(((codes, scales, zeros), block))

        def columns(array):
            return lax.dynamic_slice(array, (index, 0, block * width), (1, array.shape[1], width))[0]

        wide = [part.astype(jnp.float32) for part in code_parts(columns(matrices[0]))]
        scale = columns(matrices[1]).astype(jnp.float32)
        zero = None if zeros is None else columns(matrices[2]).astype(jnp.float32)
        if num_scales > 1:
            wide = [part.reshape(num_scales, -1, width) * scale[:, None] for part in wide]
            wide = [part if zero is None else part - zero[:, None] for part in wide]
            y = sum(own @ part.reshape(-1, width) for own, part in zip(rows, wide, strict=True))
        else:
            y = sum(own @ part for own, part in zip(rows, wide, strict=True)) * scale
            y = y if zero is None else y - jnp.sum(x, axis=1, keepdims=True) * zero
        return lax.dynamic_update_slice(out, y, (0, block * width))

    out = zeros_in_layer(scales, (x.shape[0], out_size))
    return lax.fori_loop(0, -(-out_size // width), multiply, out)

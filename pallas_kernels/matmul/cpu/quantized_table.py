"""Product with a quantised token table for the CPU: a few tokens at a time are widened while in cache.

For a single row the codes are widened in registers, a token's codes side by side, in the order of memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.cpu.quantized import total, wide_parts
from jaxengine.pallas_kernels.matmul.nibbles import row_parts
from jaxengine.pallas_kernels.zeros import zeros_in_layer

BLOCK_TOKENS = 256  # tokens of the table that are widened at a time
# For a single row: most groups whose codes and scales are read at once. Processors prefetch a limited number of
# streams; with more a row is slower than in blocks.
_MOST_GROUPS = 96


def quantized_table_matmul(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, *, dtype: Any, out_dtype: Any
) -> jax.Array:
    """Multiply x [M, in] by the transpose of a quantised table [V, in], codes * scales - zeros, on a CPU: return [M, V]
    in out_dtype, computed in float32 whatever `dtype` is. matmul.quantized_table.quantized_table_matmul has checked the
    arguments.

    codes: [V, in], or [V, in / 2] uint8 in pairs. scales, zeros: [n, V], each for in / n inputs; zeros may be None.
    """
    del dtype
    x = x.astype(jnp.float32)
    if len(x) == 1 and len(scales) <= _MOST_GROUPS:
        return _row_product(x[0], codes, scales, zeros).astype(out_dtype)
    return _blocks_product(x, codes, scales, zeros).astype(out_dtype)


def _row_product(row: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """Multiply row f32 [in] by the transpose of the table [V, in], codes * scales - zeros: return f32 [1, V].

    codes: [V, in] int8, or [V, in / 2] uint8 in pairs. scales, zeros: [n, V], each for in / n neighbouring inputs;
    zeros may be None. Each group of inputs is a term. Terms added element by element are one vectorised loop, of which
    each core runs a part (see jaxengine.pallas_kernels.matmul.cpu.dense); a product with ones adds up the remaining
    sums.
    """
    count = len(scales)
    width = codes.shape[1] // count
    sums = jnp.zeros(())
    for group in range(count):
        part = lax.slice_in_dim(codes, group * width, (group + 1) * width, axis=1)
        own = lax.slice_in_dim(row, group * (len(row) // count), (group + 1) * (len(row) // count))
        products = (wide * x for wide, x in zip(wide_parts(part), row_parts(own, codes.dtype), strict=True))
        sums = sums + sum(products) * scales[group, :, None].astype(jnp.float32)
    y = total(jnp.ones((1, width), jnp.float32), sums, 1)
    if zeros is None:
        return y
    return y - total(jnp.sum(row.reshape(1, count, -1), axis=2), zeros.astype(jnp.float32).T, 1)


def _blocks_product(x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None) -> jax.Array:
    """Multiply x f32 [M, in] by the table's transpose, block of tokens by block: return f32 [M, V].

    codes: [V, in] int8, or [V, in / 2] uint8 in pairs. scales, zeros: [n, V]; zeros may be None.
    """
    count, num_tokens = scales.shape
    size = min(BLOCK_TOKENS, num_tokens)
    rows = row_parts(x, codes.dtype)

    def multiply(block, out):
        # Barrier and last block as in jaxengine.pallas_kernels.matmul.cpu.quantized.columns_product.
        table, block = lax.optimization_barrier(((codes, scales, zeros), block))

        def of_block(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, block * size, size, axis=1).astype(jnp.float32).T[:, :, None]

        own, scale = lax.dynamic_slice_in_dim(table[0], block * size, size), of_block(table[1])
        y = jnp.zeros(())
        for row, wide in zip(rows, wide_parts(own), strict=True):
            wide = wide.reshape(size, count, -1) * scale
            wide = wide if zeros is None else wide - of_block(table[2])
            y = y + total(row, wide.reshape(size, -1), 1)
        return lax.dynamic_update_slice(out, y, (0, block * size))

    out = zeros_in_layer(scales, (len(x), num_tokens))
    return lax.fori_loop(0, -(-num_tokens // size), multiply, out)

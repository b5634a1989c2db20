"""Quantised products for the CPU: a few columns at a time are widened, and multiplied while in cache.

For a single row the codes are widened in registers, and no widened matrix is stored anywhere.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.nibbles import code_parts, per_byte, row_parts
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.rounding import RoundedRows
from jaxengine.pallas_kernels.zeros import zeros_in_layer

BLOCK_COLUMNS = 128
# For a single row: number of rows of codes that one sum adds up, all read at the same time. With more, in a matrix
# whose rows are a multiple of 4 KiB apart, they would evict each other from the cache.
_MOST_TERMS = 8
# Most bytes of such sums: of an entire matrix; of one iteration, if the matrix has more.
_MOST_SUMS_BYTES, _TRIP_SUMS_BYTES = 4 << 20, 1 << 20


def quantized_matmul(operands: QuantizedOperands, *, dtype: Any, out_dtype: Any) -> jax.Array:
    """Multiply x [M, in] by codes * scales - zeros on a CPU: return [M, out] in out_dtype, computed in float32 whatever
    `dtype` is. matmul.quantized.quantized_matmul has checked the arguments.
    """
    x, x_scales, codes, scales, zeros = operands
    del dtype
    wide = widened_rows(x, x_scales)
    if x.shape[0] == 1 and (terms := _num_terms(codes, scales)):
        return _row_product(wide[0], codes, scales, zeros, terms).astype(out_dtype)
    matrix = codes[None], scales[None], None if zeros is None else zeros[None]
    return columns_product(wide, *matrix, jnp.int32(0)).astype(out_dtype)


def widened_rows(x: jax.Array, x_scales: jax.Array | None) -> jax.Array:
    """Return rows f32 [M, in]: x itself, or codes x times their x_scales unless these are None (see RoundedRows)."""
    return x.astype(jnp.float32) if x_scales is None else RoundedRows(x, x_scales).widened(jnp.float32)


def columns_product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, index: jax.Array
) -> jax.Array:
    """Multiply x f32 [M, in] by matrix `index` of codes * scales - zeros, block of columns by block: return f32 [M,
    out].

    codes: [G, in, out], or [G, in / 2, out] in pairs (uint8, see matmul/nibbles.py). scales, zeros: [G, n, out] for n
    groups of inputs; zeros may be None.
    """
    out_size, num_scales = codes.shape[2], scales.shape[1]
    width = min(BLOCK_COLUMNS, out_size)
    rows = row_parts(x, codes.dtype)

    def multiply(block, out):
        # Without the barrier XLA:CPU widens all of the codes before the loop. The last block is moved back to end with
        # the matrix (slices clamp): columns that are computed twice have the same values.
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


def _num_terms(codes: jax.Array, scales: jax.Array) -> int:
    """Return the number of rows of codes [in, out] that each sum of one row's product adds up: the largest divisor, up
    to _MOST_TERMS, of the rows of codes that share a row of the scales [n, out]. 0, which rules that form out, if it is
    half of _MOST_TERMS or less, or if the codes are not integers.
    """
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        return 0
    group = codes.shape[0] // scales.shape[0]
    terms = max(count for count in range(1, _MOST_TERMS + 1) if group % count == 0)
    return terms if 2 * terms > _MOST_TERMS else 0


def _row_product(row: jax.Array, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, terms: int) -> jax.Array:
    """Multiply row f32 [in] by the matrix codes * scales - zeros [in, out]: return f32 [1, out].

    codes: [in, out] int8, or [in / 2, out] uint8 in pairs. scales, zeros: [n, out], each for in / n neighbouring
    inputs; zeros may be None. terms: rows of codes that are added per sum, from `_num_terms`. Terms of equal shape,
    added element by element, are one vectorised loop, of which each core runs a part (see
    jaxengine.pallas_kernels.matmul.cpu.dense). Terms of one sum share a scale; a product with ones adds the sums. A
    large matrix is computed some groups at a time.
    """
    num_scales, out_size = scales.shape
    packed = per_byte(codes.dtype)
    scales = scales.astype(jnp.float32)
    # With one scale per channel any sums may form a group, and their total is scaled.
    groups = num_scales if num_scales > 1 else codes.shape[0] // terms
    each = codes.shape[0] // terms // groups
    trips, group_bytes = 1, 4 * each * out_size
    if groups * group_bytes > _MOST_SUMS_BYTES:
        fits = max(1, _TRIP_SUMS_BYTES // group_bytes)
        trips = next(count for count in range(1, groups + 1) if groups % count == 0 and groups // count <= fits)
    parts = [row.reshape(trips, -1, each, terms, packed), codes.reshape(trips, -1, each, terms, out_size)]
    if num_scales > 1:
        parts.append(scales.reshape(trips, -1, 1, out_size))

    def add(row: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
        sums = jnp.zeros(())
        for term in range(terms):
            for own, part in enumerate(wide_parts(codes[:, :, term])):
                sums = sums + row[:, :, term, own, None] * part
        sums = sums * scale[0] if scale else sums
        sums = sums.reshape(-1, out_size)
        return total(jnp.ones((1, len(sums)), jnp.float32), sums)

    def slices(index):
        # The barrier as in columns_product.
        held, index = lax.optimization_barrier((parts, index))
        return [lax.dynamic_index_in_dim(part, index, keepdims=False) for part in held]

    def trip(index, carried):
        # The next iteration's operands are sliced here, and so copied: a loop that slices as it goes is not vectorised.
        y, own = carried
        return y + add(*own), slices(jnp.minimum(index + 1, trips - 1))

    if trips == 1:
        y = add(*(part[0] for part in parts))
    else:
        begin = zeros_in_layer(scales, (1, out_size)), slices(jnp.int32(0))
        y, _ = lax.fori_loop(0, trips, trip, begin)
    y = y if num_scales > 1 else y * scales
    return y if zeros is None else y - total(jnp.sum(row.reshape(1, num_scales, -1), axis=2), zeros.astype(jnp.float32))


def wide_parts(codes: jax.Array) -> list[jax.Array]:
    """Return the parts of `code_parts` for codes, as f32. They are computed by 32-bit shifts, because processors have
    no vector shifts of eight bits.
    """
    if codes.dtype != jnp.uint8:
        return [codes.astype(jnp.float32)]
    pairs, low = lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32), jnp.int32(28)
    even = lax.shift_right_arithmetic(lax.shift_left(pairs, low), low)
    return [part.astype(jnp.float32) for part in (even, lax.shift_right_arithmetic(pairs, jnp.int32(4)))]


def total(x: jax.Array, y: jax.Array, contract: int = 0) -> jax.Array:
    """Return the float32 product of x [M, n] and y [n, out], with contract = 1 [out, n], by an operation into which XLA
    fuses nothing.
    """
    return lax.dot_general(x, y, (((1,), (contract,)), ((), ())), precision=lax.Precision.HIGHEST)

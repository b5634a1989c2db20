"""Dense product for the CPU in plain XLA, with forms of it that XLA:CPU runs fast for a single row."""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.xla import dense as dense_xla

# For float32. XLA:CPU (YNNPACK) adds the products of many rows in blocks of _BLOCK inputs if there are two or more.
_BLOCK, _ROW_PARTS = 512, 4
# Number of bfloat16 rows from which on XLA:CPU adds products in one order, also on processors with tiles (AMX). One row
# takes it ten times as long as several.
_FEW = 3
# For a bfloat16 matrix, by the axis that is summed over. With fewer terms more sums are left, which take memory. Terms
# that multiply an element of a row by a vector exceed the registers if there are more than a dozen; terms of two
# vectors do not. Vectors must be full.
_TERMS, _LANES, _MOST_SUMS_BYTES = (range(8, 13), range(8, 25)), (1, 8), 16 << 20
# XLA:CPU writes an array of bits to memory first if more than a dozen terms read it. So half of the terms read the bits
# as signed integers: the shift drops the bits that sign extension has filled in.
_BITS = jnp.uint16, jnp.int16


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """Multiply x [R, n] by weight over its axis `contract` of size n, on a CPU: return float32 [R, out].

    One row of float32, over axis 0, is multiplied in the partial sums of `_num_parts`; one of bfloat16 by
    `_row_product` if `_num_terms` allows, and fewer than _FEW otherwise with zeros as further rows. All else is the
    plain XLA product. matmul.dense.matmul has checked the arguments.
    """
    rows = x.shape[0]
    if rows == 1 and x.dtype == jnp.float32 and contract == 0 and (parts := _num_parts(weight.shape[0])):
        # As a batch of partial sums XLA:CPU reads the weights faster: `jaxengine bench peers --workloads W1`. They are
        # added in order, as those of many rows are; a reduction would add some of them first.
        x, weight = x.reshape(parts, 1, -1), weight.reshape(parts, -1, weight.shape[1])
        return reduce(jnp.add, lax.dot_general(x, weight, (((2,), (1,)), ((0,), (0,)))))
    if rows < _FEW and x.dtype == weight.dtype == jnp.bfloat16:
        if rows == 1 and (terms := _num_terms(weight.shape, contract)):
            return _row_product(x, weight, contract, terms)
        x = jnp.pad(x, ((0, _FEW - rows), (0, 0)))
    return dense_xla.matmul(x, weight, contract=contract)[:rows]


def _num_parts(inputs: int) -> int:
    """Return the number of partial sums into which the float32 product of one row with `inputs` elements is cut; 0 if
    it is not cut.

    If blocks of 512 divide the inputs and there are two or more, these are the parts, so that one row gets the same
    bits as among several. Otherwise there are four parts, if four divides the inputs.
    """
    if inputs % _BLOCK == 0 and inputs > _BLOCK:
        return inputs // _BLOCK
    return _ROW_PARTS if inputs % _ROW_PARTS == 0 else 0


def _num_terms(shape: tuple[int, ...], contract: int) -> int:
    """Return the number of terms into which one row's bfloat16 product is cut along the inputs: the largest of _TERMS
    that divides them into vectors of _LANES. 0 if none does, or if the sums would take more than _MOST_SUMS_BYTES.

    shape: the matrix's shape. contract: the matrix's axis of inputs.
    """
    inputs = shape[contract]
    fits = [count for count in _TERMS[contract] if inputs % (count * _LANES[contract]) == 0]
    count = max(fits, default=0)
    return count if count and math.prod(shape) * 4 // count <= _MOST_SUMS_BYTES else 0


def _row_product(x: jax.Array, weight: jax.Array, contract: int, terms: int) -> jax.Array:
    """Multiply one bfloat16 row x [1, in] by a bfloat16 matrix `weight` that is widened in registers: return f32 [1,
    out].

    contract: the matrix's axis of inputs. terms: number of equal parts into which these are cut, see `_num_terms`.

    Terms of equal shape, added element by element, are one vectorised loop, of which each core runs a half. The
    remaining sums are added by a product with ones, into which XLA fuses nothing; into a sum it would fuse the terms.
    """
    row = x[0].astype(jnp.float32)
    size = row.shape[0] // terms
    bits = [lax.bitcast_convert_type(weight, dtype) for dtype in _BITS]
    sums = jnp.zeros(())
    for term in range(terms):
        first = term * size
        # Widening by a shift of the bits: XLA would hoist a conversion and apply it to the entire matrix.
        part = lax.slice_in_dim(bits[term % len(bits)], first, first + size, axis=contract).astype(jnp.uint32)
        wide = lax.bitcast_convert_type(lax.shift_left(part, jnp.uint32(16)), jnp.float32)
        own = lax.slice_in_dim(row, first, first + size)
        sums = sums + (own[:, None] if contract == 0 else own) * wide
    ones = jnp.ones((1, size), jnp.float32)
    return lax.dot_general(ones, sums, (((1,), (contract,)), ((), ())))

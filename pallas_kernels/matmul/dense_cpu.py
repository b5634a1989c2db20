"""Rows times a matrix for the CPU: plain XLA, with the forms in which XLA:CPU is fast with a single row."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import dense_xla

_ROW_PARTS = 4
# Of a matrix of bfloat16. Of more terms XLA:CPU makes the bits in memory first; of fewer more sums are left, which take
# memory. Terms that lie side by side in a row are whole vectors.
_TERMS, _LANES, _MOST_SUMS_BYTES = range(8, 13), 32, 16 << 20


def matmul(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    """float32 [R, out]; arguments as the public operation has checked them."""
    rows = x.shape[0]
    if rows == 1 and x.dtype == jnp.float32 and contract == 0 and weight.shape[0] % _ROW_PARTS == 0:
        # As a batch of partial sums XLA:CPU reads the weights faster: `jaxengine bench peers --workloads W1`.
        x, weight = x.reshape(_ROW_PARTS, 1, -1), weight.reshape(_ROW_PARTS, -1, weight.shape[1])
        return jnp.sum(lax.dot_general(x, weight, (((2,), (1,)), ((0,), (0,)))), axis=0)
    if rows == 1 and x.dtype == weight.dtype == jnp.bfloat16:
        if terms := _num_terms(weight.shape, contract):
            return _row_product(x, weight, contract, terms)
        # XLA:CPU takes ten times as long for one bfloat16 row as for two.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return dense_xla.matmul(x, weight, contract=contract)[:rows]


def _num_terms(shape: tuple[int, ...], contract: int) -> int:
    """Into how many terms one row's product is cut along the inputs, 0 for none."""
    inputs = shape[contract]
    fits = [count for count in _TERMS if inputs % (count * (1 if contract == 0 else _LANES)) == 0]
    count = max(fits, default=0)
    return count if count and math.prod(shape) * 4 // count <= _MOST_SUMS_BYTES else 0


def _row_product(x: jax.Array, weight: jax.Array, contract: int, terms: int) -> jax.Array:
    """One row times a matrix, bfloat16 both, that is widened in registers.

    XLA:CPU's product of bfloat16 writes the widened matrix to memory first, and its sums of products are scalar code.
    Terms of equal shape, added number by number, are one loop in vectors, of which each core runs a half. What is left
    of the inputs is added by a product with ones, into which XLA fuses nothing; into a sum it fuses the terms.
    """
    row = x[0].astype(jnp.float32)
    size = row.shape[0] // terms
    bits = lax.bitcast_convert_type(weight, jnp.uint16)
    sums = jnp.zeros(())
    for first in range(0, row.shape[0], size):
        # A shift of the bits is what widening is. As a conversion XLA would make it once, of the whole matrix.
        part = lax.slice_in_dim(bits, first, first + size, axis=contract).astype(jnp.uint32)
        wide = lax.bitcast_convert_type(lax.shift_left(part, jnp.uint32(16)), jnp.float32)
        own = lax.slice_in_dim(row, first, first + size)
        sums = sums + (own[:, None] if contract == 0 else own) * wide
    ones = jnp.ones((1, size), jnp.float32)
    return lax.dot_general(ones, sums, (((1,), (contract,)), ((), ())))

"""Candidate sizes that `jaxengine tune` tries for a quantised product; each kernel folder lists its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands


class Problem(NamedTuple):
    """Shape of a product of bfloat16 rows [rows, size] with a quantised matrix [size, out].

    Attributes:
      group: inputs that share a scale.
      codes: dtype, uint8 for pairs of four bits.
      zeros: whether there are zero points.
    """

    rows: int
    size: int
    out: int
    group: int
    codes: str
    zeros: bool


class Candidate(NamedTuple):
    """One choice of tile sizes for a kernel.

    Attributes:
      sizes: fields of the kernel's part of `tuning` that differ from the defaults.
      function, arguments: the kernel or a part of it and the shapes of its arguments, to compile for an estimate.
      cost: function that estimates microseconds from the compiler's figures ("bundles", "registers", "spill_bytes") and
        the chip's "bandwidth" and "clock", in bytes and cycles a second. Returns None if the candidate is not feasible.
      product: the entire product as a function of x, codes, scales and zeros, to be timed.
    """

    sizes: dict[str, int]
    function: Callable
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    cost: Callable[[dict[str, Any]], float | None]
    product: Callable


def operands(problem: Problem) -> tuple[Any, ...]:
    """Return the shapes and dtypes of x, codes, scales and zeros of a problem. If it has no zeros, the last is None."""
    rows, size, out, group, codes, zeros = problem
    packed = 2 if codes == "uint8" else 1
    scales = jax.ShapeDtypeStruct((size // group, out), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, size), jnp.bfloat16)
    return x, jax.ShapeDtypeStruct((size // packed, out), jnp.dtype(codes)), scales, scales if zeros else None


def product_by(
    quantized_matmul: Callable, x: jax.Array, codes: jax.Array, scales: jax.Array, zeros: Any = None, *, sizes: Any
) -> jax.Array:
    """Return the product bf16 [M, out] of x [M, in] with codes * scales - zeros (None: no zeros), computed by a
    kernel's function with these sizes. x is not rounded to codes.
    """
    options = {"dtype": jnp.bfloat16, "out_dtype": jnp.bfloat16, "sizes": sizes}
    return quantized_matmul(QuantizedOperands(x, None, codes, scales, zeros), **options)

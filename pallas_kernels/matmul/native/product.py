"""Products of few rows by the handlers of `library`, and what they take."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.matmul.native.library import target_name, wide_vectors

# Rows up to which a handler is faster than XLA's forms, with vectors of 256 and of 512 bits.
_MOST_ROWS = {"pairs": (32, 128), "int8": (32, 64), "bfloat16": (4, 8)}
_TILE, _MOST_PANEL, _SUM_LANES = 64, 32, 8  # of code.py
_KINDS = {"uint8": "pairs", "int8": "int8", "bfloat16": "bfloat16"}
_FLOATS = "float32", "bfloat16"


def few_rows_product(
    x: jax.Array, matrix: jax.Array, scales: jax.Array | None = None, zeros: jax.Array | None = None
) -> jax.Array | None:
    """Multiply x [M, in] by a matrix: f32 [M, out]; None if no handler takes operands of this kind.

    matrix: [in, out] int8 or bfloat16, or [in / 2, out] uint8, pairs of four-bit codes. scales, zeros: [n, out], each
    for in / n neighbouring inputs.
    """
    kind = _KINDS.get(str(matrix.dtype))
    if kind is None or not 0 < len(x) <= _MOST_ROWS[kind][wide_vectors()] or matrix.shape[1] % _TILE:
        return None
    held = [own for own in (scales, zeros) if own is not None]
    if any(str(own.dtype) not in _FLOATS for own in held):
        return None
    if zeros is not None and (x.shape[1] // matrix.shape[0]) * _panel(matrix.shape[0] // len(zeros)) % _SUM_LANES:
        return None
    shape = jax.ShapeDtypeStruct((len(x), matrix.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call(target_name(kind), shape, vmap_method="sequential")
    return call(x.astype(jnp.float32), matrix, *held)


def _panel(group: int) -> int:
    """Return the number of rows of the matrix that are added up at once, of `group` that share a scale."""
    return max(size for size in range(1, _MOST_PANEL + 1) if group % size == 0)

"""Products of few and of many rows by the handlers of `library`, and the operands that these support."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.native.library import has_feature, target_name

# Rows up to which a handler of few rows is faster than all other forms, with vectors of 256 and of 512 bits.
_MOST_ROWS = {"pairs": (32, 128), "int8": (32, 64), "bfloat16": (4, 8), "float32": (4, 4), "dots": (0, 4)}
_MOST_ROWS |= {"pairs_table": (8, 32), "int8_table": (8, 16), "bfloat16_table": (1, 1)}
_LANES, _TILE, _MOST_PANEL, _SUM_LANES = 16, 64, 32, 8  # of code.py
_KINDS = {"uint8": "pairs", "int8": "int8", "bfloat16": "bfloat16", "float32": "float32"}
_FLOATS = "float32", "bfloat16"


def few_rows_product(
    x: jax.Array,
    matrix: jax.Array,
    scales: jax.Array | None = None,
    zeros: jax.Array | None = None,
    *,
    is_table: bool = False,
) -> jax.Array | None:
    """Multiply x [M, in] by a matrix, codes * scales - zeros, with a handler: return f32 [M, out]. The handlers must be
    loaded (`library.load`).

    Returns None if no handler supports the operands: another dtype, no rows or more than it is fast for, no inputs,
    outputs that are not a multiple of 64, groups that its vectors do not divide, or float32 that `has_many_rows`
    refuses.

    matrix: [in, out] int8, bfloat16 or float32, or [in / 2, out] uint8, pairs of four-bit codes. scales, zeros: [n,
    out], each for in / n neighbouring inputs; bfloat16 and float32 have none. is_table: the matrix is [out, in], or
    [out, in / 2]; there is no handler for tables of float32.
    """
    if (kind := _KINDS.get(str(matrix.dtype))) is None or not matrix.size:
        return None
    lines, outputs = matrix.shape[::-1] if is_table else matrix.shape
    has_many = not is_table and has_many_rows(matrix)
    if kind == "bfloat16" and has_many and x.dtype == matrix.dtype:
        kind = "dots"
    handler = f"{kind}_table" if is_table else kind
    if not 0 < len(x) <= _MOST_ROWS.get(handler, (0, 0))[has_feature("avx512f")] or outputs % _TILE:
        return None
    if kind == "float32" and not has_many:
        return None
    held = [own for own in (scales, zeros) if own is not None]
    if any(str(own.dtype) not in _FLOATS for own in held):
        return None
    group = lines // len(held[0]) if held else lines
    if is_table and group % _LANES:
        return None
    if zeros is not None and (x.shape[1] // lines) * (group if is_table else _panel(group)) % _SUM_LANES:
        return None
    x = x if kind == "dots" else x.astype(jnp.float32)
    if is_table and kind == "pairs":  # even inputs first, as vectors of codes are
        x = x.reshape(len(x), -1, _LANES, 2).swapaxes(2, 3).reshape(x.shape)
    shape = jax.ShapeDtypeStruct((len(x), outputs), jnp.float32)
    return jax.ffi.ffi_call(target_name(handler), shape, vmap_method="sequential")(x, matrix, *held)


def many_rows_product(x: jax.Array, matrix: jax.Array, *, is_table: bool = False) -> jax.Array | None:
    """Multiply x [M, in] by a matrix of the same dtype, [in, out], or [out, in] if is_table, with a handler of
    matmul.native_rows: return f32 [M, out]. The handlers must be loaded (`library.load`).

    Returns None without rows, or if no handler supports the matrix (`has_many_rows`).
    """
    if not len(x) or not has_many_rows(matrix, is_table=is_table):
        return None
    handler = f"many_{matrix.dtype}{'_table' * is_table}"
    shape = jax.ShapeDtypeStruct((len(x), matrix.shape[not is_table]), jnp.float32)
    return jax.ffi.ffi_call(target_name(handler), shape, vmap_method="sequential")(x, matrix)


def has_many_rows(matrix: jax.Array, *, is_table: bool = False) -> bool:
    """Return whether a handler of matmul.native_rows supports a matrix [in, out], or [out, in] if is_table.

    It must be bfloat16, or float32 and no table; out must be a multiple of 64, and in one of 32. For bfloat16 the
    processor must have AVX-512's products of it and no tiles (AMX), which XLA uses.
    """
    inputs, outputs = matrix.shape[::-1] if is_table else matrix.shape
    if not matrix.size or inputs % _MOST_PANEL or outputs % _TILE:
        return False
    if matrix.dtype == jnp.float32:
        return not is_table
    return matrix.dtype == jnp.bfloat16 and has_feature("avx512bf16") and not has_feature("amx-bf16")


def _panel(group: int) -> int:
    """Return the number of matrix rows whose products are added up before they are scaled: the largest divisor, up to
    32, of `group`, the rows that share a scale.
    """
    return max(size for size in range(1, _MOST_PANEL + 1) if group % size == 0)

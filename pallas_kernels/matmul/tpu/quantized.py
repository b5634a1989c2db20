"""Quantised product with scales that vary along the inputs: a Mosaic kernel that widens the matrix tile by tile.

The widened matrix is never in memory: codes, scales and zeros are read once for each tile of rows. With one scale per
channel the product is XLA's own, which then runs at the memory's bandwidth
(jaxengine.pallas_kernels.matmul.xla.quantized).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.rounding import RoundedRows
from jaxengine.pallas_kernels.matmul.tpu.widened import LANES, SUBLANES, add_product, chunk_of, why_not
from jaxengine.pallas_kernels.matmul.xla import quantized as quantized_xla
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params
from jaxengine.pallas_kernels.tuned import product_sizes
from jaxengine.pallas_kernels.tuning import TpuProducts, tuning_of

_WORKSPACE = 8 << 20  # bytes in addition to operands and results: a widened chunk, a product; as many for zeros


def quantized_matmul(
    operands: QuantizedOperands, *, dtype: Any, out_dtype: Any, sizes: TpuProducts | None = None, interpret: Any = False
) -> jax.Array:
    """Multiply x [M, in] by codes * scales - zeros (all fields of `operands`) on a TPU: return [M, out] in out_dtype.
    matmul.quantized.quantized_matmul has checked the arguments.

    XLA computes the product if the kernel does not support it, see `why_xla`. dtype: the dtype that rows and codes are
    widened to. sizes: tile sizes, None for those in the tuning table for the chip that the trace is for. interpret:
    argument of `pl.pallas_call`.
    """
    x, x_scales, codes, scales, zeros = operands
    (num_rows, size), (count, out) = x.shape, scales.shape
    if why_not(size, count, dtype):
        defaults = tuning_of("tpu").tpu_products if sizes is None else sizes
        # Eight-bit codes are exact in bfloat16.
        x = x.astype(dtype) if x.dtype == jnp.int8 and defaults.int8_products == 1 else x
        options = {"dtype": dtype, "out_dtype": out_dtype, "fine": jnp.float32}  # a TPU has no float16
        return quantized_xla.quantized_matmul(operands._replace(x=x), **options)
    chosen: TpuProducts = product_sizes("tpu", num_rows, size, out, count, codes.dtype) if sizes is None else sizes
    by_sums = sums_are_smaller(num_rows, size // count, chosen)
    rows = prepared(x, x_scales, codes.dtype, count, dtype, chosen, by_sums=by_sums)
    return _call(rows, codes, scales, zeros, out_dtype, chosen, interpret)


def why_xla(size: int, out: int, num_scales: int, codes: Any, dtype: Any) -> str:
    """Return the reason why the kernel does not support a matrix [size, out] with `num_scales` scales along its inputs,
    so that XLA computes the product; "" if the kernel supports it. Reasons are those of `widened.why_not`. dtype: the
    dtype that codes are widened to. out and codes are not used.
    """
    return why_not(size, num_scales, dtype)


def sums_are_smaller(rows: int, group: int, sizes: TpuProducts) -> bool:
    """Return whether to scale the sums of groups, one for each of `rows` rows, rather than the `group` inputs of each
    group of the matrix: for at most sizes.sum_rows rows and group // 2.
    """
    return rows <= min(sizes.sum_rows, group // 2)


class PreparedRows(NamedTuple):
    """Rows in the form that the kernel multiplies.

    Attributes:
      values: [M, in], bfloat16 or codes.
      scales: f32 [M, n], one per group of the matrix if by_sums, else one per chunk of inputs; None for none.
      after: f32 [M, 1], factor of the result; None for none.
      by_sums: whether sums are scaled instead of the matrix, see `widened`.
    """

    values: jax.Array
    scales: jax.Array | None
    after: jax.Array | None
    by_sums: bool


def prepared(
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: Any,
    num_scales: int,
    dtype: Any,
    sizes: TpuProducts,
    *,
    by_sums: bool,
) -> PreparedRows:
    """Return rows [M, in] prepared for a matrix with `num_scales` groups of inputs. They are rounded rows if they have
    `x_scales`. One scale of each row becomes `after`. With by_sums several become `scales`, or are multiplied into the
    values if they are finer than the matrix's; otherwise units replace them (`_in_units`).

    x: numbers, or the rounded rows' codes. codes: dtype of the matrix's codes. dtype: what the values are widened to,
    unless rounded rows are multiplied as eight-bit codes. by_sums: whether sums of groups are scaled instead of the
    matrix.
    """
    if x_scales is None:
        return PreparedRows(x.astype(dtype), None, None, by_sums)
    count = x_scales.shape[1]
    if count > 1 and not by_sums:
        return _in_units(x, x_scales, chunk_of(x.shape[1] // num_scales), dtype)
    if count > num_scales:
        return PreparedRows(RoundedRows(x, x_scales).widened(dtype), None, None, by_sums)
    # Eight-bit codes are exact in bfloat16.
    eight = x.dtype == codes if x.dtype != jnp.int8 else codes != jnp.float8_e4m3fn and sizes.int8_products == 2
    values = x if by_sums and eight else x.astype(dtype)
    if count == 1:
        return PreparedRows(values, None, x_scales, by_sums)
    return PreparedRows(values, jnp.repeat(x_scales, num_scales // count, axis=1), None, by_sums)


def _in_units(x: jax.Array, x_scales: jax.Array, chunk: int, dtype: Any) -> PreparedRows:
    """Return rounded rows, codes x [M, in] with scales x_scales [M, n], prepared for a product in `dtype` with scaled
    weights. Each `chunk` inputs are in units of their largest scale, so that codes of that scale stay exact; these
    units become the rows' scales.
    """
    size, group = x.shape[1], x.shape[1] // x_scales.shape[1]
    step = math.gcd(group, chunk)
    scales, each = jnp.repeat(x_scales, group // step, axis=1), chunk // step
    padded = jnp.pad(scales, ((0, 0), (0, -(size // step) % each)))
    units = jnp.max(padded.reshape(len(x), -1, each), axis=2)
    own = jnp.repeat(units, each, axis=1)[:, : size // step]
    return PreparedRows(RoundedRows(x, scales / own).widened(dtype), units, None, False)


def group_sums(rows: PreparedRows, num_scales: int) -> jax.Array:
    """Return the sum of each of the n = num_scales groups of inputs of each row, multiplied by the rows' scales, as
    bfloat16 [M, 3 n]: high bits, low bits, high bits.

    Times zeros as high, high, low bits, this gives a product in 16 bits of mantissa in one pass.
    """
    size = rows.values.shape[1]
    # A product with ones, because XLA would transpose rows that are reshaped to groups, in float32.
    of_scale = group = size // num_scales
    if rows.scales is not None and not rows.by_sums:
        of_scale = chunk_of(group)
    step = math.gcd(of_scale, group)
    part = jnp.arange(size)[:, None] // step == jnp.arange(size // step)
    values = rows.values.astype(jnp.bfloat16)
    sums = jnp.dot(values, part.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    if rows.scales is not None:
        sums = sums * jnp.repeat(rows.scales, of_scale // step, axis=1)[:, : size // step]
    if step != group:
        sums = jnp.sum(sums.reshape(len(sums), num_scales, -1), axis=2)
    high = sums.astype(jnp.bfloat16)
    return jnp.concatenate([high, (sums - high).astype(jnp.bfloat16), high], axis=1)


def _call(
    rows: PreparedRows,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    out_dtype: Any,
    sizes: TpuProducts,
    interpret: Any,
) -> jax.Array:
    """Run the kernel with prepared rows: return [M, out] in out_dtype. codes: [in, out] or pairs [in / 2, out]. scales,
    zeros: [n, out]; zeros may be None. sizes, interpret: see `quantized_matmul`.
    """
    (num_rows, size), (count, out) = rows.values.shape, scales.shape
    tile_rows, columns = tiles(num_rows, size, out, count, rows.values.dtype, codes.dtype, sizes)
    limit = vmem_limit((tile_rows, columns), rows, codes, scales, zeros, sizes.vmem_limit_bytes)

    def of_rows(array: jax.Array | None) -> pl.BlockSpec | None:
        return None if array is None else pl.BlockSpec((tile_rows, array.shape[1]), lambda m, n: (m, 0))

    def of_matrix(array: jax.Array | None) -> pl.BlockSpec | None:
        return None if array is None else pl.BlockSpec((array.shape[0], columns), lambda m, n: (0, n))

    sums = None if zeros is None else group_sums(rows, count)
    operands = rows.values, rows.scales, rows.after, sums, codes, scales.astype(jnp.float32), zeros
    specs = *map(of_rows, operands[:4]), *map(of_matrix, operands[4:])
    passes = pl.cdiv(num_rows, tile_rows)
    of_codes = codes.nbytes + scales.nbytes * (1 if zeros is None else 2)
    return pl.pallas_call(
        partial(_body, by_sums=rows.by_sums),
        grid=(passes, pl.cdiv(out, columns)),
        in_specs=specs,
        out_specs=pl.BlockSpec((tile_rows, columns), lambda m, n: (m, n)),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), out_dtype),
        scratch_shapes=[pltpu.VMEM((tile_rows, columns), jnp.float32)],
        compiler_params=compiler_params(interpret, "parallel", "parallel", vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size * out,
            bytes_accessed=passes * of_codes + rows.values.nbytes + num_rows * out * jnp.dtype(out_dtype).itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantized_matmul",
    )(*operands)


def _body(x, x_scales, after, sums, codes, scales, zeros, out, total, *, by_sums: bool):
    """Body of the kernel: compute a tile of the result and write it to `out` [M, N].

    x, x_scales, after: fields of PreparedRows for the tile's rows. sums: result of `group_sums`. codes, scales, zeros:
    the tile's columns. Absent operands are None. total: f32 scratch [M, N]. by_sums: see `widened`.
    """
    clear(total, sums, zeros)
    add_product(total, x, x_scales, codes, scales, by_sums=by_sums)
    y = total[...] if after is None else total[...] * after[...]
    out[...] = y.astype(out.dtype)


def clear(total: Any, sums: Any, zeros: Any) -> None:
    """Set `total`, f32 [M, N], to the contribution of the zeros, -sums @ zeros in 16 bits of mantissa; to 0 if
    zeros is None. sums: [M, 3 n], result of `group_sums`. zeros: [n, N].
    """
    if zeros is None:
        total[...] = jnp.zeros_like(total)
        return
    high = zeros[...].astype(jnp.bfloat16)
    low = (zeros[...] - high.astype(jnp.float32)).astype(jnp.bfloat16)
    matrix = jnp.concatenate([high, high, low], axis=0)
    total[...] = -jnp.dot(sums[...], matrix, preferred_element_type=jnp.float32)


def tiles(
    num_rows: int, size: int, out: int, num_scales: int, x_dtype: Any, codes_dtype: Any, sizes: TpuProducts
) -> tuple[int, int]:
    """Return (rows, columns) of a tile with all `size` inputs, of which two fit in `sizes.tile_bytes` of VMEM; a
    smallest tile may exceed that.

    It begins with at most num_rows and sizes.rows rows, and out and sizes.columns columns (twice that for pairs of
    codes); the larger part is halved until two tiles fit. num_scales: scales along the inputs, 0 for a plain matrix.
    x_dtype, codes_dtype: dtypes of rows and matrix.
    """
    rows, columns = min(num_rows, sizes.rows), min(out, sizes.columns * per_byte(codes_dtype))

    def bytes_of() -> tuple[int, int]:
        return _tile_bytes(rows, columns, size, num_scales, x_dtype, codes_dtype)

    while sum(bytes_of()) > sizes.tile_bytes:
        of_rows, of_columns = bytes_of()
        if columns > LANES and of_columns >= of_rows:
            columns = max(columns // 2 // LANES, 1) * LANES
        elif rows > 2 * SUBLANES:
            rows = max(rows // 2 // (2 * SUBLANES), 1) * 2 * SUBLANES
        elif columns > LANES:
            columns = max(columns // 2 // LANES, 1) * LANES
        else:
            break
    return rows, columns


def _tile_bytes(rows: int, columns: int, size: int, num_scales: int, x_dtype: Any, codes_dtype: Any) -> tuple[int, int]:
    """Return the bytes in VMEM of two tiles, as two numbers: for `rows` rows with their results, and for `columns`
    columns of a matrix.

    size: inputs. num_scales: scales along the inputs, 0 for a plain matrix. x_dtype, codes_dtype: dtypes of rows and
    matrix.
    """
    of_rows = rows * (size * jnp.dtype(x_dtype).itemsize + 6 * columns)
    return 2 * of_rows, 2 * columns * column_bytes(size, num_scales, codes_dtype)


def column_bytes(size: int, num_scales: int, codes: Any) -> int:
    """Return the bytes of one column of a matrix: `size` codes of dtype `codes`, and `num_scales` scales and zeros in
    float32.
    """
    return size * jnp.dtype(codes).itemsize // per_byte(codes) + 8 * num_scales


def vmem_limit(tile: tuple[int, int], rows: PreparedRows, codes: jax.Array, scales: Any, zeros: Any, most: int) -> int:
    """Return the VMEM limit in bytes of a kernel: two tiles of (rows, columns) with these rows, codes, scales and zeros
    (None for absent ones), plus its workspace, at most `most`.
    """
    size, count = rows.values.shape[1], 0 if scales is None else scales.shape[-2]
    held = sum(_tile_bytes(*tile, size, count, rows.values.dtype, codes.dtype))
    return min(held + _WORKSPACE * (1 if zeros is None else 2), most)

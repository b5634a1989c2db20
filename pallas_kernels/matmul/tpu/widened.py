"""Product of rows with a tile of a quantised matrix in VMEM, shared by the dense and the grouped kernel.

It has two forms; a tuning table chooses one by the chip and the number of rows. "sums" is for rows that number at most
half a group's inputs: codes are multiplied directly and the sum of each group of inputs is scaled, which is exact but
costs an operation per element of the result for each group. "weights": codes are first widened, scaled and rounded to
bfloat16, which costs one operation per element of the matrix. A piece of a few groups is scaled in units of the scale
of its first group, which is applied to the piece's sums, so that codes of the first group are exact.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.matmul.nibbles import per_byte

# Approximate number of inputs that are widened at a time, and number of inputs of a pass of the loop if sums are
# scaled. Four-bit codes fill register tiles from 64 inputs on.
CHUNK, SPAN, ALIGNED = 512, 4096, 64
# Inputs and columns that matrix units of v6e and tpu7x multiply at a time. With fewer inputs they are partly idle; with
# more columns at once they wait for sums that are scaled.
PIECE = 256
_LEAST = 1e-30  # stands for scales that cannot be units, mostly zeros
LANES = 128
# Rows of bfloat16 in a register: groups begin at a register.
SUBLANES = 16


def why_not(size: int, num_scales: int, dtype: Any) -> str:
    """Return the reason why the dense kernel does not support a matrix of `size` inputs in `num_scales` groups, widened
    to `dtype`, or "" if the kernel supports it: it needs more than one scale per channel, and what `why_not_aligned`
    checks.
    """
    if num_scales == 1:
        return "with one scale a channel XLA's product is as good"
    return why_not_aligned(size, num_scales, dtype)


def why_not_aligned(size: int, num_scales: int, dtype: Any) -> str:
    """Return the reason why a matrix of `size` inputs in `num_scales` groups, widened to `dtype`, is not supported by
    kernels that also support one scale per channel, or "" if it is. `dtype` must be bfloat16, inputs a multiple of 64,
    and the inputs of a group a multiple of 16.
    """
    if dtype != jnp.bfloat16:
        return "kernels widen to bfloat16"
    if size % ALIGNED or size // num_scales % SUBLANES:
        return f"{size} inputs in groups of {size // num_scales} do not fill whole registers"
    return ""


def chunk_of(group: int) -> int:
    """Return the number of inputs that are widened at a time, about CHUNK: a whole number of groups of `group` inputs
    and a multiple of ALIGNED, or a divisor of one long group.
    """
    if group > CHUNK and group % ALIGNED == 0:
        return math.gcd(group, CHUNK)
    step = math.lcm(group, ALIGNED)
    return step * max(CHUNK // step, 1)


def add_product(total: Any, x: Any, x_scales: Any, codes: Any, scales: Any, *, by_sums: bool) -> None:
    """Add rows times a tile of a matrix to `total`, f32 [M, N], in place. All operands are references in VMEM. by_sums:
    whether sums are scaled instead of weights (see the module); not used for bfloat16 weights.

    x: [M, in], bfloat16, or codes that are multiplied directly with those of the matrix. x_scales: f32 [M, n], one per
    group of the matrix if by_sums, else one per chunk of inputs (`chunk_of`), or None. codes: [in, N] or pairs [in / 2,
    N], or bfloat16 weights. scales: f32 [n, N]; None for bfloat16 weights.
    """
    size = x.shape[1]
    if scales is None:
        chunk = span = SPAN
        add = partial(_add, total, x, codes)
    else:
        group = size // scales.shape[0]
        chunk = chunk_of(group)
        span = chunk * max(SPAN // chunk, 1) if by_sums else chunk
        operands = total, x, x_scales, codes, scales, group
        add = partial(_add_sums, *operands) if by_sums else partial(_add_weights, *operands, chunk)
    # References are sliced at dynamic offsets only where these are multiples of a register.
    passes = size // span if span % LANES == 0 else 0
    if passes > 1:

        @pl.loop(0, passes)
        def _(index):
            first = pl.multiple_of(index * span, span)
            for at in range(0, span, chunk):
                add(first + at, chunk)

    for first in range(passes * span if passes > 1 else 0, size, chunk):
        add(first, min(chunk, size - first))


def _add(total, x, w, first, length):
    """Add the product of x [M, in] and bfloat16 weights w [in, N] over inputs [first, first + length) to `total` [M,
    N], in place.
    """
    total[...] += _dot(x[:, pl.ds(first, length)], w[pl.ds(first, length), :])


def _add_sums(total, x, x_scales, codes, scales, group, first, length):
    """Add the product of x and codes over inputs [first, first + length) to `total`, in place, with each sum of `group`
    inputs multiplied by its scales of columns and, unless x_scales is None, of rows. References: see `add_product`.
    """
    wide, rows = _widened(codes, first, length, x.dtype), x[:, pl.ds(first, length)]
    step, y = min(group, length), None
    for at in range(0, length, step):
        index = (first + at) // group
        part = _dot(rows[:, at : at + step], wide[at : at + step]).astype(jnp.float32) * scales[pl.ds(index, 1), :]
        if x_scales is not None:
            part *= _column(x_scales, index)
        y = part if y is None else y + part
    total[...] += y


def _add_weights(total, x, x_scales, codes, scales, group, chunk, first, length):
    """Add the product of x and codes over inputs [first, first + length) to `total`, in place, with the codes of each
    `group` inputs scaled. Within a piece codes are in units of its first scale, by which the piece's sum is multiplied.

    chunk: number of inputs that share a scale of the rows, by which the product is multiplied; the inputs must lie
    within one chunk. x_scales may be None.
    References: see `add_product`.
    """
    rows, wide = x[:, pl.ds(first, length)], _widened(codes, first, length, x.dtype)
    step, pieces = min(group, length), []
    piece = step * max(PIECE // step, 1)
    for begin in range(0, length, piece):
        parts, unit = [], None
        for at in range(begin, min(begin + piece, length), step):
            part, scale = wide[at : at + step], scales[pl.ds((first + at) // group, 1), :]
            if unit is None:
                unit = jnp.where(jnp.abs(scale) < _LEAST, _LEAST, scale)
            else:
                part = (part.astype(jnp.float32) * (scale / unit)).astype(wide.dtype)  # rounded once
            parts.append(part)
        matrix = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
        pieces.append((rows[:, begin : begin + piece], matrix, unit))
    row_factors = None if x_scales is None else _column(x_scales, first // chunk)
    for column in range(0, scales.shape[1], PIECE):
        own = slice(column, column + PIECE)
        y = reduce(jnp.add, (_dot(values, matrix[:, own]) * unit[:, own] for values, matrix, unit in pieces))
        total[:, own] += y if row_factors is None else y * row_factors


def _column(array: Any, index: Any) -> jax.Array:
    """Return column `index` (dynamic) of an array [M, n] in VMEM, as [M, 1]."""
    own = lax.broadcasted_iota(jnp.int32, array.shape, 1) == index
    return jnp.sum(jnp.where(own, array[...], 0.0), axis=1, keepdims=True)


def _dot(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return the product of x [M, n] and matrix [n, N]: i32 for int8 operands, else f32."""
    kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(x, matrix, (((1,), (0,)), ((), ())), preferred_element_type=kind)


def _widened(codes: Any, first: Any, length: int, dtype: Any) -> jax.Array:
    """Return the codes of inputs [first, first + length) as [length, N] in `dtype`, which represents them exactly."""
    packed = per_byte(codes.dtype)
    row = first // packed if isinstance(first, int) else pl.multiple_of(lax.div(first, packed), ALIGNED // packed)
    part = codes[pl.ds(row, length // packed), :]
    # Pairs have the layout of four-bit registers: the even input in the low bits.
    part = pltpu.bitcast(part, jnp.int4) if packed == 2 else part
    return part if part.dtype == dtype else part.astype(dtype)

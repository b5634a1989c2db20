"""Grouped product on a Hopper GPU: tiles of rows, each of one group.

The rows of each group are first padded to a multiple of eight, which a product requires, and cut into tiles. The last
tile of a group has the remaining rows, so no tile reads, multiplies or stores rows of two groups. A tile's CTAs read
its group and rows from a list. The number of tiles is known on the device only, and CTAs without a tile end at once.
XLA fuses the copies with the producer of the rows and with the consumer of the result. The kernel is that of
`quantized`; if matrices are gates and ups it activates them, too. Products of experts by blocks are Gale et al.'s
(MegaBlocks, 2022, arXiv:2211.15841).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.cards import card_of_trace
from jaxengine.pallas_kernels.matmul.gated import Gating, activated, say_once
from jaxengine.pallas_kernels.matmul.hopper import gated, quantized, shape
from jaxengine.pallas_kernels.matmul.hopper.shape import BFLOAT16, E4M3, MOST_SHARED_ROWS, Shape, most_rows, step_of
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.xla import grouped as grouped_tiles
from jaxengine.pallas_kernels.matmul.xla import quantized_groups as quantized_groups_xla
from jaxengine.pallas_kernels.tuning import HopperProducts, tuning_of

why_xla = partial(shape.why_xla, grouped=True)
# Number of tiles of an average group from which on tiles of twice the rows pay, although a CTA then has a
# multiprocessor to itself: a product takes longer than reading the matrix, and only the last of many tiles of a group
# is not full.
_MANY_ROWS = 5


def grouped_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: Any,
    sizes: HopperProducts | None = None,
    interpret: Any = False,
    tensor_memory: bool | None = None,
) -> jax.Array:
    """Return rows x [M, in] times their group's matrix of w [G, in, out]: [M, out] in out_dtype, 0 for rows of no
    group. The public operation has checked the arguments.

    XLA computes the product if the kernel does not support it, with a log line that gives the reason, or if the trace
    is for no card with kernels. sizes, interpret, tensor_memory: see
    jaxengine.pallas_kernels.matmul.hopper.quantized.quantized_matmul.
    """
    _, size, out = w.shape
    if _is_xla(interpret, f"[{size}, {out}]", why_xla(size, out, 1, w.dtype, x.dtype)):
        transposed = _multiplies() and w.dtype == BFLOAT16  # as models store them there
        return grouped_tiles.grouped_matmul(x, w, group_sizes, out_dtype=out_dtype, transposed=transposed)
    return _multiply(_Matrix(w), x, None, group_sizes, None, out_dtype, sizes, interpret, tensor_memory)


def gated_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Gating,
    out_dtype: Any,
    sizes: HopperProducts | None = None,
    interpret: Any = False,
    tensor_memory: bool | None = None,
) -> jax.Array:
    """Return activation(gate, up) of rows x [M, in] times their group's matrix of w [G, in, 2 F], gates and then ups,
    plus the group's bias [G, 2 F] or None: [M, F] in out_dtype, 0 for rows of no group.

    The public operation has checked the arguments. If the kernel cannot fuse both steps, `grouped_matmul` and
    `activated` are called one after the other. sizes, interpret and tensor_memory: see
    `grouped_matmul`.
    """
    _, size, out = w.shape
    reason = why_xla(size, out, 1, w.dtype, x.dtype)
    if _is_unfused(interpret, size, out, reason, activation, tensor_memory):
        options: dict[str, Any] = {"sizes": sizes, "interpret": interpret, "tensor_memory": tensor_memory}
        y = grouped_matmul(x, w, group_sizes, out_dtype=out_dtype, **options)
        return activated(y, group_sizes, bias, activation, out_dtype)
    return _multiply(_Matrix(w, bias=bias), x, None, group_sizes, activation, out_dtype, sizes, interpret, False)


def quantized_grouped_matmul(
    operands: QuantizedOperands,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    out_dtype: Any,
    sizes: HopperProducts | None = None,
    interpret: Any = False,
    tensor_memory: bool | None = None,
) -> jax.Array:
    """Return rows x of `operands` times their group's quantised matrix: [M, out] in out_dtype, computed in `dtype`; 0
    for rows of no group.

    The public operation has checked the arguments. XLA computes the product if the kernel does not support it, with a
    log line that gives the reason, or if the trace is for no card with kernels. sizes, interpret and tensor_memory: see
    `grouped_matmul`.
    """
    x, x_scales, codes, scales, zeros = operands
    size, out = x.shape[1], scales.shape[2]
    if _is_xla(interpret, f"[{size}, {out}]", why_xla_of(x, x_scales, codes, scales, dtype)):
        options = {"dtype": dtype, "out_dtype": out_dtype, "transposed": _multiplies()}
        return quantized_groups_xla.quantized_grouped_matmul(operands, group_sizes, **options)
    matrix = _Matrix(codes, scales, zeros)
    return _multiply(matrix, x, x_scales, group_sizes, None, out_dtype, sizes, interpret, tensor_memory)


def quantized_gated_matmul(
    operands: QuantizedOperands,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Gating,
    dtype: Any,
    out_dtype: Any,
    sizes: HopperProducts | None = None,
    interpret: Any = False,
    tensor_memory: bool | None = None,
) -> jax.Array:
    """Return activation(gate, up) of rows x of `operands` times their group's quantised matrix, gates and then ups,
    plus the group's bias [G, 2 F] or None: [M, F] in out_dtype, computed in `dtype`; 0 for rows of no group.

    The public operation has checked the arguments. If the kernel cannot fuse both steps, `quantized_grouped_matmul` and
    `activated` are called one after the other. sizes, interpret and tensor_memory: see
    `grouped_matmul`.
    """
    x, x_scales, codes, scales, zeros = operands
    reason = why_xla_of(x, x_scales, codes, scales, dtype)
    if _is_unfused(interpret, x.shape[1], scales.shape[2], reason, activation, tensor_memory):
        options = {"dtype": dtype, "out_dtype": out_dtype, "sizes": sizes, "interpret": interpret}
        options |= {"tensor_memory": tensor_memory}
        y = quantized_grouped_matmul(operands, group_sizes, **options)
        return activated(y, group_sizes, bias, activation, out_dtype)
    matrix = _Matrix(codes, scales, zeros, bias)
    return _multiply(matrix, x, x_scales, group_sizes, activation, out_dtype, sizes, interpret, False)


class _Matrix(NamedTuple):
    """Operands of groups' matrices, None for absent ones.

    Attributes:
      codes: [G, in, out], or [G, in / 2, out] in pairs; the matrices themselves if they have no scales.
      scales: [G, n, out].
      zeros: [G, n, out].
      bias: [G, out], of gates and ups alone.
    """

    codes: jax.Array
    scales: jax.Array | None = None
    zeros: jax.Array | None = None
    bias: jax.Array | None = None


def why_xla_of(x: Any, x_scales: Any, codes: Any, scales: Any, dtype: Any) -> str:
    """Return the reason why the kernel does not multiply operands of these shapes and dtypes (those of
    QuantizedOperands of groups) in `dtype`, so that XLA does; "" if the kernel does. The reason is one of `why_xla`,
    or that rows have more scales than the matrix.
    """
    _, num_scales, out = scales.shape
    reason = why_xla(x.shape[1], out, num_scales, codes.dtype, dtype)
    if not reason and x_scales is not None and x_scales.shape[1] > num_scales:
        return "rows have more scales than the matrix"
    return reason


def _is_xla(interpret: Any, product: str, reason: str) -> bool:
    """Return whether XLA computes the product: because `reason` is not "", which is logged once, or because the trace
    is for no card with kernels.

    interpret: if it is not False, the kernel runs on any device. product: the product's name in the log.
    """
    if interpret is False and not _multiplies():
        return True
    if reason:
        quantized.log_once(f"{product} of groups: {reason}")
    return bool(reason)


def _is_unfused(
    interpret: Any, size: int, out: int, reason: str, activation: Gating, tensor_memory: bool | None
) -> bool:
    """Return whether the product, by whichever implementation, is written to memory and activated from there.

    reason: why XLA computes the product, "" if it does not. size, out: inputs and outputs of the matrix. interpret,
    tensor_memory: arguments of the public functions. True if `reason` is not "", if the trace is for no card with
    kernels, on Blackwell cards, where one warpgroup has all outputs of a tile, and for an activation that the kernel
    cannot compute, which is logged once.
    """
    if reason or (interpret is False and not _multiplies()) or _on_blackwell(tensor_memory):
        return True
    if why := gated.why_not_fused(out // 2, activation):
        say_once(size, out // 2, why)
    return bool(why)


def _on_blackwell(tensor_memory: bool | None) -> bool:
    """Return `tensor_memory`, or whether the trace is for a Blackwell card if it is None."""
    if tensor_memory is None:
        return (card := card_of_trace()) is not None and card.blackwell
    return tensor_memory


def _multiplies() -> bool:
    """Return whether the trace is for a card with Mosaic GPU kernels for matrix products."""
    return (card := card_of_trace()) is not None and card.multiplies


class Tiles(NamedTuple):
    """Layout of groups' rows in tiles.

    Attributes:
      tiles: i32 [tiles * 3], for each tile its group (-1 if unused), its first position and its number of rows, both in
        units of `step` rows.
      source: i32 [rows of all tiles], the row at each position; any row in padding.
      index: i32 [M], position of each row; undefined for rows of no group.
      is_row: bool [M], whether a row belongs to a group.
    """

    tiles: jax.Array
    source: jax.Array
    index: jax.Array
    is_row: jax.Array


def tiles_of(group_sizes: jax.Array, num_rows: int, tile_rows: int, step: int) -> Tiles:
    """Return the layout of consecutive groups, of i32 [G] rows each and at most num_rows in all, in tiles of at most
    `tile_rows` rows.

    Each group begins at a multiple of `step`, which divides tile_rows.
    """
    num_groups = group_sizes.size
    steps, each = -(-group_sizes // step), -(-group_sizes // tile_rows)
    ends, last_steps, last_tiles = (jnp.cumsum(counts) for counts in (group_sizes, steps, each))
    starts, first_steps = ends - group_sizes, last_steps - steps

    def numbers_and_groups(count: int, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Compared rather than searched: a search is a loop of its own.
        numbers = jnp.arange(count, dtype=jnp.int32)
        groups = jnp.sum(numbers[:, None] >= last, axis=1, dtype=jnp.int32)
        return numbers, jnp.minimum(groups, num_groups - 1)

    tile, group = numbers_and_groups(most_tiles_of(num_rows, num_groups, tile_rows), last_tiles)
    before = (tile - (last_tiles - each)[group]) * (tile_rows // step)
    own = jnp.minimum(steps[group] - before, tile_rows // step)
    tiles = [jnp.where(tile < last_tiles[-1], group, -1), first_steps[group] + before, own]
    number, group = numbers_and_groups(most_rows_of(num_rows, num_groups, step) // step, last_steps)
    begin = starts[group] + (number - first_steps[group]) * step
    source = (begin[:, None] + jnp.arange(step, dtype=jnp.int32)).reshape(-1)
    row, group = numbers_and_groups(num_rows, ends)
    index = row - starts[group] + first_steps[group] * step
    return Tiles(jnp.stack(tiles, axis=1).reshape(-1), source, index, row < ends[-1])


def tile_rows_of(num_rows: int, num_groups: int, most: int) -> int:
    """Return the number of rows of a tile, at most `most`: a power of two from 16 to `MOST_SHARED_ROWS`, just above the
    size of an average group, num_rows / num_groups.

    It is twice MOST_SHARED_ROWS if an average group has at least 2 * _MANY_ROWS * MOST_SHARED_ROWS rows.
    """
    average = max(num_rows // num_groups, 1)
    if average >= _MANY_ROWS * 2 * MOST_SHARED_ROWS:
        return min(2 * MOST_SHARED_ROWS, most)
    return min(max(1 << average.bit_length(), 16), MOST_SHARED_ROWS, most)


def most_rows_of(num_rows: int, num_groups: int, step: int) -> int:
    """Return an upper bound, a multiple of `step`, of the number of rows with padding if num_rows rows are in
    num_groups groups, each of which begins at a multiple of `step`.
    """
    return (num_rows + min(num_rows, num_groups) * (step - 1)) // step * step


def most_tiles_of(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Return an upper bound of the number of tiles of tile_rows rows, however num_rows rows are spread over num_groups
    groups: one tile for each group with rows, and the full ones.
    """
    return min(num_rows, num_groups) + max(num_rows - num_groups, 0) // tile_rows


def _multiply(
    matrix: _Matrix,
    x: jax.Array,
    x_scales: jax.Array | None,
    group_sizes: jax.Array,
    gating: Gating | None,
    out_dtype: Any,
    sizes: HopperProducts | None,
    interpret: Any,
    tensor_memory: bool | None,
) -> jax.Array:
    """Multiply rows x [M, in], with scales x_scales or None, by the matrix of their group in the kernel.

    Returns [M, out] in out_dtype, or with `gating` the activated [M, out / 2]; 0 for rows of no group. sizes: tile
    sizes, None for those of the tuning table. interpret, tensor_memory: see `grouped_matmul`.
    """
    codes, scales, zeros, bias = matrix
    (num_rows, size), (num_groups, _, out) = x.shape, codes.shape
    sizes = tuning_of("gpu").hopper_products if sizes is None else sizes
    num_scales = 1 if scales is None else scales.shape[1]
    tensor_memory = _on_blackwell(tensor_memory)
    most = most_rows(size, num_scales, codes.dtype, sizes.rows, tensor_memory=tensor_memory)
    tile_rows = tile_rows_of(num_rows, num_groups, most)
    step = step_of(tile_rows, tensor_memory=tensor_memory)
    tiles = tiles_of(group_sizes, num_rows, tile_rows, step)
    native = codes.dtype == x.dtype and x.dtype in (E4M3, BFLOAT16)
    of_tiles = Shape(
        tiles.source.size,
        size,
        out if gating is None else out // 2,
        num_scales,
        codes.dtype,
        native,
        zeros is not None,
        x_scales is not None,
        out_dtype,
        # Sums of one CTA: tiles are many, and a row's sum has one order however many there are.
        replace(sizes, rows=tile_rows, num_ctas=1, shared=1),
        tiles=tiles.tiles.size // quantized.TILE,
        has_scales=scales is not None,
        tensor_memory=tensor_memory,
        gating=gating,
    )
    x = x.at[tiles.source].get(mode="clip")
    x_scales = None if x_scales is None else x_scales.at[tiles.source].get(mode="clip")
    y = quantized.multiply(of_tiles, x, x_scales, codes, scales, zeros, tiles.tiles, bias=bias, interpret=interpret)
    return jnp.where(tiles.is_row[:, None], y.at[tiles.index].get(mode="clip"), 0)

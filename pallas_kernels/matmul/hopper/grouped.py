"""Rows of groups, each times a matrix of its own, on a Hopper GPU: tiles of rows that are one group's.

Rows are copied to tiles before, each group's from a new one on, and a tile's CTAs are told their group; how many tiles
have one is known on the device only, and the CTAs of the others end at once. XLA fuses the copies with what makes the
rows and with what reads the result. The kernel is that of `quantized`. Products of experts by blocks are Gale et al.'s
(MegaBlocks, 2022, arXiv:2211.15841).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import grouped_tiles, quantized_groups_xla
from pallas_kernels.matmul.hopper import quantized, shape
from pallas_kernels.matmul.hopper.shape import BFLOAT16, E4M3, MOST_SHARED_ROWS, Shape, most_rows
from pallas_kernels.tuning import HopperProducts, card_of_trace, tuning_of

why_xla = partial(shape.why_xla, grouped=True)
# Of a group on average, from which on a product takes longer than reading the matrix, whatever a tile is: so that half
# a tile at the end of each is a tenth at most.
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
    """[M, out] in out_dtype; arguments as the public operation has checked them.

    sizes: by default those of the table. interpret: see `mosaic_gpu.launch`. tensor_memory: as `quantized_matmul`.
    """
    _, size, out = w.shape
    if _is_xla(interpret, f"[{size}, {out}]", why_xla(size, out, 1, w.dtype, x.dtype)):
        turned = _multiplies() and w.dtype == BFLOAT16  # as models store them there
        return grouped_tiles.grouped_matmul(x, w, group_sizes, out_dtype=out_dtype, turned=turned)
    return _multiply(x, None, w, None, None, group_sizes, out_dtype, sizes, interpret, tensor_memory)


def quantized_grouped_matmul(
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    out_dtype: Any,
    sizes: HopperProducts | None = None,
    interpret: Any = False,
    tensor_memory: bool | None = None,
) -> jax.Array:
    """[M, out] in out_dtype; arguments as `grouped_matmul` has them."""
    (_, num_scales, out), size = scales.shape, x.shape[1]
    reason = why_xla(size, out, num_scales, codes.dtype, dtype)
    if not reason and x_scales is not None and x_scales.shape[1] > num_scales:
        reason = "rows have more scales than the matrix"
    if _is_xla(interpret, f"[{size}, {out}]", reason):
        options = {"dtype": dtype, "out_dtype": out_dtype, "turned": _multiplies()}
        return quantized_groups_xla.quantized_grouped_matmul(x, x_scales, codes, scales, zeros, group_sizes, **options)
    return _multiply(x, x_scales, codes, scales, zeros, group_sizes, out_dtype, sizes, interpret, tensor_memory)


def _is_xla(interpret: Any, product: str, reason: str) -> bool:
    if interpret is False and not _multiplies():
        return True
    if reason:
        quantized.log_once(f"{product} of groups: {reason}")
    return bool(reason)


def _multiplies() -> bool:
    return (card := card_of_trace()) is not None and card.multiplies


class Tiles(NamedTuple):
    """Where rows of groups lie in tiles.

    Attributes:
      groups: i32 [tiles], -1 for those that are no group's.
      source: i32 [tiles * rows of a tile], the row that is there; any row where there is none.
      place: i32 [M], where a row is; anything for one of no group.
      is_row: bool [M], whether a row is of a group.
    """

    groups: jax.Array
    source: jax.Array
    place: jax.Array
    is_row: jax.Array


def tiles_of(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Tiles:
    """The tiles of groups of i32[G] rows, which follow each other."""
    most, last_group = most_tiles_of(num_rows, group_sizes.size, tile_rows), group_sizes.size - 1
    ends = jnp.cumsum(group_sizes)
    each = -(-group_sizes // tile_rows)
    starts, last = ends - group_sizes, jnp.cumsum(each)
    first = last - each
    # Compared rather than searched: a search is a loop of its own.
    tile, row = jnp.arange(most, dtype=jnp.int32), jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile[:, None] >= last, axis=1, dtype=jnp.int32), last_group)
    begin = starts[group] + (tile - first[group]) * tile_rows
    source = (begin[:, None] + jnp.arange(tile_rows, dtype=jnp.int32)).reshape(-1)
    owner = jnp.minimum(jnp.sum(row[:, None] >= ends, axis=1, dtype=jnp.int32), last_group)
    place = row - starts[owner] + first[owner] * tile_rows
    return Tiles(jnp.where(tile < last[-1], group, -1), source, place, row < ends[-1])


def tile_rows_of(num_rows: int, num_groups: int, most: int) -> int:
    """Rows of a tile: a power of two that most groups stay below, of 16 and `MOST_SHARED_ROWS`; or more where they are
    many."""
    average = max(num_rows // num_groups, 1)
    if average >= _MANY_ROWS * 2 * MOST_SHARED_ROWS:
        return min(2 * MOST_SHARED_ROWS, most)
    return min(max(1 << average.bit_length(), 16), MOST_SHARED_ROWS, most)


def most_tiles_of(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Tiles that rows can need however they are spread over the groups: a first one of each, and full ones."""
    return min(num_rows, num_groups) + max(num_rows - num_groups, 0) // tile_rows


def _multiply(
    x: jax.Array,
    x_scales: jax.Array | None,
    codes: jax.Array,
    scales: jax.Array | None,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    out_dtype: Any,
    sizes: HopperProducts | None,
    interpret: Any,
    tensor_memory: bool | None,
) -> jax.Array:
    (num_rows, size), (num_groups, _, out) = x.shape, codes.shape
    sizes = tuning_of("gpu").hopper_products if sizes is None else sizes
    num_scales = 1 if scales is None else scales.shape[1]
    if tensor_memory is None:
        tensor_memory = (card := card_of_trace()) is not None and card.blackwell
    most = most_rows(size, num_scales, codes.dtype, sizes.rows, tensor_memory=tensor_memory)
    tile_rows = tile_rows_of(num_rows, num_groups, most)
    tiles = tiles_of(group_sizes, num_rows, tile_rows)
    native = codes.dtype == x.dtype and x.dtype in (E4M3, BFLOAT16)
    of_tiles = Shape(
        tiles.source.size,
        size,
        out,
        num_scales,
        codes.dtype,
        native,
        zeros is not None,
        x_scales is not None,
        out_dtype,
        # Sums of one CTA: tiles are many, and a row's sum has one order however many there are.
        replace(sizes, rows=tile_rows, num_ctas=1, shared=1),
        num_groups=num_groups,
        has_scales=scales is not None,
        tensor_memory=tensor_memory,
    )
    x = x.at[tiles.source].get(mode="clip")
    x_scales = None if x_scales is None else x_scales.at[tiles.source].get(mode="clip")
    y = quantized.multiply(of_tiles, x, x_scales, codes, scales, zeros, tiles.groups, interpret=interpret)
    return jnp.where(tiles.is_row[:, None], y.at[tiles.place].get(mode="clip"), 0)

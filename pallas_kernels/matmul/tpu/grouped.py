"""Rows of groups, each times a quantised matrix of its own: a Mosaic kernel that reads matrices of groups with rows.

Its work is a list of visits, (group, tile of rows) for each pair that has rows in common, in the order of the rows,
made on the device; the grid is as long as the list, so that time follows the rows and the groups that have some.
Groups meet inside of tiles: a visit keeps what others have written there. The list ends with the tiles behind the last
row, which are cleared. Products of experts by blocks are Gale et al.'s (MegaBlocks, 2022, arXiv:2211.15841).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.matmul import quantized_groups_xla
from pallas_kernels.matmul.grouped_tiles import tile_rows_of
from pallas_kernels.matmul.tpu.quantized import PreparedRows, clear, group_sums, prepared, tiles, vmem_limit
from pallas_kernels.matmul.tpu.widened import add_product, why_not_aligned
from pallas_kernels.tuning import TpuProducts, tuning_of


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
    sizes: TpuProducts | None = None,
    interpret: Any = False,
) -> jax.Array:
    """[M, out] in out_dtype; arguments as the public operation has checked them.

    sizes: by default those of the chip that the trace is for. interpret: what `pl.pallas_call` takes.
    """
    if why_not_aligned(x.shape[1], scales.shape[1], dtype):
        return quantized_groups_xla.quantized_grouped_matmul(
            x, x_scales, codes, scales, zeros, group_sizes, dtype=dtype, out_dtype=out_dtype
        )
    sizes = tuning_of("tpu").tpu_products if sizes is None else sizes
    tile_rows = min(len(x), tile_rows_of(len(x), len(codes)), sizes.group_rows)
    rows = prepared(x, x_scales, codes.dtype, scales.shape[1], dtype, sizes, tile_rows)
    return _call(rows, tile_rows, codes, scales, zeros, group_sizes, out_dtype, sizes, interpret)


class Visits(NamedTuple):
    """What the kernel does, in order; entries past `count` are never read.

    Attributes:
      group, tile: i32[V], of each visit. Behind `products` of them are tiles to clear.
      starts, ends: i32[G], rows of each group.
      products, count: i32[1]
    """

    group: jax.Array
    tile: jax.Array
    starts: jax.Array
    ends: jax.Array
    products: jax.Array
    count: jax.Array


def visits_of(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> Visits:
    """The visits of groups of i32[G] rows, which follow each other."""
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // tile_rows
    each = jnp.where(group_sizes > 0, (ends - 1) // tile_rows - first + 1, 0)
    last = jnp.cumsum(each)
    num_tiles = pl.cdiv(num_rows, tile_rows)
    visit = jnp.arange(num_tiles + group_sizes.size, dtype=jnp.int32)
    # Compared rather than searched: a search is a loop of its own. Visits that clear keep the last one's matrix.
    real = jnp.minimum(visit, jnp.maximum(last[-1] - 1, 0))
    group = jnp.minimum(jnp.sum(real[:, None] >= last, axis=1, dtype=jnp.int32), group_sizes.size - 1)
    used = pl.cdiv(ends[-1], tile_rows)
    tile = jnp.where(visit < last[-1], first[group] + visit - (last - each)[group], used + visit - last[-1])
    tile = jnp.minimum(tile, num_tiles - 1)
    count = last[-1] + num_tiles - used
    return Visits(group, tile, starts, ends, last[-1][None], count[None])


def _call(
    rows: PreparedRows,
    tile_rows: int,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    out_dtype: Any,
    sizes: TpuProducts,
    interpret: Any,
) -> jax.Array:
    (num_rows, size), (num_groups, count, out) = rows.values.shape, scales.shape
    _, columns = tiles(tile_rows, size, out, count, rows.values.dtype, codes.dtype, sizes)
    limit = vmem_limit((tile_rows, columns), rows, codes, scales, zeros, sizes.vmem_limit_bytes)
    visits = visits_of(group_sizes, num_rows, tile_rows)

    def of_rows(array: jax.Array | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        return pl.BlockSpec((tile_rows, array.shape[1]), lambda n, v, _, tile, *__: (tile[v], 0))

    def of_matrices(array: jax.Array | None) -> pl.BlockSpec | None:
        if array is None:
            return None
        return pl.BlockSpec((1, array.shape[1], columns), lambda n, v, group, *_: (group[v], 0, n))

    sums = None if zeros is None else group_sums(rows, count)
    operands = rows.values, rows.scales, rows.after, sums, codes, scales.astype(jnp.float32), zeros
    specs = *map(of_rows, operands[:4]), *map(of_matrices, operands[4:])
    of_codes = (codes.nbytes + scales.nbytes * (1 if zeros is None else 2)) // num_groups
    return pl.pallas_call(
        partial(_body, by_sums=rows.by_sums),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits) - 1,
            grid=(pl.cdiv(out, columns), visits.count[0]),
            in_specs=specs,
            out_specs=pl.BlockSpec((tile_rows, columns), lambda n, v, _, tile, *__: (tile[v], n)),
            scratch_shapes=[pltpu.VMEM((tile_rows, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, out), out_dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size * out,
            bytes_accessed=min(num_rows, num_groups) * of_codes + rows.values.nbytes + 4 * num_rows * out,
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantized_grouped_matmul",
    )(*visits[:-1], *operands)


def _body(
    group,  # SMEM: of visits
    tile,
    starts,
    ends,
    products,
    x,  # VMEM, as in tpu.quantized; matrices with a first axis of one
    x_scales,
    after,
    sums,
    codes,
    scales,
    zeros,
    out,
    total,
    *,
    by_sums: bool,
):
    visit = pl.program_id(1)
    is_first = (visit == 0) | (tile[jnp.maximum(visit - 1, 0)] != tile[visit])

    @pl.when(visit >= products[0])
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when(visit < products[0])
    def _():
        clear(total, sums, None if zeros is None else zeros.at[0])
        add_product(total, x, x_scales, codes.at[0], scales.at[0], by_sums=by_sums)
        y = total[...] if after is None else total[...] * after[...]
        row = tile[visit] * out.shape[0] + lax.broadcasted_iota(jnp.int32, (out.shape[0], 1), 0)
        own = (row >= starts[group[visit]]) & (row < ends[group[visit]])
        others = jnp.where(is_first, 0.0, out[...].astype(jnp.float32))
        out[...] = jnp.where(own, y, others).astype(out.dtype)

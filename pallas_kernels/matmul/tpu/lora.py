"""LoRA addition on TPUs: two Mosaic kernels, rows times A and the result times B, over visits of `lora_visits`.

A visit stacks the matrices of as many slots as fill the columns of a matrix unit, and multiplies a tile of rows with
all of them. A row keeps the columns of its own slot; the others become zeros, which then multiply the other slots' B.
The grids are as long as the list of visits, so that the time follows the number of rows and of slots that they use. The
second kernel adds to y in place and does not touch tiles of rows without adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.matmul.lora import LoraVisits, slots_of_tile, tile_rows_of
from jaxengine.pallas_kernels.matmul.tpu.widened import LANES, SUBLANES
from jaxengine.pallas_kernels.matmul.xla import lora as lora_xla
from jaxengine.pallas_kernels.matmul.xla.dense import matmul
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params
from jaxengine.pallas_kernels.tuning import LoraTiles, Tuning


def lora_product(
    y: jax.Array,
    x: jax.Array,
    a: jax.Array,
    bs: Sequence[jax.Array],
    visits: LoraVisits,
    *,
    modules: tuple[int, ...],
    rank: int,
    sizes: LoraTiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """Return y f32 [T, out] plus (x A) B of each row that has an adapter, computed on a TPU, updating y in place.

    Arguments are those of matmul.lora.lora_product, which has checked them: x [T, in], a [modules * slots * rank, in],
    each of bs [slots * rank, out of a source], modules: for each of bs the module whose A it uses. XLA computes the sum
    if the kernels do not support it (`why_xla`) or the rows are not a multiple of a tile's. sizes: the sizes that the
    visits were made with, None for the default. interpret: argument of `pl.pallas_call`.
    """
    sizes = Tuning().lora_tiles if sizes is None else sizes
    widths = [b.shape[1] for b in bs]
    if len(x) % tile_rows_of(len(x), sizes) or why_xla(x.shape[1], widths, rank, x.dtype):
        return lora_xla.lora_product(y, x, a, bs, visits, modules=modules, rank=rank, sizes=sizes)
    inner = _times_a(x, a, visits, max(modules) + 1, rank, sizes, interpret)
    first = 0
    for module, b in zip(modules, bs, strict=True):
        y = _add_times_b(y, first, inner, module, b, visits, rank, sizes, interpret)
        first += b.shape[1]
    return y


def why_xla(size: int, widths: Sequence[int], rank: int, dtype: jnp.dtype) -> str:
    """Return the reason why the kernels do not support adapters with `size` inputs and sources of `widths` outputs, so
    that XLA computes the product; "" if they do.

    rank: rank of the pool. dtype: dtype of rows and adapters. Reasons: a dtype other than bfloat16, a rank that is not
    a multiple of 16, inputs or outputs that are not multiples of 128.
    """
    if dtype != jnp.bfloat16:
        return "kernels multiply bfloat16"
    if rank % SUBLANES:
        return f"rank {rank} does not fill whole registers"
    if size % LANES or any(width % LANES for width in widths):
        return f"{size} inputs and {', '.join(map(str, widths))} outputs do not fill whole registers"
    return ""


def _of_slots(
    rank: int, columns: int, each: int, row_and_column: Callable, *, visits_first: bool
) -> list[pl.BlockSpec]:
    """Return BlockSpecs [rank, columns], one for each of the `each` slots of a visit's tile, of an array with `rank`
    contiguous rows per slot.

    row_and_column(slot, the grid's other index): returns the block's index. visits_first: whether visits are the grid's
    first dimension.
    """

    def block(at: int) -> pl.BlockSpec:
        def index(first, second, row_tile, slot_tile, slots):
            v, n = (first, second) if visits_first else (second, first)
            return row_and_column(slots[slot_tile[v] * each + at], n)

        return pl.BlockSpec((rank, columns), index)

    return [block(at) for at in range(each)]


def _times_a(
    x: jax.Array, a: jax.Array, visits: LoraVisits, num_modules: int, rank: int, sizes: LoraTiles, interpret
) -> jax.Array:
    """Multiply rows x [T, in] by A of their visits: return bfloat16 [T, modules * columns of all tiles of slots].
    Columns of slots other than the row's own are zeros; tiles without a visit are undefined.

    a: A of all modules and slots, [modules * slots * rank, in]. num_modules: modules of `a`. rank: columns of a slot.
    sizes: the sizes that the visits were made with. interpret: argument of `pl.pallas_call`.
    """
    (num_rows, size), each = x.shape, slots_of_tile(rank, sizes)
    num_slots, num_tiles, columns = len(a) // (num_modules * rank), len(visits.slots) // each, each * rank
    tile_rows = tile_rows_of(num_rows, sizes)
    return pl.pallas_call(
        partial(_times_a_body, rank=rank),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(visits.count[0], num_modules),
            in_specs=[
                pl.BlockSpec((tile_rows, 1), lambda v, m, row_tile, *_: (row_tile[v], 0)),
                pl.BlockSpec((tile_rows, size), lambda v, m, row_tile, *_: (row_tile[v], 0)),
                *_of_slots(rank, size, each, lambda slot, m: (m * num_slots + slot, 0), visits_first=True),
            ],
            out_specs=pl.BlockSpec(
                (tile_rows, columns), lambda v, m, row_tile, slot_tile, _: (row_tile[v], m * num_tiles + slot_tile[v])
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_modules * num_tiles * columns), x.dtype),
        compiler_params=compiler_params(interpret, "arbitrary", "arbitrary", vmem_limit_bytes=sizes.vmem_limit_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * size * num_modules * columns,
            bytes_accessed=min(len(a), num_modules * rank * num_rows) * size * 2 + x.nbytes,
            transcendentals=0,
        ),
        interpret=interpret,
        name="lora_times_a",
    )(visits.row_tile, visits.slot_tile, visits.slots, visits.slot_index[:, None], x, *[a] * each)


def _times_a_body(row_tile, slot_tile, slots, slot_index, x, *a_and_out, rank: int):
    """Body of the first kernel: multiply a visit's rows by A of its slots, of one module, and write the result with
    zeros in the columns of slots other than a row's own.

    row_tile, slot_tile, slots: fields of LoraVisits, in SMEM; others are in VMEM. slot_index: i32 [rows, 1] of the
    rows. x: [rows, in]. a_and_out: A [rank, in] of each slot of the tile, then the result [rows, columns]. rank: a
    power of two.
    """
    *parts, out = a_and_out
    inner = matmul(x[...], _stacked(parts), contract=1)
    column = lax.broadcasted_iota(jnp.int32, inner.shape, 1)
    own = slot_index[...] == slot_tile[pl.program_id(0)] * len(parts) + (column >> int(math.log2(rank)))
    out[...] = jnp.where(own, inner, 0.0).astype(out.dtype)


def _add_times_b(
    y: jax.Array,
    first: int,
    inner: jax.Array,
    module: int,
    b: jax.Array,
    visits: LoraVisits,
    rank: int,
    sizes: LoraTiles,
    interpret,
) -> jax.Array:
    """Add a source's adapters to its columns of y [T, out], which begin at column `first`; return y, updated in place.

    inner: result of `_times_a`, of which the columns of `module` are used. b: B of the source, [slots * rank, columns].
    visits, rank, sizes, interpret: see `_times_a`.
    """
    each = slots_of_tile(rank, sizes)
    columns, num_tiles, tile_rows = each * rank, len(visits.slots) // each, tile_rows_of(len(y), sizes)
    # Blocks divide the source's columns and their offset in y.
    width = math.gcd(first, b.shape[1])
    width = max(w for w in range(LANES, min(width, sizes.width) + 1, LANES) if width % w == 0)
    of_y = pl.BlockSpec((tile_rows, width), lambda n, v, row_tile, *_: (row_tile[v], first // width + n))
    return pl.pallas_call(
        _add_times_b_body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(b.shape[1] // width, visits.count[0]),
            in_specs=[
                of_y,
                pl.BlockSpec(
                    (tile_rows, columns),
                    lambda n, v, row_tile, slot_tile, _: (row_tile[v], module * num_tiles + slot_tile[v]),
                ),
                *_of_slots(rank, width, each, lambda slot, n: (slot, n), visits_first=False),
            ],
            out_specs=of_y,
        ),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        input_output_aliases={3: 0},
        compiler_params=compiler_params(interpret, "parallel", "arbitrary", vmem_limit_bytes=sizes.vmem_limit_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(y) * columns * b.shape[1],
            bytes_accessed=min(len(b), rank * len(y)) * b.shape[1] * 2 + 8 * len(y) * b.shape[1],
            transcendentals=0,
        ),
        interpret=interpret,
        name="lora_times_b",
    )(visits.row_tile, visits.slot_tile, visits.slots, y, inner, *[b] * each)


def _add_times_b_body(row_tile, slot_tile, slots, y, inner, *b_and_out):
    """Body of the second kernel: add a visit's inner [rows, columns] times B of its slots to its tile of the result.
    The first visit of a tile of rows adds to y, later ones to what `out` holds. b_and_out: B [rank, width] of each
    slot, then `out`.
    """
    *parts, out = b_and_out
    visit = pl.program_id(1)
    is_first = (visit == 0) | (row_tile[jnp.maximum(visit - 1, 0)] != row_tile[visit])
    added = matmul(inner[...], _stacked(parts), contract=0)
    out[...] = jnp.where(is_first, y[...], out[...]) + added


def _stacked(parts: Sequence) -> jax.Array:
    """Return the values of references [rank, columns], one per slot, joined along the rows: [slots * rank, columns]."""
    return parts[0][...] if len(parts) == 1 else jnp.concatenate([part[...] for part in parts], axis=0)

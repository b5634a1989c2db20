"""Microscaled rounding on TPUs: a Mosaic kernel that reads rows once and writes them once.

Groups keep their order among a register's 128 lanes. As many columns of registers as a group has inputs are combined
pair by pair, which halves their number each time, until one register holds the largest values of all their groups. The
scales are computed in that register, and each column picks its own from it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxengine.pallas_kernels.matmul.rounding import held_scales, microscaled
from jaxengine.pallas_kernels.matmul.tpu.widened import LANES
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params

# Rows of a tile, and rows that are rounded at a time while the scales of the next ones are computed: scales wait for
# permutations of lanes, and rounding has none.
ROWS, STEP = 256, 64
_ALIGNED = 8  # rows of a full register, of float32 and of bfloat16 as XLA stores it


def microscaled_rows(
    x: jax.Array, global_scale: jax.Array | None, *, group: int, dtype: str, kind: str, interpret: Any = False
) -> jax.Array:
    """Round rows x [M, in] to codes of `dtype` with a scale of `kind` per `group` inputs on a TPU, and return their
    values in x's dtype. matmul.microscaled.microscaled_rows has checked the arguments.

    global_scale: f32 [M, 1] or [1, 1] for kind E4M3, else None. interpret: argument of `pl.pallas_call`.
    """
    num_rows, size = x.shape
    rows, registers = min(pl.cdiv(num_rows, _ALIGNED) * _ALIGNED, ROWS), pl.cdiv(size, LANES)
    columns = pl.cdiv(registers, pl.cdiv(registers, group)) * LANES
    of_rows = pl.BlockSpec((rows, columns), lambda m, n: (m, n))
    operands, specs = (x,), (of_rows,)
    if global_scale is not None:
        one = len(global_scale) == 1
        of_scale = pl.BlockSpec((1 if one else rows, 1), lambda m, n: (0 if one else m, 0))
        operands, specs = (x, global_scale), (of_rows, of_scale)
    return pl.pallas_call(
        partial(_body, group=group, dtype=dtype, kind=kind),
        grid=(pl.cdiv(num_rows, rows), pl.cdiv(size, columns)),
        in_specs=specs,
        out_specs=of_rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=compiler_params(interpret, "parallel", "parallel"),
        cost_estimate=pl.CostEstimate(flops=24 * x.size, bytes_accessed=2 * x.nbytes, transcendentals=0),
        interpret=interpret,
        name="microscaled_rows",
    )(*operands)


def _body(x, *scale_and_out, group: int, dtype: str, kind: str):
    """Body of the kernel: round a tile of rows x [rows, columns] to values of `dtype` with a scale of `kind` per
    `group` columns. scale_and_out: the global scale [rows or 1, 1], if any, and the result, which it writes.
    """
    *global_scale, out = scale_and_out
    num_rows, registers = x.shape[0], x.shape[1] // LANES
    step = min(STEP, num_rows)

    def global_scale_of(rows) -> jax.Array | None:
        return global_scale[0][rows if len(global_scale[0]) > 1 else slice(None)] if global_scale else None

    def part(rows, register: int) -> jax.Array:
        return x[rows, register * LANES : (register + 1) * LANES].astype(jnp.float32)

    def scales(rows) -> jax.Array:
        """Return the scales f32 [rows, LANES] of all groups of some rows: lane n of a group holds the scale of that
        group in register n.
        """
        largest = _combined([jnp.abs(part(rows, register)) for register in range(registers)], group)
        return held_scales(largest, dtype, kind=kind, global_scale=global_scale_of(rows))

    def write(rows, held: jax.Array) -> None:
        first = lax.broadcasted_iota(jnp.int32, held.shape, 1) & -group
        for register in range(registers):
            own = jnp.take_along_axis(held, first + register, axis=1, mode="promise_in_bounds")
            values = microscaled(part(rows, register), own, dtype, global_scale=global_scale_of(rows))
            out[rows, register * LANES : (register + 1) * LANES] = values.astype(out.dtype)

    def rows_of(index):
        # The last step is moved back to end with the tile; rows rounded twice have the same values.
        first = jnp.minimum(index * step, num_rows - step)
        return pl.ds(pl.multiple_of(first, _ALIGNED), step)

    steps = pl.cdiv(num_rows, step)

    def one(index, held):
        later = scales(rows_of(jnp.minimum(index + 1, steps - 1)))
        write(rows_of(index), held)
        return later

    held = scales(rows_of(0))
    held = lax.fori_loop(0, steps - 1, one, held) if steps > 1 else held
    write(rows_of(steps - 1), held)


def _combined(parts: list[jax.Array], group: int) -> jax.Array:
    """Return one array [rows, LANES] with the maximum over each group of `group` lanes of each of up to `group` parts
    [rows, LANES]: lane n of a group holds the maximum of that group in part n. group: a power of two.
    """
    found, lane = dict(enumerate(parts)), lax.broadcasted_iota(jnp.int32, parts[0].shape, 1)
    step = group // 2
    while step:
        # A lane keeps the part whose number has the bit that it has itself, and gives the other to the lane that is
        # `step` away.
        has_bit, there = (lane & step) != 0, lane ^ step
        paired = {}
        for number in [number for number in found if not number & step]:
            zero = found[number]
            one = found.get(number | step, zero)
            given = jnp.take_along_axis(jnp.where(has_bit, zero, one), there, axis=1, mode="promise_in_bounds")
            paired[number] = jnp.maximum(jnp.where(has_bit, one, zero), given)
        found, step = paired, step // 2
    return found[0]

"""Faults of the Hopper kernel for products with quantised matrices and with those of groups."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 45

_KERNEL, _SHAPE, _GROUPS = "matmul/hopper/quantized", "matmul/hopper/shape", "matmul/hopper/grouped"
_RING, _GATED = "matmul/hopper/ring", "matmul/hopper/gated"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("hopper_product", "mgpu", case) for case in cases)


_PAIRS, _SPLIT = _on("pairs in groups of 32, tiles of 64"), _on("one row, inputs split")
_WIDE_GROUP, _NATIVE = _on("a group of several tiles"), _on("e4m3 as it is")
_COARSER, _TILE = _on("int8 rows by coarser groups"), _on("a whole tile of rows")
_BYTES = _on("int8 in groups of 32")


def _of_groups(*cases: str) -> tuple[Job, ...]:
    return tuple(("hopper_grouped", "mgpu", case) for case in cases)


_SEVERAL, _PAIRS_OF_GROUPS = _of_groups("groups of several tiles"), _of_groups("pairs of groups")
_SIZES = _of_groups("tiles of every size")


def _of_both(*cases: str) -> tuple[Job, ...]:
    return tuple(("hopper_gated", "mgpu", case) for case in cases)


_BOTH, _BOTH_SCALED = _of_both("groups of several tiles"), _of_both("pairs of groups")
_PIECES = _of_both("e4m3 of groups, rounded rows")

MUTANTS = [
    Mutant(
        "scales shifted by a group",
        _KERNEL,
        "group = lax.div(tile * shape.inputs, jnp.int32(shape.group))",
        "group = jnp.maximum(lax.div(tile * shape.inputs, jnp.int32(shape.group)) - 1, 0)",
        _NATIVE,
    ),
    Mutant(
        "scales of the tile's first group for all",
        _KERNEL,
        "refs.scales_smem[slot, index, of_own]",
        "refs.scales_smem[slot, 0, of_own]",
        _BYTES,
    ),
    Mutant(
        "sums not scaled",
        _KERNEL,
        "            y = y * lax.broadcast_in_dim(refs.scales_smem[slot, index, of_own], area, [0])\n",
        "",
        _BYTES,
    ),
    Mutant(
        "zeros of the tile's first group for all",
        _KERNEL,
        "refs.zeros_smem[slot, index, of_own]",
        "refs.zeros_smem[slot, 0, of_own]",
        _SPLIT,
    ),
    Mutant(
        "zeros once more for each tile of a group",
        _KERNEL,
        "pl.ds(tile * shape.sums, shape.sums), own_rows",
        "groups, own_rows",
        _WIDE_GROUP,
    ),
    Mutant(
        "scales of rows dropped",
        _KERNEL,
        "                y = y * lax.broadcast_in_dim(refs.row_scales_smem[slot, index, rows_of_tile], area, [1])\n",
        "                y = y * 1\n",
        _NATIVE,
    ),
    Mutant(
        "scales of rows not repeated in order",
        _KERNEL,
        "jnp.repeat(x_scales, count // x_scales.shape[1], axis=1)",
        "jnp.tile(x_scales, (1, count // x_scales.shape[1]))",
        _COARSER,
    ),
    Mutant(
        "sums of rows without their scales",
        _KERNEL,
        "values = x if x_scales is None else RoundedRows",
        "values = x if x_scales is not None else RoundedRows",
        _COARSER,
    ),
    Mutant("low codes without a sign", _KERNEL, "(codes & 15) ^ 8", "codes & 15", _PAIRS),
    Mutant("high codes times 16", _KERNEL, "parts[1] * jnp.bfloat16(1 / 16)", "parts[1] * jnp.bfloat16(1)", _PAIRS),
    Mutant(
        "low and high codes change places",
        _KERNEL,
        "factors[part][:, begin",
        "factors[shape.packed - 1 - part][:, begin",
        _PAIRS,
    ),
    Mutant("every group the first's columns", _KERNEL, "begin = index * columns", "begin = 0", _BYTES),
    Mutant(
        "last tile at its own place and not at the end",
        _KERNEL,
        "y[:, whole + shape.outputs - (shape.out - whole) :]",
        "y[:, whole : shape.out]",
        _SPLIT,
    ),
    Mutant(
        "every tile of rows the first's",
        _KERNEL,
        "pl.ds(part * shape.padded + item.row, rows)",
        "pl.ds(part * shape.padded, rows)",
        _PAIRS,
    ),
    Mutant(
        "every split the first's inputs",
        _KERNEL,
        "first = item.split * shape.per_split",
        "first = item.split * 0",
        _SPLIT,
    ),
    Mutant(
        "an input tile too few",
        _SHAPE,
        "return -(-self.input_tiles // self.per_split)",
        "return self.input_tiles // self.per_split",
        _on("splits of unequal length"),
    ),
    Mutant(
        "tiles not waited for",
        _KERNEL,
        "        plgpu.barrier_wait(refs.full.at[slot])\n        codes",
        "        codes",
        _BYTES,
    ),
    Mutant("tiles overwritten early", _RING, "@pl.when(step >= stages)", "@pl.when(step < 0)", _BYTES),
    Mutant(
        "tiles handed back before they are read",
        _KERNEL,
        "        codes = refs.codes_smem.at[slot, own]\n",
        "        plgpu.barrier_arrive(refs.free.at[slot])\n        codes = refs.codes_smem.at[slot, own]\n",
        _BYTES,
    ),
    Mutant("result not committed", _RING, "[...] = piece\n    plgpu.commit_smem()\n", "[...] = piece\n", _TILE),
    Mutant(
        "result overwritten as it leaves",
        _RING,
        "        plgpu.wait_smem_to_gmem(0)\n        part",
        "        part",
        _TILE,
    ),
    Mutant("result still leaving at the end", _RING, "first)\n    plgpu.wait_smem_to_gmem(0)\n", "first)\n", _TILE),
    Mutant(
        "second part of a tile of rows the first's",
        _RING,
        "total[:, first : first + count]",
        "total[:, :count]",
        _TILE,
    ),
    Mutant(
        "every group the first's matrix",
        _KERNEL,
        "((item.matrix * shape.halves + half) * (shape.out // 8) + start) * 8",
        "start * 8",
        _SEVERAL,
    ),
    Mutant(
        "every group the first's scales",
        _KERNEL,
        "pl.ds(item.matrix * shape.num_scales + group, shape.sums)",
        "pl.ds(group, shape.sums)",
        _PAIRS_OF_GROUPS,
    ),
    Mutant(
        "scales of rows by groups of rows",
        _KERNEL,
        "refs.row_scales_smem, (own_groups, own_rows)",
        "refs.row_scales_smem, (groups, own_rows)",
        _of_groups("e4m3 of groups, rounded rows"),
    ),
    Mutant(
        "tiles of plain matrices not waited for",
        _RING,
        "            plgpu.barrier_wait(full.at[slot])\n",
        "",
        _SEVERAL,
    ),
    Mutant(
        "tiles of plain matrices handed back before they are read",
        _RING,
        "            plgpu.wgmma(accumulator, *factors(slot))\n",
        "            plgpu.barrier_arrive(free.at[slot])\n            plgpu.wgmma(accumulator, *factors(slot))\n",
        _SEVERAL,
    ),
    Mutant("tile handed back before there was one", _RING, "@pl.when(step > 0)", "@pl.when(step >= 0)", _SEVERAL),
    Mutant(
        "every tile the first of its group",
        _GROUPS,
        "before = (tile - (last_tiles - each)[group]) * (tile_rows // step)",
        "before = 0 * tile",
        _SEVERAL,
    ),
    Mutant("a group's last tile left out", _GROUPS, "step), -(-group_sizes", "step), (group_sizes", _SEVERAL),
    Mutant("rows where their group does not begin", _GROUPS, "row - starts[group] +", "row +", _SEVERAL),
    Mutant(
        "first row of the next group taken along",
        _GROUPS,
        "numbers[:, None] >= last",
        "numbers[:, None] > last",
        _SEVERAL,
    ),
    Mutant(
        "rows of no group not cleared",
        _GROUPS,
        'jnp.where(tiles.is_row[:, None], y.at[tiles.index].get(mode="clip"), 0)',
        'y.at[tiles.index].get(mode="clip")',
        _SEVERAL,
    ),
    Mutant("a tile too few", _GROUPS, "tile < last_tiles[-1],", "tile < last_tiles[-1] - 1,", _SEVERAL),
    Mutant(
        "a group's last rows left out", _GROUPS, "each = -(-group_sizes // step)", "each = group_sizes // step", _SIZES
    ),
    Mutant(
        "groups change their rows", _GROUPS, "begin = starts[group] + (n", "begin = ends[group] - step + (n", _SEVERAL
    ),
    Mutant(
        "rows of groups without gaps",
        _GROUPS,
        "begin = starts[group] + (number - first_steps[group])",
        "begin = number",
        _SEVERAL,
    ),
    Mutant(
        "tiles of the next group",
        _GROUPS,
        "jnp.where(tile < last_tiles[-1], group",
        "jnp.where(tile < last_tiles[-1], jnp.minimum(group + 1, num_groups - 1)",
        _SEVERAL,
    ),
    Mutant(
        "every tile a whole one",
        _GROUPS,
        "jnp.minimum(steps[group] - before, tile_rows // step)",
        "0 * before + tile_rows // step",
        _SIZES,
    ),
    Mutant("tiles begin a step late", _KERNEL, "_Work(first * shape.step", "_Work((first + 1) * shape.step", _SIZES),
    Mutant("a product of a step too few", _KERNEL, "item.steps - 1,", "item.steps - 2,", _SIZES),
    Mutant("a product of a step too many", _KERNEL, "item.steps - 1,", "item.steps,", _SIZES),
    Mutant(
        "high codes' rows behind those of a small tile",
        _KERNEL,
        "x_smem.at[slot, pl.ds(part * shape.tile_rows, rows)]",
        "x_smem.at[slot, pl.ds(part * rows, rows)]",
        _PAIRS_OF_GROUPS,
    ),
    Mutant(
        "gates and ups change places",
        _GATED,
        "gating(sums[:, first : first + count], refs.ups_smem[:, pl.ds(first, count)])",
        "gating(refs.ups_smem[:, pl.ds(first, count)], sums[:, first : first + count])",
        _BOTH,
    ),
    Mutant("gates twice", _KERNEL, "(item.matrix * shape.halves + half)", "(item.matrix * shape.halves)", _BOTH),
    Mutant(
        "scales of gates for ups",
        _KERNEL,
        "shape.gating is None else warpgroup",
        "shape.gating is None else 0",
        _BOTH_SCALED,
    ),
    Mutant(
        "tiles of gates too far apart", _KERNEL, "item.out_tile * shape.outputs +", "item.out_tile * OUTPUTS +", _BOTH
    ),
    Mutant("bias of another group", _KERNEL, "pl.ds(item.matrix * 2, 2)", "pl.ds(0 * item.matrix, 2)", _BOTH),
    Mutant(
        "bias of the first outputs", _KERNEL, "2, 2), outputs], refs.bias", "2, 2), pl.ds(0, 64)], refs.bias", _BOTH
    ),
    Mutant("bias of gates for ups", _GATED, "refs.bias_smem[warpgroup]", "refs.bias_smem[0 * warpgroup]", _BOTH),
    Mutant("bias not waited for", _GATED, "        plgpu.barrier_wait(refs.bias_full)\n", "", _BOTH),
    Mutant("ups not waited for", _GATED, "        plgpu.barrier_wait(refs.ups_full)\n", "", _BOTH),
    Mutant("ups not committed", _GATED, "        plgpu.commit_smem()\n", "", _BOTH),
    Mutant(
        "ups of the first rows for all",
        _GATED,
        "refs.ups_smem[:, pl.ds(first, count)])",
        "refs.ups_smem[:, pl.ds(0, count)])",
        _PIECES,
    ),
    Mutant("gates of the first rows for all", _GATED, "sums[:, first : first + count]", "sums[:, :count]", _PIECES),
    Mutant("every piece sent to the first rows", _GATED, "send(part, first)", "send(part, 0)", _PIECES),
    Mutant(
        "pieces on top of each other",
        _GATED,
        "refs.y_smem.at[warpgroup, pl.ds(first, count)]",
        "refs.y_smem.at[warpgroup, pl.ds(0, count)]",
        _PIECES,
    ),
    Mutant("result of both still leaving", _GATED, "        plgpu.wait_smem_to_gmem(0)\n", "", _BOTH),
]

"""Faults of what Hopper cards add for adapters; those of the ring that it shares are in gpu_products."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 45

_KERNELS, _SHAPE = "matmul/hopper/lora", "matmul/hopper/lora_shape"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("lora_product", "mgpu", case) for case in cases)


_MANY, _RUNS = _on("decodes of many, Hopper"), _on("runs that share tiles, Hopper")
_ALL = _on("a tile of all rows")

MUTANTS = [
    Mutant(
        "rows of others' tiles of slots kept",
        _KERNELS,
        "refs.inner_smem[own] * lax.broadcast_in_dim(has.astype(BFLOAT16), area, [0])",
        "refs.inner_smem[own] * lax.broadcast_in_dim((has * 0 + 1).astype(BFLOAT16), area, [0])",
        _RUNS,
    ),
    Mutant(
        "rows of others' slots kept",
        _KERNELS,
        "is_own & (slot_index >= 0)[:, None]",
        "(slot_index >= 0)[:, None]",
        _RUNS,
    ),
    Mutant("rows without adapters not cleared", _KERNELS, "is_own & (slot_index >= 0)[:, None]", "is_own", _RUNS),
    Mutant(
        "slots of A shifted by one", _KERNELS, "tile * shape.each + at]) *", "tile * shape.each + at] + 1) *", _RUNS
    ),
    Mutant(
        "slots of A in one's place",
        _KERNELS,
        "refs.a_smem.at[slot, pl.ds(at * shape.rank, shape.rank)]",
        "refs.a_smem.at[slot, pl.ds(0, shape.rank)]",
        _RUNS,
    ),
    Mutant("A of the first module for all", _KERNELS, "(module * num_slots + refs", "(0 * num_slots + refs", _RUNS),
    Mutant(
        "every tile's slots of B the first's",
        _KERNELS,
        "refs.slots[tile * shape.each + at] * (shape",
        "refs.slots[at] * (shape",
        _ALL,
    ),
    Mutant(
        "slots of B in one's place",
        _KERNELS,
        "refs.b_smem.at[slot, half, pl.ds(at * shape.rank, shape.rank)]",
        "refs.b_smem.at[slot, half, pl.ds(0, shape.rank)]",
        _RUNS,
    ),
    Mutant(
        "both halves of the outputs the first",
        _KERNELS,
        "column * COLUMNS + half * WARPGROUP_ROWS, WARPGROUP_ROWS)]",
        "column * COLUMNS, WARPGROUP_ROWS)]",
        _ALL,
    ),
    Mutant(
        "what the first module's A gives for all",
        _KERNELS,
        "pl.ds(module * COLUMNS, COLUMNS)",
        "pl.ds(0 * module, COLUMNS)",
        _RUNS,
    ),
    Mutant(
        "sources behind the second overlap it",
        _KERNELS,
        "end = begin + width // COLUMNS",
        "end = 2 + width // COLUMNS",
        _RUNS,
    ),
    Mutant(
        "every tile of rows the first's",
        _KERNELS,
        "rows = refs.visits.row_tile[visit] * shape.tile_rows",
        "rows = refs.visits.row_tile[visit] * 0",
        _MANY,
    ),
    Mutant("every split the first's inputs", _KERNELS, "first = split * shape.per_split", "first = split * 0", _MANY),
    Mutant(
        "the last split's inputs left out",
        _SHAPE,
        "return -(-self.size // (self.inputs * self.per_split))",
        "return self.size // (self.inputs * self.per_split)",
        _MANY,
    ),
    Mutant(
        "parts of sums not added up", _KERNELS, "own % shape.each], axis=0)", "own % shape.each][:1], axis=0)", _MANY
    ),
    Mutant("the last visit left out", _KERNELS, "@pl.when(visit < count[0])", "@pl.when(visit < count[0] - 1)", _MANY),
    Mutant(
        "a tile of rows has the next one's visits",
        _KERNELS,
        "(visits.row_tile < tile) &",
        "(visits.row_tile <= tile) &",
        _RUNS,
    ),
    Mutant("visits there are none of", _KERNELS, " & (index < visits.count)", "", _RUNS),
    Mutant(
        "rows not waited for",
        _KERNELS,
        "        plgpu.barrier_wait(refs.ready.at[jnp.int32(0)])\n",
        "",
        _RUNS,
    ),
    Mutant(
        "tiles of B not waited for",
        _KERNELS,
        "            plgpu.barrier_wait(refs.full.at[slot])\n            for part",
        "            for part",
        _RUNS,
    ),
    Mutant(
        "tiles of B handed back before they are read",
        _KERNELS,
        "            plgpu.barrier_wait(refs.full.at[slot])\n            for part",
        "            plgpu.barrier_wait(refs.full.at[slot])\n"
        "            plgpu.barrier_arrive(refs.free.at[slot])\n            for part",
        _RUNS,
    ),
    Mutant(
        "result overwritten as it leaves",
        _KERNELS,
        "            plgpu.wait_smem_to_gmem(0)\n            refs.added_smem",
        "            refs.added_smem",
        _ALL,
    ),
    Mutant(
        "the second 64 rows of a tile the first",
        _KERNELS,
        "own = pl.ds(part * WARPGROUP_ROWS, WARPGROUP_ROWS)",
        "own = pl.ds(0 * part, WARPGROUP_ROWS)",
        _ALL,
    ),
]

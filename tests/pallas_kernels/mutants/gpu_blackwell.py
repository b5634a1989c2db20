"""Faults of what Blackwell cards do with a tile of a product; the rest of the kernel is `gpu_products`'."""

from __future__ import annotations

from tests.pallas_kernels.findings import NO_TCGEN05
from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 45
UNLESS = NO_TCGEN05

_TILE, _KERNEL = "matmul/blackwell/tile", "matmul/hopper/quantized"


def _on(case: str, check: str = "hopper_product") -> tuple[Job, ...]:
    return ((check, "mgpu-blackwell", case),)


_PAIRS, _SPLIT = _on("pairs in groups of 32, tiles of 64"), _on("one row, inputs split")
_BYTES, _NATIVE, _WHOLE = _on("int8 in groups of 32"), _on("e4m3 as it is"), _on("a whole tile of rows")
_PLAIN = _on("groups of several tiles", "hopper_grouped")
_FULL, _DONE = "plgpu.barrier_wait(refs.full.at[slot])\n", "        plgpu.barrier_wait(refs.done.at[bank])\n"

MUTANTS = [
    Mutant("tiles not waited for", _TILE, f"        {_FULL}        if", "        if", _NATIVE),
    Mutant("tiles of plain matrices not waited for", _TILE, f"        {_FULL}        x", "        x", _PLAIN),
    Mutant(
        "widened codes not committed",
        _TILE,
        " = factor\n            plgpu.commit_smem()\n",
        " = factor\n",
        _BYTES,
    ),
    Mutant("widened codes of all steps in one place", _TILE, "bank * shape.packed + part] = f", "part] = f", _BYTES),
    Mutant(
        "low and high codes meet the same rows", _TILE, "pl.ds(part * shape.tile_rows, rows)", "pl.ds(0, rows)", _PAIRS
    ),
    Mutant("high codes' product alone", _TILE, "accumulate=part > 0", "accumulate=False", _PAIRS),
    Mutant("a sum that nothing began", _TILE, "accumulate=step > 0", "accumulate=True", _PLAIN),
    Mutant("last tile alone", _TILE, "accumulate=step > 0", "accumulate=False", _PLAIN),
    Mutant("every group the first's columns", _TILE, "pl.ds(index * columns, columns)", "pl.ds(0, columns)", _BYTES),
    Mutant(
        "sums of all steps in one place",
        _TILE,
        ".at[:, pl.ds((bank * shape.sums + index) * rows, rows)]",
        ".at[:, pl.ds(index * rows, rows)]",
        _NATIVE,
    ),
    Mutant("sums read before they are made", _TILE, _DONE, "", _NATIVE),
    Mutant(
        "sums of plain matrices read before they are made",
        _TILE,
        "    plgpu.barrier_wait(refs.done.at[0])\n",
        "",
        _PLAIN,
    ),
    Mutant("sums overwritten as they are read", _TILE, "        plgpu.wait_load_tmem()", "        pass", _NATIVE),
    Mutant(
        "tiles handed back before they are read",
        _TILE,
        _DONE,
        f"        plgpu.barrier_arrive(refs.free.at[slot])\n{_DONE}",
        _NATIVE,
    ),
    Mutant(
        "scales of the tile's first group for all", _TILE, "scales_smem[slot, index],", "scales_smem[slot, 0],", _BYTES
    ),
    Mutant(
        "zeros of the tile's first group for all", _TILE, "zeros_smem[slot, index],", "zeros_smem[slot, 0],", _SPLIT
    ),
    Mutant("every piece the first's columns", _TILE, "pl.ds(begin + first, ", "pl.ds(begin, ", _WHOLE),
    Mutant(
        "sums of rows of the first piece for all", _TILE, "own_rows = pl.ds(first, ", "own_rows = pl.ds(0, ", _WHOLE
    ),
    Mutant("result overwritten as it leaves", _TILE, "staged.at[index % 2, ", "staged.at[0, ", _WHOLE),
    Mutant("result not waited for", _TILE, "        plgpu.wait_smem_to_gmem(1)\n", "", _WHOLE),
    Mutant("result not committed", _TILE, "        plgpu.commit_smem()\n        send", "        send", _WHOLE),
    Mutant("result still leaving at the end", _TILE, "    plgpu.wait_smem_to_gmem(0)", "    pass", _WHOLE),
    Mutant(
        "every tile of rows the first's",
        _KERNEL,
        "rows = pl.ds(item.row + begin, ",
        "rows = pl.ds(begin, ",
        _PAIRS,
    ),
]

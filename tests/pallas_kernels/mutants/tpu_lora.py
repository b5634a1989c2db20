"""Faults of what the TPU adds for adapters."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 60

_OP, _KERNELS = "matmul/lora", "matmul/tpu/lora"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("lora_product", "tpu-lazy", case) for case in cases)


_MANY, _RUNS = _on("decodes of many"), _on("runs that share tiles")

MUTANTS = [
    Mutant("rows of others' slots kept", _KERNELS, "jnp.where(own, inner, 0.0)", "inner", _MANY),
    Mutant(
        "slots shifted by one",
        _KERNELS,
        "row_and_column(slots[slot_tile[v] * each + at], n)",
        "row_and_column(slots[slot_tile[v] * each + at] + 1, n)",
        _MANY,
    ),
    Mutant(
        "slots of the first tile for all",
        _KERNELS,
        "slots[slot_tile[v] * each + at]",
        "slots[at]",
        _MANY,
    ),
    Mutant("slots of a tile in one's place", _KERNELS, "slot_tile[v] * each + at", "slot_tile[v] * each", _MANY),
    Mutant(
        "columns of the first tile's slots",
        _KERNELS,
        "slot_tile[pl.program_id(0)] * len(parts) + (column",
        "(column",
        _MANY,
    ),
    Mutant(
        "half of a slot's columns",
        _KERNELS,
        "column >> int(math.log2(rank))",
        "column >> int(math.log2(rank) - 1)",
        _MANY,
    ),
    Mutant("A of the first module for all", _KERNELS, "m * num_slots + slot, 0", "slot, 0", _MANY),
    Mutant(
        "what the first module's A gives for all",
        _KERNELS,
        "module * num_tiles + slot_tile[v]",
        "slot_tile[v]",
        _MANY,
    ),
    Mutant("sources begin where the first does", _KERNELS, "first // width + n)", "n)", _MANY),
    Mutant("sources behind the second overlap it", _KERNELS, "first += b.shape[1]", "first = b.shape[1]", _RUNS),
    Mutant("every visit begins anew", _KERNELS, "jnp.where(is_first, y[...], out[...])", "y[...]", _MANY),
    Mutant(
        "later tiles of rows begin with what was there",
        _KERNELS,
        "(visit == 0) | (row_tile",
        "(visit == 0) & (row_tile",
        _MANY,
    ),
    Mutant(
        "a tile of rows begins with the one before",
        _KERNELS,
        "(visit == 0) | (row_tile[jnp.maximum(visit - 1, 0)] != row_tile[visit])",
        "visit == 0",
        _RUNS,
    ),
    Mutant(
        "the last visit left out",
        _KERNELS,
        "grid=(b.shape[1] // width, visits.count[0])",
        "grid=(b.shape[1] // width, visits.count[0] - 1)",
        _RUNS,
    ),
    Mutant(
        "rows without adapters have the first slot's",
        _OP,
        "jnp.where(slots >= 0, order_of_slot[jnp.maximum(slots, 0)], -1)",
        "order_of_slot[jnp.maximum(slots, 0)]",
        _RUNS,
    ),
    Mutant(
        "the last tile of slots left out",
        _OP,
        "-(-min(num_slots, num_rows) // each)",
        "min(num_slots, num_rows) // each",
        _MANY,
    ),
    Mutant(
        "visits out of order",
        _OP,
        "jnp.argsort(~meets.ravel(), stable=True)",
        "jnp.argsort(meets.ravel(), stable=True)",
        _RUNS,
    ),
    Mutant(
        "the last slot's tile filled with the first",
        _OP,
        "jnp.argsort(first).astype",
        "jnp.argsort(-first).astype",
        _MANY,
    ),
]

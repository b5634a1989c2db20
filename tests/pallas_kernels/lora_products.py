"""What adapters add to products, in every implementation, against float64; rows without an adapter to the bit."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.matmul.hopper.lora_shape import why_xla
from jaxengine.pallas_kernels.matmul.lora import LoraVisits, lora_visits
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import LoraTiles
from tests.pallas_kernels import reference
from tests.pallas_kernels.conformance import watched
from tests.pallas_kernels.implementations import Implementation

# Several tiles of rows, of slots and of outputs in small problems.
SMALL = LoraTiles(rows=16, columns=32, width=128)
ERROR = {"float32": 1e-6, "bfloat16": 4e-3}  # of the largest; x A is rounded once


class Product(NamedTuple):
    """Rows [T, size] of adapters in `slots` of `num_slots`, -1 for none, on sources of these outputs and modules."""

    slots: tuple[int, ...]
    size: int = 128
    widths: tuple[int, ...] = (256, 128)
    modules: tuple[int, ...] = (0, 1)
    num_slots: int = 20
    rank: int = 16
    sizes: LoraTiles = SMALL


def _runs(*runs: tuple[int, int]) -> tuple[int, ...]:
    """Slots of (slot, rows) one behind the other."""
    return tuple(slot for slot, count in runs for _ in range(count))


MIXED = tuple((7 * row) % 19 if row % 5 else -1 for row in range(48))
QUICK = {
    "decodes of many": Product(
        tuple((7 * row) % 37 if row % 5 else -1 for row in range(80)),
        widths=(640, 128, 128, 128),
        modules=(0, 1, 2, 3),
        num_slots=37,
    ),
    "runs that share tiles": Product(
        _runs((3, 20), (-1, 9), (19, 1), (0, 16), (3, 2)), widths=(256, 128, 128), modules=(0, 1, 0)
    ),
}
MORE = {
    "one of them, none, and a tile of none": Product(_runs((-1, 17), (19, 1), (-1, 30)), modules=(0, 0)),
    "no adapters at all": Product((-1,) * 8, widths=(128,), modules=(0,)),
    "one row": Product((7,), widths=(384, 128, 128), modules=(0, 1, 2)),
    "a tile for each slot": Product(MIXED[:20], rank=32, widths=(128,), modules=(0,)),
}
OF_XLA = {"rows that fill no tiles": Product(MIXED[:43])}
THOROUGH = {
    f"{rows} rows, rank {rank}": Product(
        tuple(np.random.default_rng(rows).integers(-1, 64, rows).tolist()),
        size=512,
        widths=(1024, 256, 256),
        modules=(0, 1, 2),
        num_slots=64,
        rank=rank,
        sizes=LoraTiles(),
    )
    for rows in (1, 64, 320)
    for rank in (16, 64, 256)
}
# A tile of slots has 128 columns there; several tiles of rows, of slots, of inputs and of outputs.
_FEW_ROWS = LoraTiles(rows=16)
HOPPER_QUICK = {
    "decodes of many, Hopper": Product(
        tuple((3 * row) % 34 if row % 16 else -1 for row in range(32)), 1152, (256,), (0,), 34, 32, _FEW_ROWS
    ),
    "runs that share tiles, Hopper": Product(
        _runs((3, 50), (-1, 9), (19, 1), (0, 1)), 128, (256, 128, 128, 128), (0, 1, 2, 3), 20, 64, _FEW_ROWS
    ),
}
HOPPER_MORE = {
    "a tile of all rows": Product(
        tuple((3 * row) % 10 if row % 7 else -1 for row in range(78)), 512, (128,), (0,), 10, 64, LoraTiles()
    ),
    "three rows of rank 8": Product((7, -1, 2), widths=(128,), modules=(0,), rank=8, sizes=LoraTiles()),
    "no adapters at all, Hopper": Product((-1,) * 8, widths=(128,), modules=(0,), sizes=LoraTiles()),
    "rank 128": Product(MIXED[:20], rank=128, widths=(128,), modules=(0,), sizes=LoraTiles()),
    "rows that fill no tiles, Hopper": Product(MIXED[:43], sizes=_FEW_ROWS),
    "tiles of 160 rows": Product(_runs((3, 150), (-1, 20), (1, 150)), widths=(128,), modules=(0,), sizes=LoraTiles()),
}
HOPPER = HOPPER_QUICK | HOPPER_MORE
PRODUCTS = QUICK | MORE | OF_XLA | THOROUGH | HOPPER


def lora_product(name: str, implementation: Implementation) -> None:
    """One case in bfloat16, as accelerators have it."""
    check(name, "bfloat16", implementation)


def check(name: str, dtype: str, implementation: Implementation) -> None:
    case = PRODUCTS[name]
    rng, num_rows, slots = np.random.default_rng(len(case.slots)), len(case.slots), np.asarray(case.slots)
    num_modules = max(case.modules) + 1
    x = jnp.asarray(rng.standard_normal((num_rows, case.size)), dtype)
    a = jnp.asarray(rng.standard_normal((num_modules, case.num_slots, case.rank, case.size)) * case.size**-0.5, dtype)
    bs = [jnp.asarray(rng.standard_normal((case.num_slots, case.rank, width)), dtype) for width in case.widths]
    y = jnp.asarray(rng.standard_normal((num_rows, sum(case.widths))), jnp.float32)
    unused = jnp.asarray(~np.isin(np.arange(case.num_slots), slots))  # what nobody has is not read
    a = jnp.where(unused[:, None, None], jnp.nan, a)
    bs = [jnp.where(unused[:, None, None], jnp.nan, b) for b in bs]
    x64, a64, bs64 = np.asarray(x, np.float64), np.asarray(a, np.float64), [np.asarray(b, np.float64) for b in bs]
    wanted = reference.lora_product(x64, a64, bs64, slots, case.modules)
    # Rows without an adapter may hold anything.
    x = jnp.where(slots[:, None] < 0, jnp.nan, x)
    if implementation.platform == "gpu" and name in HOPPER:
        assert not why_xla(case.size, case.widths, case.rank, x.dtype), "the kernels do not take it"
    options = {"modules": case.modules, "rank": case.rank, "sizes": case.sizes, **implementation._options()}
    with watched(implementation, name):
        visits = visits_of(jnp.asarray(slots, jnp.int32), case)
        stacked = a.reshape(-1, case.size), [b.reshape(-1, b.shape[2]) for b in bs]
        run = jax.jit(partial(kernel("lora_product", implementation.platform), **options))
        got = np.asarray(jax.block_until_ready(run(y, x, *stacked, visits)))
    assert (got.dtype, got.shape) == (np.float32, y.shape)
    np.testing.assert_array_equal(got[slots < 0], np.asarray(y)[slots < 0])
    error = np.abs(got - np.asarray(y, np.float64) - wanted).max() / max(np.abs(wanted).max(), 1e-9)
    assert error < ERROR[dtype] or not wanted.any(), f"{error:.1e}, not {ERROR[dtype]}"


def visits_of(slots: jax.Array, case: Product) -> LoraVisits:
    return lora_visits(slots, num_slots=case.num_slots, rank=case.rank, sizes=case.sizes)

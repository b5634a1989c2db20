"""How much the quick cases have of everything that kernels count: what is too small shows no fault of a large count.

The rule: at least four of each; more than 32 groups, slots and scales, as a table may hold that many; more steps than a
ring has stages; and blocks of 64 keys of which 57 to 63 are seen. `mutants/counters.py` has a fault for each counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from jaxengine.pallas_kernels.attention.hopper.schedule import DECODE_KEYS, head_tiles
from jaxengine.pallas_kernels.matmul.hopper.lora_shape import Shape as LoraShape
from jaxengine.pallas_kernels.matmul.hopper.shape import BFLOAT16, E4M3, Shape
from jaxengine.pallas_kernels.matmul.lora import slots_of_tile
from jaxengine.pallas_kernels.matmul.lora import tile_rows_of as lora_tile_rows_of
from jaxengine.pallas_kernels.matmul.tpu.grouped import shape_of
from jaxengine.pallas_kernels.matmul.tpu.quantized import tiles
from jaxengine.pallas_kernels.tuning import HopperAttention, HopperProducts
from tests.pallas_kernels import hopper_products, lora_products, microscaled, products
from tests.pallas_kernels.cases import BY_NAME
from tests.pallas_kernels.checks import NUM_SLOTS, SLOTS
from tests.pallas_kernels.implementations import IMPLEMENTATIONS, MOSAIC_GPU, TPU_LAZY
from tests.pallas_kernels.problems import Case
from tests.pallas_kernels.products import GroupedProduct, Product
from tests.pallas_kernels.state.problems import BATCHES
from tests.pallas_kernels.test_interpreted import quick_groups
from tests.tables import each_row

LEAST, TABLE = 4, 32
TAILS = 3  # of one case: 57, 61 and 63

Counts = dict[str, int]


def most(rows: Iterable[Counts]) -> Counts:
    """The largest count of each counter."""
    found: Counts = {}
    for row in rows:
        found = {name: max(found.get(name, 0), row.get(name, 0)) for name in found | row}
    return found


def _cuts(size: int, tile: int) -> int:
    return -(-size // tile)


def tpu_product(case: Product) -> Counts:
    scales, rounded = case.size // case.group, case.rounded is not None and case.row_group > 0
    rows, columns = tiles(case.rows, case.size, case.out, scales, jnp.bfloat16, jnp.dtype(case.codes), case.sizes)
    by_sums = case.rows <= min(case.sizes.sum_rows, case.group // 2)
    return {
        "scales of sums > 32": by_sums * scales,
        "scales of weights > 32": (not by_sums) * scales,
        "zeros > 32": case.zeros * scales,
        "scales of rows > 32": case.size // case.row_group if rounded else 0,
        "tiles of rows": _cuts(case.rows, rows),
        "tiles of columns": _cuts(case.out, columns),
    }


def tpu_groups(problem: GroupedProduct, gated: bool) -> Counts:
    sizes, case = problem
    out = case.out // 2 if gated else case.out
    if gated and out % 128:
        return {}
    scales = 0 if case.codes == "bfloat16" else case.size // case.group
    x = jnp.int8 if case.rounded == "int8" else jnp.bfloat16
    given = case.rows, case.size, out, scales, len(sizes), x, jnp.dtype(case.codes), case.sizes
    shape = shape_of(*given, gated=gated)
    return {
        **({"groups > 32": len(sizes)} if gated else {}),  # of both, gates and none, biases are found alike
        "strips": _cuts(out, shape.columns),
        "pieces of a strip": shape.columns // shape.piece,
        "tiles of rows": _cuts(case.rows, shape.rows),
        "blocks of a visit": _cuts(min(max(sizes), shape.rows), shape.blocks[-1]),
    }


def hopper_shape(case: Product, num_tiles: int = 0) -> Shape:
    native = jnp.dtype(case.codes) == E4M3 and case.rounded == "float8_e4m3fn"
    has_scales, scales = case.codes != BFLOAT16, case.size // case.group
    has = native, case.zeros, case.rounded is not None, jnp.dtype(jnp.float32)
    given = case.rows, case.size, case.out, scales, jnp.dtype(case.codes), *has, case.sizes
    return Shape(*given, tiles=num_tiles, has_scales=has_scales)


def hopper_product(case: Product) -> Counts:
    shape = hopper_shape(case)
    return {
        "scales > 32": shape.num_scales,
        "zeros > 32": case.zeros * shape.num_scales,
        "scales of rows > 32": (case.row_group > 0) * shape.num_scales,
        "tiles of outputs": shape.out_tiles,
        "tiles of rows": shape.row_tiles,
        "tiles of inputs": shape.input_tiles,
        "splits": shape.splits,
        "sums of a tile": shape.sums,
        "stages": shape.stages,
        "steps behind a ring of four": (shape.per_split - shape.stages) * (shape.stages >= LEAST),
    }


def hopper_groups(problem: GroupedProduct) -> Counts:
    sizes, case = problem
    plain = case.codes == BFLOAT16
    shape = hopper_shape(case, len(sizes))
    return {
        "groups of matrices as they are > 32": plain * len(sizes),
        "groups of codes > 32": (not plain) * len(sizes),
        "tiles of outputs": shape.out_tiles,
        "tiles of a group": _cuts(max(sizes), shape.tile_rows),
        "stages": shape.stages,
        "steps behind a ring of four": (shape.per_split - shape.stages) * (shape.stages >= LEAST),
    }


def hopper_gates(problem: GroupedProduct) -> Counts:
    sizes, case = problem
    return {
        "groups with biases > 32": (case.rounded is None) * len(sizes),
        "tiles of outputs": _cuts(case.out // 2, 64),
        "pieces of a tile": _cuts(min(max(sizes), case.sizes.rows), 16),
    }


def lora(case: lora_products.Product) -> Counts:
    each, rows = slots_of_tile(case.rank, case.sizes), lora_tile_rows_of(len(case.slots), case.sizes)
    used = len({slot for slot in case.slots if slot >= 0})
    strip = min(case.widths[0], case.sizes.width)
    return {
        "slots > 32": max(case.slots) + 1,
        "tiles of slots": _cuts(used, each),
        "tiles of rows": _cuts(len(case.slots), rows),
        "sources": len(case.widths),
        "modules": max(case.modules) + 1,
        "strips of outputs": sum(case.widths) // min(strip, 128),
    }


def hopper_lora(case: lora_products.Product) -> Counts:
    each = slots_of_tile(case.rank, case.sizes)
    used = len({slot for slot in case.slots if slot >= 0})
    given = len(case.slots), case.size, case.widths, case.modules, case.rank, _cuts(used, each), case.sizes
    shape = LoraShape(*given, HopperProducts())
    return lora(case) | {"tiles of inputs": shape.size // shape.inputs}


def rounded_rows(case: microscaled.Rows) -> Counts:
    registers = _cuts(case.size, 128)
    return {
        "tiles of columns": _cuts(registers, _cuts(registers, _cuts(registers, case.group))),
        "tiles of rows": _cuts(case.rows, 256),
        "steps of a tile": _cuts(min(case.rows, 256), 64),
        "scales > 32": case.size // case.group,
    }


def attention_cases(implementation: str) -> Iterator[Case]:
    one = IMPLEMENTATIONS[implementation]
    for name in {job[2] for group in quick_groups() for job in group if job[:2] == ("attention", implementation)}:
        case = one.adapted(BY_NAME[name])
        if one.refuses(case, "bfloat16") is None and (one.elsewhere is None or one.elsewhere(case, "bfloat16") is None):
            yield case


def attention(case: Case) -> Counts:
    nearly = [kv_len for kv_len in case.kv_lens if 57 <= kv_len % DECODE_KEYS <= 63]
    latent, long = case.values_in_keys, case.num_tokens > case.max_seqs
    return {
        "sequences": len(case.kv_lens),
        "kv heads": (not latent) * case.heads[1],
        "kv heads with scales of their own": (case.kv_dtype is not None) * case.heads[1],
        "tiles of heads": latent * head_tiles(case.spec),
        "blocks of latents": latent * _cuts(max(case.kv_lens, default=0), DECODE_KEYS),
        "blocks of 128 keys": (not latent) * _cuts(max(case.kv_lens, default=0), 128),
        "pages of a sequence": _cuts(max(case.kv_lens, default=0), case.page_size),
        "nearly full blocks of latents": latent * len(nearly),
        "nearly full blocks of decodes": (not latent and not long) * len(nearly),
        "nearly full blocks of runs": (not latent and long) * any(kv_len % 128 > 120 for kv_len in nearly) * LEAST,
    }


def update(slots: str) -> Counts:
    return {"windows of new tokens": _cuts(len(SLOTS[slots]), 8), "pages": NUM_SLOTS // 16}


def states(counts: tuple[int, ...]) -> Counts:
    return {"sequences": len(counts), "chunks of 64": _cuts(max(counts), 64), "tail": (max(counts) % 64 >= 57) * LEAST}


KERNELS = {
    "product, TPU": most(map(tpu_product, products.QUICK.values())),
    "grouped product, TPU": most(tpu_groups(case, False) for case in products.QUICK_GROUPED.values()),
    "gated product, TPU": most(tpu_groups(case, True) for case in products.QUICK_GATED.values()),
    "adapters, TPU": most(map(lora, lora_products.QUICK.values())),
    "rounded rows, TPU": most(map(rounded_rows, microscaled.QUICK.values())),
    "product, Hopper and Blackwell": most(map(hopper_product, hopper_products.QUICK.values())),
    "grouped product, Hopper and Blackwell": most(map(hopper_groups, hopper_products.QUICK_GROUPS.values())),
    "gated product, Hopper": most(map(hopper_gates, hopper_products.QUICK_GATED.values())),
    "adapters, Hopper": most(map(hopper_lora, lora_products.HOPPER_QUICK.values())),
    "attention, Hopper": most(map(attention, attention_cases(MOSAIC_GPU.name))),
    "attention, TPU": most(map(attention, attention_cases(TPU_LAZY.name))),
    "write, TPU": most(map(update, SLOTS)),
    "states": most(states(batch.counts) for batch in BATCHES.values()),
}
# What a platform has no tiles of, a difference, and loops that the product without gates shares.
SMALLER = {
    ("gated product, TPU", "blocks of a visit"): 2,
    ("attention, TPU", "tiles of heads"): 1,
    ("product, Hopper and Blackwell", "steps behind a ring of four"): 1,
    ("grouped product, Hopper and Blackwell", "steps behind a ring of four"): 1,
}


def least(kernel: str, name: str) -> int:
    """How much some quick case of a kernel must have of a counter."""
    if "> 32" in name:
        return TABLE + 1
    return SMALLER.get((kernel, name), TAILS if name.startswith("nearly full") else LEAST)


@each_row("kernel", KERNELS)
def test_quick_cases_have_enough_of_everything(kernel):
    few = {name: count for name, count in KERNELS[kernel].items() if count < least(kernel, name)}
    assert not few, f"too few: {few}"


def test_partial_results_are_more_than_the_merge_has_in_flight():
    """checks.many_parts itself compares its parts with the ring."""
    assert [("many_parts", MOSAIC_GPU.name)] in quick_groups()
    assert HopperAttention().merge_stages >= LEAST

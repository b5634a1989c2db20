"""What adapters add to a product: which slots are visited, plain XLA against float64, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.lora import LoraVisits, grouped_form, lora_product, lora_visits, tile_rows_of
from jaxengine.pallas_kernels.matmul.tpu.lora import why_xla
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import LoraTiles
from tests.pallas_kernels import lora_products
from tests.pallas_kernels.implementations import CPU
from tests.pallas_kernels.lora_products import MIXED, MORE, OF_XLA, PRODUCTS, QUICK, THOROUGH, Product, visits_of

IMPLEMENTATIONS = {kernel("lora_product", "cpu"): "cpu"}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in (*QUICK, *MORE, *OF_XLA)), ("decodes of many", "bfloat16")]
)
def test_against_float64(name, dtype):
    lora_products.check(name, dtype, CPU)


@pytest.mark.thorough("the same program in larger shapes")
@pytest.mark.parametrize("name", THOROUGH)
def test_against_float64_in_shapes_that_are_served(name):
    lora_products.check(name, "bfloat16", CPU)


@pytest.mark.parametrize("name", [*QUICK, *MORE])
def test_visits_are_the_tiles_that_rows_and_slots_share(name):
    case, slots = PRODUCTS[name], np.asarray(PRODUCTS[name].slots)
    visits = LoraVisits(*map(np.asarray, visits_of(jnp.asarray(slots, jnp.int32), case)))
    used = list(dict.fromkeys(slots[slots >= 0].tolist()))  # in the order of their first rows
    each, tile_rows = max(case.sizes.columns // case.rank, 1), min(len(slots), case.sizes.rows)
    np.testing.assert_array_equal(visits.slot_index, [used.index(slot) if slot >= 0 else -1 for slot in slots])
    assert visits.slots[: len(used)].tolist() == used
    assert set(visits.slots[len(used) :].tolist()) <= set(used[-1:] or [visits.slots[0]])
    wanted = sorted({(row // tile_rows, used.index(slot) // each) for row, slot in enumerate(slots) if slot >= 0})
    count = int(visits.count[0])
    assert list(zip(visits.row_tile[:count].tolist(), visits.slot_tile[:count].tolist(), strict=True)) == wanted
    assert len(visits.slots) % each == 0 and len(visits.row_tile) >= count


def test_the_operation_is_the_platforms_own():
    case = MORE["one row"]
    a, y = jnp.ones((3 * 320, 128)), jnp.zeros((1, 640))
    bs = [jnp.ones((320, width)) for width in case.widths]
    visits = lora_visits(jnp.asarray([7], jnp.int32), num_slots=20, rank=16)
    got = jax.jit(lora_product, static_argnames=("modules", "rank"))(
        y, jnp.ones((1, 128)), a, bs, visits, modules=case.modules, rank=16
    )
    np.testing.assert_array_equal(got, np.full((1, 640), 128.0 * 16))
    with pytest.raises(ValueError, match=r"must agree, got \[\(1, 640\), \(1, 64\), "):
        lora_product(y, jnp.ones((1, 64)), a, bs, visits, modules=case.modules, rank=16)
    with pytest.raises(ValueError, match="must all be bfloat16 or float32, got float32, bfloat16, float32"):
        lora_product(y, jnp.ones((1, 128)), a.astype("bfloat16"), bs, visits, modules=case.modules, rank=16)


def test_the_platform_compiled_for_decides():
    slots = jnp.asarray(MIXED, jnp.int32)
    x, a, bs = jnp.zeros((48, 128), "bfloat16"), jnp.zeros((320, 128), "bfloat16"), [jnp.zeros((320, 128), "bfloat16")]
    run = jax.jit(lambda *given: lora_product(*given, lora_visits(slots, num_slots=20, rank=16), modules=(0,), rank=16))
    traced = run.trace(jnp.zeros((48, 128)), x, a, bs)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_what_the_tpus_kernels_leave_to_xla():
    assert not why_xla(4096, (4096, 1024, 1024), 16, jnp.bfloat16)
    assert "multiply bfloat16" in why_xla(4096, (4096,), 16, jnp.float32)
    assert "rank 8 does not fill" in why_xla(4096, (4096,), 8, jnp.bfloat16)
    assert "4096 inputs and 688 outputs do not fill" in why_xla(4096, (688,), 16, jnp.bfloat16)
    assert grouped_form("tpu", 4096, (688,), 16, jnp.bfloat16).startswith("matmul.xla.lora: 4096 inputs")
    assert [tile_rows_of(rows, LoraTiles()) for rows in (1, 8, 256, 320, 1536, 257)] == [1, 8, 256, 160, 256, 256]


def test_a_row_does_not_depend_on_the_others():
    """Bit for bit: the same rows of the same adapters among others, in another tile and behind others' slots."""
    case = Product(MIXED, num_slots=20, sizes=LoraTiles(rows=16, columns=32))
    rng = np.random.default_rng(0)
    x, a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((48, 64), (320, 64), (320, 48)))
    function = kernel("lora_product", "cpu")

    @jax.jit
    def run(x, slots):
        options = {"modules": (0,), "rank": 16, "sizes": case.sizes}
        return function(jnp.zeros((48, 48)), x, a, [b], visits_of(slots, case), **options)

    together = run(x, jnp.asarray(MIXED, jnp.int32))
    few = jnp.where(jnp.arange(48) < 3, jnp.roll(jnp.asarray(MIXED, jnp.int32), -21), -1)
    np.testing.assert_array_equal(run(jnp.roll(x, -21, axis=0), few)[:3], together[21:24])

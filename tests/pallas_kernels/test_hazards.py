"""What the lint of Mosaic GPU kernels says of TMA loads and of tensor memory, told of operations one by one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.pallas_kernels import findings
from tests.pallas_kernels.findings import FITTED_TO, IS_FITTED

if not IS_FITTED:
    pytest.skip(f"the interpreters' additions are fitted to jax {', '.join(FITTED_TO)}", allow_module_level=True)

from tests.pallas_kernels import faster_interpreters
from tests.pallas_kernels import mosaic_gpu_hazards as hazards
from tests.pallas_kernels.mosaic_gpu_memory import Place, overlap, within, without


class Warpgroup:
    """As mosaic_gpu_memory.Where, of one block."""

    block = "block"

    def __init__(self, name: str) -> None:
        self.warpgroup = self.block, name

    def line(self) -> str:
        return "a line"


LOADER, READER = Warpgroup("loader"), Warpgroup("reader")
FULL, FREE = (np.array([number]) for number in (1, 2))
WHOLE, FIRST, LAST, MIDDLE = (), (slice(0, 4),), (slice(4, 8),), (slice(2, 6), slice(0, 8))


@pytest.fixture(autouse=True)
def nothing_before(monkeypatch):
    monkeypatch.setattr(hazards, "place_of", lambda key, transforms: Place(key, transforms, None))
    hazards.clear()
    findings.clear()
    yield
    hazards.clear()
    findings.clear()


def load(part, barrier=FULL, by=LOADER):
    hazards.on_load(by, "buffer", part, barrier, shape=(8, 8))


def read(part, by=READER):
    hazards.on_read(by, "buffer", part)


def wait(barrier=FULL, by=READER):
    hazards.on_barrier_wait(by, barrier)


def found() -> list[str]:
    return [each.removesuffix(" without a wait for the TMA load into it at a line") for each in findings.found()]


@pytest.mark.parametrize("part", [FIRST, LAST, MIDDLE])
def test_a_load_into_a_part_leaves_the_rest_of_an_earlier_one(part):
    load(WHOLE)
    wait(FULL, LOADER)
    load(part, FREE)
    wait(FREE)
    read(part)
    assert found() == []  # what the reader waited for has all of it
    read(WHOLE)
    assert found() == ["shared memory read"]


def test_what_loads_have_covered_by_and_by_is_forgotten():
    load(WHOLE)
    wait(FULL, LOADER)
    for part in (FIRST, LAST):
        load(part, FREE)
    wait(FREE)
    read(WHOLE)
    assert found() == []


def test_nobody_writes_where_a_load_is_on_its_way():
    load(FIRST)
    hazards.on_write(READER, "buffer", LAST)
    assert found() == []
    hazards.on_write(READER, "buffer", MIDDLE)
    assert found() == ["shared memory written"]
    findings.clear()
    wait()
    hazards.on_write(READER, "buffer", MIDDLE)
    assert found() == []


def test_nobody_loads_where_a_load_is_on_its_way():
    """The loader knows of it by the barrier that it waits for, or by who has waited for it."""
    load(FIRST)
    load(LAST)
    assert found() == []
    load(MIDDLE)
    assert found() == ["shared memory loaded into"]
    findings.clear()
    hazards.clear()
    load(FIRST)
    wait()
    hazards.on_arrive(READER, FREE)
    wait(FREE, LOADER)
    load(FIRST)
    assert found() == []


@pytest.mark.parametrize(("written", "awaited", "is_found"), [(FIRST, False, 1), (LAST, False, 0), (FIRST, True, 0)])
def test_products_write_tensor_memory_whose_loads_have_been_awaited(written, awaited, is_found):
    hazards.on_tensor_load(READER, "sums", FIRST)
    if awaited:
        hazards.on_tensor_load_wait(READER)
    hazards.on_tensor_product(READER, ("sums", written), [], None)
    assert ["without wait_load_tmem" in each for each in findings.found()] == [True] * is_found


@pytest.mark.parametrize("observed", [True, False])
def test_somebody_waits_for_the_last_arrival_at_a_barrier(observed):
    hazards.end_of_barrier(observed)
    assert ["that nobody waits for" in each for each in findings.found()] == [True] * (not observed)


def test_parts_are_what_is_left():
    """Counted element by element."""
    size, rng = 6, np.random.default_rng(0)

    def drawn() -> Place:
        ends = [sorted(rng.choice(size + 1, 2, replace=False).tolist()) for _ in range(int(rng.integers(3)))]
        return Place("buffer", tuple(slice(*pair) if rng.random() < 0.7 else pair[0] for pair in ends), None)

    def counted(places: list[Place]) -> np.ndarray:
        counts = np.zeros((size, size), np.int32)
        for place in places:
            counts[place.range] += 1
        return counts

    for _ in range(300):
        one, other = drawn(), drawn()
        has, covered = counted([one]), counted([other])
        assert (counted(without(one, other)) == has * (1 - covered)).all()
        assert (counted([within(one, (size, size))]) == has).all()
        assert overlap([one], other) == (has * covered).any()


def test_clocks_are_ordered_where_no_thread_has_seen_less():
    order = {(1, 1): "same", (1, 2): "before", (2, 2): "before", (0, 1): "after", (0, 2): "apart", (2, 0): "apart"}
    for other, expected in order.items():
        clocks = np.array([1, 1], np.int32), np.array(other, np.int32)
        assert faster_interpreters._ordered(*clocks) == (expected in ("before", "after")), other
        assert faster_interpreters._before(*clocks) == (expected == "before"), other

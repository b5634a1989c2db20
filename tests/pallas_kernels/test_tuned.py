"""The table of tuned sizes: the nearest entry, what is said of it, what there is to try out, and the file itself."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxengine.commands.tune import merged, table_text
from jaxengine.pallas_kernels import tuned
from jaxengine.pallas_kernels.matmul.candidates import Problem
from jaxengine.pallas_kernels.registry import product_candidates
from jaxengine.pallas_kernels.tuned_products import TABLE
from jaxengine.pallas_kernels.tuning import HopperProducts, TpuProducts

ROWS = (
    (8, 4096, 6144, 128, "uint8", {}),
    (64, 4096, 6144, 128, "uint8", {"stages": 4}),
    (64, 14336, 4096, 128, "uint8", {"rows": 64}),
    (8, 4096, 6144, 32, "int8", {"stages": 3}),
)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(tuned, "TABLE", {"sm_90": ROWS})
    tuned._say_once.cache_clear()
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        yield


@pytest.mark.parametrize(
    ("rows", "size", "out", "group", "codes", "sizes"),
    [
        (64, 4096, 6144, 128, "uint8", {"stages": 4}),
        (100, 4096, 28672, 64, "uint8", {"stages": 4}),
        (2048, 28672, 8192, 128, "uint8", {"rows": 64}),
        (1, 4096, 4096, 128, "uint8", {}),
        (1, 4096, 4096, 128, "int8", {"stages": 3}),
        (1, 4096, 4096, 128, "float8_e4m3fn", {}),
    ],
)
def test_a_shape_takes_the_nearest_entry_of_its_codes(table, rows, size, out, group, codes, sizes):
    found = tuned.product_sizes("gpu", rows, size, out, size // group, jnp.dtype(codes))
    assert found == replace(HopperProducts(), num_ctas=132, **sizes)


def test_a_shape_without_an_entry_is_told_once(table, caplog):
    with caplog.at_level(logging.INFO, "jaxengine.pallas_kernels"):
        for rows, out in ((8, 6144), (16, 4096), (32, 4096)):
            tuned.product_sizes("gpu", rows, 4096, out, 32, jnp.dtype("uint8"))
    assert [record.getMessage() for record in caplog.records] == [
        "sm_90: products [4096, 4096] are not tuned, sizes of [4096, 6144] are taken (jaxengine tune)"
    ]


def test_a_chip_that_is_not_known_has_the_usual_sizes(table):
    device = AbstractDevice(device_kind="NVIDIA B200", num_cores=148, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        assert tuned.product_sizes("gpu", 64, 4096, 6144, 32, "uint8") == HopperProducts(num_ctas=148)
        assert tuned.tuning_of("gpu").hopper_attention.num_ctas == 148  # of the mesh, not of a card of this machine


@pytest.mark.parametrize("chip", TABLE)
def test_the_table_has_sizes_that_there_are(chip):
    usual = HopperProducts() if chip == "sm_90" else TpuProducts()
    for entry in (tuned.Entry(*row) for row in TABLE[chip]):
        assert set(entry.sizes) <= {field.name for field in fields(usual)} and replace(usual, **entry.sizes)
        assert entry.size % entry.group == 0


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_candidates_have_the_usual_sizes_among_them_and_an_estimate(platform, rows):
    choices = product_candidates(platform)
    assert choices is not None
    found = list(choices(Problem(rows, 4096, 6144, 128, "uint8", True)))
    assert [candidate.sizes for candidate in found].count({}) == 1 < len(found)
    told = {"bundles": 1000, "registers": 80, "spill_bytes": 0, "bandwidth": 3e12, "clock": 1.7e9}
    for candidate in found:
        cost, slower = candidate.cost(told), candidate.cost(told | {"clock": 0.1e9})
        assert cost is not None and slower is not None and 4096 * 6144 / 2 / 3e12 * 1e6 < cost < slower
        assert candidate.cost({}) is None
        if platform == "gpu":
            assert candidate.cost(told | {"spill_bytes": 8}) is None


def test_a_written_table_is_read_back(tmp_path):
    found = [
        {"problem": (64, 4096, 6144, 128, "uint8", True), "sizes": {"rows": 32}, "best": 1.0},
        {"problem": (8, 64, 128, 64, "uint8", True), "sizes": {}, "best": 1.0},
        {"problem": (9, 64, 128, 64, "uint8", True), "sizes": {}, "best": None},
    ]
    entries = merged(ROWS, found)
    path = tmp_path / "written.py"
    path.write_text(table_text({"sm_90": entries, "v6e": ()}))
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {"sm_90": entries, "v6e": ()} == module.TABLE
    sizes = {entry[:5]: entry[5] for entry in entries}
    assert len(sizes) == len(ROWS) + 1 and sizes[64, 4096, 6144, 128, "uint8"] == {"rows": 32}

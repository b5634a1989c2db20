"""The grid's bill: padding and lost time from shapes that can be checked by hand, and a simulation that runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.harness import main
from benchmarks.pages import padding
from jaxengine.config.base.platforms import PLATFORMS

PLATFORM = dataclasses.replace(PLATFORMS["gpu"], max_num_seqs=8, max_num_batched_tokens=64)
# Weights cost 1 s a step, tokens 1 s each, logits nothing.
ROOFLINE = padding.Roofline(bytes_per_s=1e30, flops_per_s=16.1e9)


def test_padding_is_counted_by_kind_and_lost_time_by_load():
    steps = np.array([[3, 3], [4, 4], [10, 2]])  # decode of 3 in a bucket of 4, of 4 in 4; mixed 10 in 64
    row = padding.evaluate(PLATFORM, [4], [], [steps, steps[1:2], steps[2:]], ROOFLINE, (20.0, 50.0))
    assert row["programs"] == 3 and row["minutes"] == 1.5  # two for decodes, one mixed
    assert row["decode_padding"] == pytest.approx(100 * (12 - 11) / 11, abs=0.1)
    assert row["mixed_padding"] == pytest.approx(100 * (128 - 20) / 20, abs=0.1)
    assert row["lost_low"] == pytest.approx(100 * (72 / 17 - 1), abs=0.02)
    assert row["lost_middle"] == 0 and row["lost_full"] == pytest.approx(540, abs=0.1)


def test_steps_below_the_ridge_cost_the_weights_alone():
    roofline = padding.Roofline(bytes_per_s=16.1e9, flops_per_s=16.1e9 * 100)
    one, many = roofline.step_s(np.array([1, 200]), np.array([0, 0]))
    assert one == pytest.approx(1.0) and many == pytest.approx(2.0)


def test_the_simulation_gives_steps_that_every_grid_holds():
    steps = padding.simulate(PLATFORM, 1.2, 200)
    assert len(steps) == 200 and steps[:, 0].max() <= 64 and steps[:, 1].max() == 8
    assert (steps[:, 0] >= steps[:, 1]).all() and (steps[:, 0] > steps[:, 1]).any()
    idle = padding.simulate(PLATFORM, 0.03, 200)
    assert idle[:, 1].mean() < steps[:, 1].mean() / 2


def test_what_a_grid_takes_to_compile_is_what_check_found(tmp_path):
    def row(program, seconds):
        return {"program": program, "step": not program.startswith("kv"), "compile_s": seconds}

    rows = [row("decode S=1", 10.0), row("decode S=8", 20.0), row("mixed T=64 S=8", 40.0), row("kv write", 1000.0)]
    (tmp_path / "check.json").write_text(json.dumps({"rows": rows}))
    assert padding.compile_seconds(str(tmp_path / "check.json")) == (15.0, 40.0)


def test_the_recommendation_is_the_smallest_grid_that_is_good_at_every_load():
    names = ("lost_low", "lost_middle", "lost_full")
    rows = [
        {"grid": "fine", "programs": 30, **dict.fromkeys(names, 1.0)},
        {"grid": "good", "programs": 9, **dict.fromkeys(names, 1.9)},
        {"grid": "bad when full", "programs": 4, **dict.fromkeys(names, 1.0), "lost_full": 40.0},
    ]
    assert padding.recommend(rows, 1.0)["grid"] == "good"


def test_it_writes_the_rows_and_the_recommendation(tmp_path, capsys):
    path = tmp_path / "padding.json"
    assert main(["padding", "--steps", "60", "--save", str(path)]) == 0
    found = json.loads(path.read_text())
    assert "recommended" in capsys.readouterr().out
    for name in ("gpu", "tpu"):
        grids = [row["grid"] for row in found["rows"] if row["platform"] == name]
        assert found[name]["recommended"] in grids and "defaults" in grids
